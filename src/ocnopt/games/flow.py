"""The data flow of a forward pass: calls of players, and the operations between them.

It is written down while the model runs on real tensors, so control flow in Python is no obstacle. Every pass is
recorded, as a list that costs little; a pass that did what an earlier one did has that one's :class:`Flow`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from ocnopt.rng import RNGState
from ocnopt.trees import mapped, tensors

if TYPE_CHECKING:
    from ocnopt.games.edges import Edges


class Value(NamedTuple):
    """Stands for a tensor: the number of its turn among all that the pass saw."""

    turn: int


class Mode(NamedTuple):
    """Gradients on or off; and autocast."""

    grad: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Mode:
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def holds(self, device: str) -> bool:
        """Is there nothing to restore?"""
        present = Mode.now(device)
        return present[1:] == self[1:] and (self.grad or not present.grad)

    @contextmanager
    def restored(self, device: str) -> Iterator[None]:
        """Without gradients they stay off."""
        present = Mode.now(device)
        same = present[1:] == self[1:]
        cast = nullcontext() if same else torch.autocast(device, self.dtype, self.autocast, cache_enabled=False)
        with cast, torch.set_grad_enabled(present.grad and self.grad):
            yield


class Entry(NamedTuple):
    """One call of a player, one operation, or one tensor that was there before."""

    kind: str  # "player", "operation", "parameter", "attribute" or "constant"
    target: Any  # a name, a function, or shape and dtype of a constant
    args: Any  # with values for tensors
    kwargs: Any
    mode: Mode  # what it ran under
    made: tuple[str, ...]  # of each tensor that came out: "real", "complex" or "whole" numbers?
    single: bool  # a tensor, and not some structure of them
    written: int | None  # which of its tensors is changed in place, if one is


#: the random numbers that a pass began its entries with, where they drew any
Draws = Mapping[int, RNGState]


@dataclass(eq=False)
class Flow:
    """One pass as a :class:`torch.fx.Graph`. Nodes are inputs (``placeholder``), parameters and other tensors
    (``get_attr``), calls of players (``call_module``) and all other operations (``call_function``). The value of a node
    is a tensor, or a list of the tensors that came out.
    """

    entries: list[Entry]
    device: str = "cpu"
    graph: fx.Graph = field(default_factory=fx.Graph)
    outputs: list[fx.Node | None] = field(default_factory=list)  # the floating-point tensors of the model's result
    constants: dict[str, Tensor] = field(default_factory=dict)
    unknown: str | None = None  # why it could not be followed to its end
    fixed: str | None = None  # why its operations cannot be run again in another order
    uses: int = 0  # of how many steps it was
    rounds: dict[Any, Any] = field(default_factory=dict)  # what follows from it, see Game
    watched: Edges | None = None  # the live edges of the last step, if they are going to be those of the next one
    held: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # passes that no step has been made of yet

    @property
    def why_fixed(self) -> str | None:
        return self.unknown or self.fixed

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls of players, in the order of the program."""
        return [n for n in self.graph.nodes if n.op == "call_module"]

    def run(self, node: fx.Node, read: Callable[[fx.Node], Any], model: nn.Module, draws: Draws) -> Any:
        """The value of a node that is not an input, from the values of the nodes it reads."""
        if node.op == "get_attr":
            name = str(node.target)
            return self.constants[name] if name in self.constants else _attribute(model, name)
        args, kwargs = _filled(node.meta["spec"], read)
        run = node.target if callable(node.target) else model.get_submodule(node.target)
        rng, mode = draws.get(node.meta["entry"]), node.meta["mode"]
        if rng is None and mode.holds(self.device):
            out = run(*args, **kwargs)
        else:
            with nullcontext() if rng is None else rng.restored(), mode.restored(self.device):
                out = run(*args, **kwargs)
        return out if isinstance(out, Tensor) else tensors(out)

    def fits(self, entries: list[Entry], constants: list[Tensor]) -> bool:
        """Did another pass do the same? One with other numbers only while no earlier pass is going to run again."""
        same = _equal(self.entries, entries)
        if same and all(map(operator.is_, self.constants.values(), constants)):
            return True
        return not self.held and (same or _alike(self.entries, entries))

    def again(self, entries: list[Entry], constants: list[Tensor]) -> None:
        """Another pass did the same, but perhaps with other numbers in its code and other constants."""
        self.constants = dict(zip(self.constants, constants, strict=True))
        if _equal(self.entries, entries):
            return
        self.entries = entries
        nodes = {node.meta["turn"]: node for node in self.graph.nodes if "turn" in node.meta}
        for node in self.graph.nodes:
            if node.meta.get("entry", -1) >= 0:
                entry = entries[node.meta["entry"]]
                node.meta["spec"] = _filled((entry.args, entry.kwargs), lambda value: nodes[value.turn])


