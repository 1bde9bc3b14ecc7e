"""Code that does the same whenever it is given the same, as far as its bytecode tells.

Most ``forward`` methods call the modules that they hold and compute with what comes out. Where one reads nothing but its
arguments, settings of modules and functions of torch, and is never told a number in a tensor, it has no choice.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Hashable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt.entries import PLAIN, Entries
from ocnopt.games.flow import Entry, Flow, values_in

#: what an instruction may do beside computing with what is at hand. Whatever else there is (closures, imports, contexts,
#: assignments to attributes) may bring in something, or leave it behind
_INSTRUCTIONS = frozenset(
    """
    BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_TUPLE
    CACHE CALL CALL_FUNCTION_EX CALL_KW COMPARE_OP CONTAINS_OP COPY DICT_MERGE END_FOR EXTENDED_ARG FOR_ITER GET_ITER
    IS_OP JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD KW_NAMES LIST_APPEND LIST_EXTEND LIST_TO_TUPLE LOAD_ATTR
    LOAD_COMMON_CONSTANT LOAD_CONST LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW
    LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SMALL_INT NOP NOT_TAKEN POP_ITER
    POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE
    POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RESUME
    RETURN_CONST RETURN_VALUE STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP TO_BOOL UNARY_INVERT
    UNARY_NEGATIVE UNARY_NOT UNPACK_SEQUENCE
    """.split()
)

#: operations whose result follows from their arguments, and its shape from theirs
_NAMES = """
    abs add addcmul addmm avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d
    baddbmm bmm cat celu chunk clamp clamp_min clamp_max concat contiguous cos cumsum div einsum elu exp expand flatten
    float gelu glu hardsigmoid hardswish hardtanh interpolate layer_norm leaky_relu log log_softmax logsigmoid logsumexp
    matmul max_pool1d max_pool2d max_pool3d mean mish mm mul narrow neg normalize pad permute pixel_shuffle pow relu
    relu6 repeat reshape rms_norm rsqrt rsub scaled_dot_product_attention selu sigmoid silu sin softmax softplus
    softsign split sqrt square squeeze stack std sub sum t tanh transpose true_divide unbind unflatten unsqueeze
    var view view_as
    __add__ __iadd__ __imul__ __isub__ __itruediv__ __matmul__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rsub__
    __rtruediv__ __sub__ __truediv__
""".split()
_OPERATIONS = frozenset(
    function
    for name in (variant for each in _NAMES for variant in (each, f"{each}_"))
    for space in (torch, F, Tensor, torch._C._nn)
    if callable(function := getattr(space, name, None))
)

#: of tensors, and no number in them is told
_PROPERTIES = Tensor.shape, Tensor.ndim, Tensor.dtype, Tensor.device, Tensor.requires_grad
QUERIES = frozenset(each.__get__ for each in _PROPERTIES) | {  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point,
}  # fmt: skip

#: what may be read by a global name
_FUNCTIONS = _OPERATIONS | {*filter(callable, vars(math).values()), Tensor, nn.Module} | {
    getattr(builtins, name)
    for name in "abs bool enumerate float int isinstance len list max min range reversed sum tuple zip".split()
}  # fmt: skip
_TORCHS_OWN = frozenset(vars(nn.Module()))
#: names of a class that say nothing about what its instances do when they run
_DESCRIPTIONS = frozenset(
    """
    __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __constants__ __dict__ __doc__
    __firstlineno__ __init__ __module__ __orig_bases__ __parameters__ __qualname__ __repr__ __static_attributes__
    __weakref__
    """.split()
)
_ASKS = "LOAD_ATTR", "LOAD_METHOD"


def is_constant(value: Any) -> bool:
    """Can it not be changed without being replaced?"""
    return all(map(is_constant, value)) if isinstance(value, tuple) else isinstance(value, PLAIN)


class Code:
    """The code of modules that are not torch's own, and what it may depend on."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = dict.fromkeys(map(type, modules))
        self._attributes = [(kind, "forward") for kind in kinds]
        self._globals: list[tuple[dict[str, Any], str]] = []
        self.is_plain = not any(map(_is_special, kinds)) and all(self._follow(kinds))
        self._known, self._entries = self._now(), Entries(self._globals)

    def holds(self) -> bool:
        """Is it what it was?"""
        return self._now() == self._known and self._entries.untouched()

    def _now(self) -> list[Any]:
        found = [getattr(kind, name, None) for kind, name in self._attributes]
        return [getattr(each, "__code__", each) for each in found]

    def _follow(self, kinds: Iterable[type]) -> Iterator[bool]:
        """Is each function plain that may be called from another?"""
        todo, seen = [getattr(*attribute) for attribute in self._attributes], set()
        while todo:
            function = todo.pop()
            if function in seen:
                continue
            seen.add(function)
            called = _called(function, self._globals)
            yield called is not None
            functions, names = called or ([], set())
            todo += functions
            for kind, name in ((kind, name) for kind in kinds for name in names & _own_names(kind)):
                self._attributes.append((kind, name))
                if not is_constant(value := getattr(kind, name)):
                    todo.append(value)


