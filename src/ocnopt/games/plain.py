"""Code that does the same whenever it is given the same, as far as its bytecode tells.

Most ``forward`` methods call the modules that they hold and compute with what comes out. Where one reads nothing but
its arguments, settings of modules and functions of torch, and is never told a number in a tensor, it has no choice.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt.entries import PLAIN, Entries
from ocnopt.games.flow import Flow, Overwriting


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: instructions that compute with what is at hand, or ask for more. Whatever else there is (closures, imports, contexts,
#: assignments to attributes) may bring in something, or leave it behind
_INSTRUCTIONS = _words(
    """
    BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_TUPLE CALL
    CALL_FUNCTION_EX CALL_KW COMPARE_OP CONTAINS_OP COPY DICT_MERGE END_FOR EXTENDED_ARG FOR_ITER GET_ITER IS_OP
    JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_APPEND
    LIST_EXTEND LIST_TO_TUPLE LOAD_ASSERTION_ERROR LOAD_ATTR LOAD_COMMON_CONSTANT LOAD_CONST LOAD_FAST
    LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST
    LOAD_GLOBAL LOAD_METHOD LOAD_SMALL_INT NOP NOT_TAKEN POP_ITER POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE
    POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE
    POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RAISE_VARARGS RESUME RETURN_CONST RETURN_VALUE STORE_FAST
    STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNPACK_SEQUENCE
    """
)
_ASKS = "LOAD_ATTR", "LOAD_METHOD"

#: operations whose result follows from their arguments, and its shape from theirs if the tensors hold real numbers
_NAMES = _words(
    """
    abs add addcmul addmm avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d
    baddbmm bmm cat celu chunk clamp clamp_min clamp_max concat contiguous cos cumsum div einsum elu exp expand flatten
    float gelu glu hardsigmoid hardswish hardtanh interpolate layer_norm leaky_relu log log_softmax logsigmoid logsumexp
    matmul max_pool1d max_pool2d max_pool3d mean mish mm mul narrow neg normalize pad permute pixel_shuffle pow relu
    relu6 repeat reshape rms_norm rsqrt rsub scaled_dot_product_attention selu sigmoid silu sin softmax softplus
    softsign split sqrt square squeeze stack std sub sum t tanh transpose true_divide unbind unflatten unsqueeze
    var view view_as
    __add__ __getitem__ __iadd__ __imul__ __isub__ __itruediv__ __matmul__ __mul__ __neg__ __pow__ __radd__ __rmul__
    __rsub__ __rtruediv__ __sub__ __truediv__
    """
)
_OPERATIONS = frozenset(
    function
    for name in (variant for each in _NAMES for variant in (each, f"{each}_"))
    for space in (torch, F, Tensor, torch._C._nn)
    if callable(function := getattr(space, name, None))
)

#: of tensors: they follow from the shapes of others
QUERIES = frozenset({
    Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__,  # type: ignore[attr-defined]
})  # fmt: skip

#: what may be called by a global name
_FUNCTIONS = _OPERATIONS | {each for each in vars(math).values() if not isinstance(each, type) and callable(each)} | {
    getattr(builtins, name)
    for name in _words("abs bool enumerate float int isinstance len list max min range reversed sum tuple zip")
} | {Tensor, nn.Module}  # fmt: skip

#: what torch gives modules, and mostly changes without replacing it. The last one is a list that nobody changes
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"_reversed_padding_repeated_twice"}
#: names of a class that say nothing about what its instances do when they run
_DESCRIPTIONS = _words(
    """
    __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __conditional_annotations__ __constants__
    __dict__ __doc__ __firstlineno__ __init__ __module__ __repr__ __static_attributes__ __weakref__
    """
)
#: and those with which it would do something else when it is called, or asked for an attribute
_INNER = {name for name in vars(nn.Module) if name.startswith("_")} | set(vars(nn.Module()))
#: attributes of tensors, which are looked at as operations are, of lists and of dictionaries
_OF_OTHERS = {name for name in dir(Tensor) if not name.startswith("_")} | {"append", "extend", "items", "keys"}


def is_constant(value: Any) -> bool:
    """Can it not be changed without being replaced?"""
    return all(map(is_constant, value)) if type(value) in (tuple, torch.Size) else type(value) in PLAIN


def kinds_of(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    return list(dict.fromkeys(map(type, modules)))


class Code:
    """The code of modules that are not torch's own, and what it may depend on."""

    def __init__(self, modules: Sequence[nn.Module], tensors: Iterable[Tensor]) -> None:
        """``tensors``: those that they and others hold."""
        kinds = kinds_of(modules)
        self._lines = [[vars(each) for each in _own_classes(kind)] for kind in kinds]  # of inheritance
        self._classes = [vars(each) for each in dict.fromkeys(chain.from_iterable(map(_own_classes, kinds)))]
        self._globals: list[tuple[Any, str]] = [(own, name) for own in self._classes for name in own]
        self._absent: list[tuple[dict[str, Any], str]] = []  # global names that were those of builtins
        self._functions: dict[FunctionType, None] = {}
        self.names: set[str] = set()  # of all attributes that are asked for
        self.is_plain = not any(map(_is_special, kinds)) and self._follow([kind.forward for kind in kinds])
        self.is_plain = self.is_plain and all(map(self._says_nothing, tensors))
        self._entries, self._known = Entries(self._globals), self._now()

    def asks_only_for(self, names: Iterable[str], settings: Iterable[tuple[str, Any]]) -> bool:
        """Are all attributes that it asks for those of tensors or its classes, of these names, or settings that cannot
        be changed without being replaced?
        """
        mine = [(name, is_constant(value)) for name, value in settings if name in self.names]
        known = _OF_OTHERS.union(names, dict(mine), *self._classes)
        return self.names <= known and all(constant for _, constant in mine)

    def holds(self) -> bool:
        """Is it what it was?"""
        if any(name in owner for owner, name in self._absent):
            return False
        sizes, parts = self._now()
        return sizes == self._known[0] and all(map(is_, parts, self._known[1])) and self._entries.untouched()

    def _now(self) -> tuple[list[int], list[Any]]:
        sizes = [*map(len, self._classes), len(vars(Tensor)), *[len(f.__dict__) for f in self._functions]]
        parts = [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in self._functions]
        return sizes, [*chain.from_iterable(parts)]

    def _says_nothing(self, t: Tensor) -> bool:
        """Has it no attributes but those of all tensors?"""
        return type(t) in (Tensor, nn.Parameter) and self.names.isdisjoint(vars(t))

    def _follow(self, todo: list[Any]) -> bool:
        """Are all functions plain that may be called by these?"""
        while todo:
            function = todo.pop()
            if function in self._functions:
                continue
            reads = _reads(function.__code__) if isinstance(function, FunctionType) else None
            if reads is None or vars(function) or not is_constant((function.__defaults__, function.__kwdefaults__)):
                return False
            self._functions[function] = None
            values = [self._global(function.__globals__, path) for path in reads[0]]
            for name in reads[1] - self.names:
                self.names.add(name)
                values += chain.from_iterable([[own[name] for own in line if name in own][:1] for line in self._lines])
            for value in values:
                if isinstance(value, staticmethod) or (isinstance(value, FunctionType) and not _is_torchs(value)):
                    todo.append(getattr(value, "__func__", value))
                elif not _is_known(value):
                    return False
        return True

    def _global(self, owner: dict[str, Any], path: Sequence[str]) -> Any:
        """What is read by a global name; ``torch.nn.functional.relu`` is an attribute three times over."""
        if path[0] not in owner:
            self._absent.append((owner, path[0]))
            owner = vars(builtins)
        for name in path[:-1]:
            module = self._entry(owner, name)
            if not isinstance(module, ModuleType):
                return _UNKNOWN
            owner = vars(module)
        return self._entry(owner, path[-1])

    def _entry(self, owner: dict[str, Any], name: str) -> Any:
        if name not in owner:
            return _UNKNOWN
        self._globals.append((owner, name))
        return owner[name]