def _filled(tree: Any, what: Callable[[Any], Any]) -> Any:
    """With something for every value or node."""
    if isinstance(tree, (Value, fx.Node)):
        return what(tree)
    if isinstance(tree, (tuple, list)):
        parts = [_filled(part, what) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: _filled(part, what) for key, part in tree.items()}
    return tree


def innermost(names: Iterable[str]) -> set[str]:
    """Modules without those that hold others of them: what the latter do is seen in the former."""
    names = set(names)
    return {n for n in names if not any(other != n and (not n or other.startswith(n + ".")) for other in names)}


def name_of(call: fx.Node) -> str:
    """Of the module that a call runs."""
    return str(call.target)


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes of the floating-point tensors among its arguments, in order, as often as they occur."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if n.meta.get("kind") == "real"]


def _attribute(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


class Overwriting:
    """An operation that changes one of its tensors in place, as a function that returns the changed copy."""

    def __init__(self, func: Callable[..., Any], place: int) -> None:
        self.func, self.place, self.__name__ = func, place, short(func)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        position, copy = iter(range(len(tensors((args, kwargs))))), []

        def copied(t: Tensor) -> Tensor:
            if next(position) != self.place:
                return t
            copy.append(t.clone())
            return copy[0]

        args, kwargs = mapped(copied, (args, kwargs))
        self.func(*args, **kwargs)
        return copy[0]


def is_due(flow: Flow) -> bool:
    """Is the coming use of a data flow one at which it is verified, and the device waited for?"""
    return flow.uses + 1 in (1, 10, 100, 1000)


#: (tensor, value, entry) → an alias for the operation of that entry to read
Read = Callable[[Tensor, int, int], Tensor]


class Recorder(TorchFunctionMode):
    """Takes down a pass. Calls of players are opaque: :meth:`enter` and :meth:`leave` stand around them."""

    def __init__(
        self,
        model: nn.Module,
        inputs: list[Tensor],
        devices: Iterable[torch.device] | None = None,
        watched: Edges | None = None,
        read: Read = lambda t, value, entry: t,
    ) -> None:
        """``devices``: whose random numbers to keep where they are drawn; ``None``: of none. ``watched``: edges of the
        flow that the pass is expected to have; operations at their ends get what ``read`` makes of the tensors.
        """
        super().__init__()
        self._watched, self._read = watched, read
        self.entries: list[Entry] = []
        self.draws: dict[int, RNGState] = {}
        self._rng = None if devices is None else RNGState.capture(devices)
        self.unknown: str | None = None
        self.constants: list[Tensor] = []
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._buffers = {id(b): name for name, b in model.named_buffers()}
        self._values: dict[int, Value] = {}
        self._refs: dict[int, weakref.ref[Tensor]] = {}  # an id is that of a tensor as long as it lives
        self._turns = 0
        self._inside = 0  # calls of players, one in another
        self._call: tuple[Any, Any, Mode] | None = None
        self._inputs = [_kind(t) for t in inputs]
        for t in inputs:
            self._bind(t, self._next())

    @_disable_dynamo  # operations are to be seen, and so are compiled code's
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.unknown is not None:
            return func(*args, **kwargs)
        into = tensors((args, kwargs))
        versions = [_version(t) for t in into]
        given = (args, kwargs) if self._watched is None else self._aliased(self._watched, func, args, kwargs)
        out = func(*given[0], **given[1])
        made = tensors(out)
        written = [i for i, (t, version) in enumerate(zip(into, versions, strict=True)) if _version(t) != version]
        written = [i for i in written if id(into[i]) not in self._buffers]  # they are put back before another pass
        if len(written) > 1 or any(id(into[i]) in self._parameters for i in written):
            self.unknown = f"{short(func)} changes several tensors, or a parameter, in place"
        elif written and self._is_shared(into[written[0]]):
            self.unknown = f"{short(func)} changes a tensor in place of which there are views"
        elif written and (spec := self._spec(args, kwargs, func)) is not None:
            changed = into[written[0]]
            self._note("operation", func, spec, [changed], True, written[0])
            for t in made:
                self._bind(t, self._values[id(changed)])
        elif (same := _given_back(func, into, tensors(given), out)) is not None:
            return same
        elif made and (spec := self._spec(args, kwargs, func)) is not None:
            self._note("operation", func, spec, made, isinstance(out, Tensor))
        return out

    def _aliased(self, watched: Edges, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the operation is to read them, if it is the one that is expected to come next."""
        entries, place = watched.flow.entries, len(self.entries)
        while place < len(entries) and entries[place].kind not in ("operation", "player", "output"):
            place += 1  # tensors that were there before are noted when they are first read
        turns = watched.into_operation(place)
        if not turns or not _equal(entries[place].target, func):
            return args, kwargs
        aliases: dict[int, Tensor] = {}

        def read(t: Tensor) -> Tensor:
            value = self._values.get(id(t))
            if value is None or value.turn not in turns or not t.requires_grad:
                return t
            if id(t) not in aliases:
                aliases[id(t)] = self._read(t, value.turn, place)
            return aliases[id(t)]

        both: tuple[Any, Any] = mapped(read, (args, kwargs))
        return both

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A player is about to run: what happens inside is its own business."""
        if not self._inside:
            self._call = None if self.unknown is not None else self._spec(args, kwargs, name)
        self._inside += 1

    def leave(self, name: str, output: Any) -> None:
        self._inside -= 1
        if not self._inside and self._call is not None:
            self._note("player", name, self._call, tensors(output), isinstance(output, Tensor))

    def finish(self, output: Any, known: Iterable[Flow]) -> Flow:
        """The flow of this pass: one of those already known, if it did the same."""
        outputs = [t for t in tensors(output) if t.is_floating_point()]
        if any(t.grad_fn is not None and id(t) not in self._values for t in outputs):
            self.unknown = self.unknown or "an output of the model comes from an operation that cannot be followed"
        values = [self._values.get(id(t)) for t in outputs]
        self.entries.append(Entry("output", None, tuple(values), self.unknown, Mode.now(self._device), (), False, None))
        self._values.clear()
        self._refs.clear()
        for flow in known:
            if flow.fits(self.entries, self.constants):
                flow.again(self.entries, self.constants)
                return flow
        return self._build(values)

    def _is_shared(self, t: Tensor) -> bool:
        """Is there another tensor with the same memory?"""
        memory = t.untyped_storage().data_ptr()
        others = (ref() for key, ref in self._refs.items() if key != id(t))
        return any(other is not None and other.untyped_storage().data_ptr() == memory for other in others)

    def _spec(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, Mode] | None:
        """The arguments with values for tensors, or ``None`` if they come from nowhere."""
        for t in tensors((args, kwargs)):
            if id(t) in self._values:
                continue
            there: tuple[Any, Any, Mode] = (), {}, Mode.now(self._device)
            if id(t) in self._parameters:
                self._note("parameter", self._parameters[id(t)], there, [t], True)
            elif id(t) in self._buffers:
                self._note("attribute", self._buffers[id(t)], there, [t], True)
            elif t.grad_fn is None:
                self.constants.append(t)
                self._note("constant", (t.shape, t.dtype), there, [t], True)
            else:
                self.unknown = f"{short(target)} reads what cannot be followed"
                return None
        try:
            spec = mapped(lambda t: self._values[id(t)], (args, kwargs))
        except Exception:  # a container that holds nothing but tensors
            self.unknown = f"{short(target)} gets tensors in a container that cannot be opened"
            return None
        return *spec, Mode.now(self._device)

    def _note(
        self, kind: str, target: Any, spec: tuple[Any, Any, Mode], made: list[Tensor], single: bool,
        written: int | None = None,
    ) -> None:  # fmt: skip
        ran = kind in ("operation", "player")
        if ran and self._rng is not None and not self._rng.same_as(now := RNGState.capture(self._rng.states)):
            self.draws[len(self.entries)], self._rng = self._rng, now
        self.entries.append(Entry(kind, target, *spec, tuple(map(_kind, made)), single, written))
        for t in made:
            self._bind(t, self._next())

    def _next(self) -> Value:
        self._turns += 1
        return Value(self._turns - 1)

    def _bind(self, t: Tensor, value: Value) -> None:
        key = id(t)

        def forget(ref: weakref.ref[Tensor]) -> None:
            if self._refs.get(key) is ref:
                del self._refs[key], self._values[key]

        self._values[key], self._refs[key] = value, weakref.ref(t, forget)

    def _build(self, outputs: list[Value | None]) -> Flow:
        flow = Flow(self.entries, self._device, unknown=self.unknown)
        nodes = [flow.graph.placeholder(f"input_{i}") for i in range(len(self._inputs))]
        for i, (node, kind) in enumerate(zip(nodes, self._inputs, strict=True)):
            node.meta |= {"turn": i, "kind": kind}
        for i, entry in enumerate(self.entries[:-1]):
            self._add(flow, i, entry, nodes)
        flow.outputs = [None if value is None else nodes[value.turn] for value in outputs]
        return flow

    def _add(self, flow: Flow, place: int, entry: Entry, nodes: list[fx.Node]) -> None:
        args, kwargs = _filled((entry.args, entry.kwargs), lambda value: nodes[value.turn])
        if entry.kind == "player":
            node = flow.graph.create_node("call_module", entry.target, args, kwargs)
            if set(entry.made) - {"real"}:
                flow.fixed = f"{entry.target} returns tensors of {entry.made[0]} numbers"
        elif entry.kind == "operation":
            func = entry.target if entry.written is None else Overwriting(entry.target, entry.written)
            node = flow.graph.create_node("call_function", func, args, kwargs)
        else:
            name = entry.target
            if entry.kind == "constant":
                name = f"constant_{len(flow.constants)}"
                flow.constants[name] = self.constants[len(flow.constants)]
            node = flow.graph.create_node("get_attr", name)
            node.meta["parameter"] = entry.kind == "parameter"
        node.meta |= {"entry": place, "mode": entry.mode, "outputs": len(entry.made), "single": entry.single}
        node.meta["spec"] = args, kwargs
        if "complex" in entry.made:
            flow.fixed = "it computes with complex numbers"
        if entry.single:
            node.meta |= {"turn": len(nodes), "kind": entry.made[0]}
            nodes.append(node)
            return
        for i, kind in enumerate(entry.made):
            picked = flow.graph.call_function(operator.getitem, (node, i))
            picked.meta |= {"entry": -1, "mode": entry.mode, "spec": ((node, i), {}), "turn": len(nodes), "kind": kind}
            nodes.append(picked)


def short(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _given_back(func: Any, into: list[Tensor], read: list[Tensor], out: Any) -> Tensor | None:
    """What was given to a function that did nothing and returned it, as ``to`` and ``contiguous`` may: no operation.

    ``read``: aliases of ``into``, perhaps. What ends in ``_`` has done something, such as ``detach_``.
    """
    if short(func).endswith("_"):
        return None
    return next((t for t, alias in zip(into, read, strict=True) if out is alias), None)


def _kind(t: Tensor) -> str:
    return "real" if t.is_floating_point() else "complex" if t.is_complex() else "whole"


def _alike(a: Any, b: Any) -> bool:
    """Equal, but for numbers with a decimal point: a rate in the code may change from pass to pass."""
    if isinstance(a, float) and isinstance(b, float):
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # what cannot be compared, such as an array
        return False


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