def _own_names(kind: type) -> set[str]:
    """What a module has from its class, but for what it has from torch's."""
    return {name for each in kind.__mro__ if not _is_torchs(each) and each is not object for name in vars(each)}


def _is_special(kind: type) -> bool:
    """Does it do something else than other modules when it is called, or asked for an attribute?"""
    own = _own_names(kind) - _DESCRIPTIONS
    return bool(own & {"_call_impl", "_wrapped_call_impl"}) or any(name.startswith("__") for name in own)


def _called(function: Any, found: list[tuple[dict[str, Any], str]]) -> tuple[list[Any], set[str]] | None:
    """The functions that one reads by name, and the names of all attributes that it asks for; ``None`` if it may depend
    on anything else. ``found``: gets the global names that it reads.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    if not is_constant(function.__defaults__) or not is_constant(tuple((function.__kwdefaults__ or {}).values())):
        return None
    functions, names = [], set()
    instructions = iter(list(dis.get_instructions(function)))
    for instruction in instructions:
        if instruction.opname not in _INSTRUCTIONS:
            return None
        if instruction.opname in _ASKS:
            names.add(str(instruction.argval))
        if instruction.opname != "LOAD_GLOBAL":
            continue
        name = str(instruction.argval)
        if name in function.__globals__:
            found.append((function.__globals__, name))
        value = _value(function.__globals__.get(name, getattr(builtins, name, None)), instructions)
        if isinstance(value, FunctionType) and not _is_torchs(value):
            functions.append(value)
        elif not _is_known(value):
            return None
    return functions, names


def _value(value: Any, following: Iterator[dis.Instruction]) -> Any:
    """What is read by a global name: ``torch.nn.functional.relu`` is an attribute of an attribute of an attribute."""
    while isinstance(value, ModuleType) and (asks := next(following)).opname in _ASKS:
        value = getattr(value, str(asks.argval), None)
    return value


def _is_known(value: Any) -> bool:
    return is_constant(value) or (callable(value) and isinstance(value, Hashable) and value in _FUNCTIONS)


def _is_torchs(what: FunctionType | type) -> bool:
    return (what.__module__ or "").partition(".")[0] == "torch"


def has_constants_only(module: nn.Module) -> bool:
    """Are all settings that somebody's code has given a module what they are until they are replaced?"""
    return all(is_constant(value) for name, value in vars(module).items() if name not in _TORCHS_OWN)


def has_no_choice(flow: Flow) -> bool:
    """Does plain code that did this do it whenever it is given the like? It was told no number in a tensor, and no shape
    that depends on one.
    """
    return not flow.asks and all(_is_sure(entry) for entry in flow.entries if entry.kind == "operation")


def _is_sure(entry: Entry) -> bool:
    if entry.target is Tensor.__getitem__:  # a mask picks as many numbers as it likes
        return not values_in(entry.args[1:])
    return entry.target in _OPERATIONS