_UNKNOWN = object()


@lru_cache(1024)
def _reads(code: CodeType) -> tuple[list[list[str]], frozenset[str]] | None:
    """The global names that it reads, with attributes of theirs, and the names of all other attributes that it asks
    for; ``None`` if it may depend on anything else.
    """
    paths: list[list[str]] = []
    names, path = set(), None
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _INSTRUCTIONS:
            return None
        if instruction.opname == "LOAD_GLOBAL":
            path = [str(instruction.argval)]
            paths.append(path)
        elif instruction.opname not in _ASKS:
            path = None
        elif path is not None:
            path.append(str(instruction.argval))
        else:
            names.add(str(instruction.argval))
    return paths, frozenset(names)


def _own_classes(kind: type) -> list[type]:
    """Those that a module has its methods from, but for torch's."""
    return [each for each in kind.__mro__ if each is not object and not _is_torchs(each)]


def _is_special(kind: type) -> bool:
    """Does it do something else than other modules when it is called, or asked for an attribute?"""
    own = {*chain.from_iterable(map(vars, _own_classes(kind)))} - _DESCRIPTIONS
    return type(kind) is not type or not own.isdisjoint(_INNER) or any(name.startswith("__") for name in own)


def _is_known(value: Any) -> bool:
    return is_constant(value) or (isinstance(value, Hashable) and value in _FUNCTIONS)


def _is_torchs(what: FunctionType | type) -> bool:
    return (what.__module__ or "").partition(".")[0] == "torch"


def settings_of(module: nn.Module) -> dict[str, Any]:
    """What its code has given a module."""
    return {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}


def has_no_choice(flow: Flow) -> bool:
    """Does plain code that did this do it whenever it is given the like? It was told no number in a tensor, and no
    shape that depends on one.
    """
    if flow.asks:
        return False
    for node in flow.graph.nodes:
        if node.op != "call_function" or node.meta["entry"] < 0:
            continue
        target = node.target.func if isinstance(node.target, Overwriting) else node.target
        if target not in _OPERATIONS or any(read.meta["kind"] != "real" for read in node.all_input_nodes):
            return False
    return True
