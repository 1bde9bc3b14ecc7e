"""The data flow of a forward pass: calls of players, and the operations between them.

It is written down while the model runs on real tensors, so control flow in Python is no obstacle. Every pass is
recorded, as a list that costs little; a pass that did what an earlier one did has that one's :class:`Flow`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ocnopt.rng import RNGState
from ocnopt.trees import mapped, tensors


class Value(NamedTuple):
    """Stands for a tensor: the number of its turn among all that the pass saw."""

    turn: int


class Entry(NamedTuple):
    """One call of a player, one operation, or one tensor that was there before."""

    kind: str  # "player", "operation", "parameter", "attribute" or "constant"
    target: Any  # a name, a function, or the id of a constant
    args: Any  # with values for tensors
    kwargs: Any
    grad: bool
    made: tuple[bool, ...]  # of each tensor that came out: is it floating point?
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
    graph: fx.Graph = field(default_factory=fx.Graph)
    outputs: list[fx.Node | None] = field(default_factory=list)  # the floating-point tensors of the model's result
    constants: dict[str, Tensor] = field(default_factory=dict)
    unknown: str | None = None  # why it could not be followed to its end
    fixed: str | None = None  # why its operations cannot be run again in another order
    checked: bool = False  # was it run again once, and found to give the numbers of the pass itself?

    @property
    def why_fixed(self) -> str | None:
        return self.unknown or self.fixed

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls of players, in the order of the program."""
        return [n for n in self.graph.nodes if n.op == "call_module"]

    def run(self, node: fx.Node, values: Mapping[fx.Node, Any], model: nn.Module, draws: Draws) -> Any:
        """The value of a node that is not an input, from the values of the nodes it reads."""
        if node.op == "get_attr":
            name = str(node.target)
            return self.constants[name] if name in self.constants else _attribute(model, name)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        run = node.target if callable(node.target) else model.get_submodule(node.target)
        rng = draws.get(node.meta["entry"])
        drawn = nullcontext() if rng is None else rng.restored()
        with drawn, torch.set_grad_enabled(torch.is_grad_enabled() and node.meta["grad"]):
            out = run(*args, **kwargs)
        return out if isinstance(out, Tensor) else tensors(out)


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
    return [n for n in found if n.meta.get("floating")]


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


class Recorder(TorchFunctionMode):
    """Takes down a pass. Calls of players are opaque: :meth:`enter` and :meth:`leave` stand around them."""

    def __init__(self, model: nn.Module, inputs: list[Tensor], devices: Iterable[torch.device] | None = None) -> None:
        """``devices``: whose random numbers to keep where they are drawn; ``None``: of none."""
        super().__init__()
        self.entries: list[Entry] = []
        self.draws: dict[int, RNGState] = {}
        self._rng = None if devices is None else RNGState.capture(devices)
        self.unknown: str | None = None
        self.constants: dict[int, Tensor] = {}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._buffers = {id(b): name for name, b in model.named_buffers()}
        self._values: dict[int, Value] = {}
        self._refs: dict[int, weakref.ref[Tensor]] = {}  # an id is that of a tensor as long as it lives
        self._turns = 0
        self._inside = 0  # calls of players, one in another
        self._call: tuple[Any, Any, bool] | None = None
        self._inputs = [t.is_floating_point() for t in inputs]
        for t in inputs:
            self._bind(t, self._next())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.unknown is not None:
            return func(*args, **kwargs)
        into = tensors((args, kwargs))
        versions = [_version(t) for t in into]
        out = func(*args, **kwargs)
        made = tensors(out)
        written = [i for i, (t, version) in enumerate(zip(into, versions, strict=True)) if _version(t) != version]
        written = [i for i in written if id(into[i]) not in self._buffers]  # they are put back before another pass
        if len(written) > 1 or any(id(into[i]) in self._parameters for i in written):
            self.unknown = f"{short(func)} changes several tensors, or a parameter, in place"
        elif written and (spec := self._spec(args, kwargs, func)) is not None:
            changed = into[written[0]]
            self._note("operation", func, spec, [changed], True, written[0])
            for t in made:
                self._bind(t, self._values[id(changed)])
        elif made and (spec := self._spec(args, kwargs, func)) is not None:
            self._note("operation", func, spec, made, isinstance(out, Tensor))
        return out

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
        self.entries.append(Entry("output", None, tuple(values), self.unknown, True, (), False, None))
        try:
            return next((flow for flow in known if _same(flow.entries, self.entries)), None) or self._build(values)
        finally:
            self._values.clear()
            self._refs.clear()

    def _spec(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, bool] | None:
        """The arguments with values for tensors, or ``None`` if they come from nowhere."""
        for t in tensors((args, kwargs)):
            if id(t) in self._values:
                continue
            if id(t) in self._parameters:
                self._note("parameter", self._parameters[id(t)], ((), {}, True), [t], True)
            elif id(t) in self._buffers:
                self._note("attribute", self._buffers[id(t)], ((), {}, True), [t], True)
            elif t.grad_fn is None:
                self.constants[id(t)] = t
                self._note("constant", id(t), ((), {}, True), [t], True)
            else:
                self.unknown = f"{short(target)} reads what cannot be followed"
                return None
        try:
            spec = mapped(lambda t: self._values[id(t)], (args, kwargs))
        except Exception:  # a container that holds nothing but tensors
            self.unknown = f"{short(target)} gets tensors in a container that cannot be opened"
            return None
        return *spec, torch.is_grad_enabled()

    def _note(
        self, kind: str, target: Any, spec: tuple[Any, Any, bool], made: list[Tensor], single: bool,
        written: int | None = None,
    ) -> None:  # fmt: skip
        if self._rng is not None and not self._rng.same_as(now := RNGState.capture(self._rng.states)):
            self.draws[len(self.entries)], self._rng = self._rng, now
        floating = tuple(t.is_floating_point() for t in made)
        self.entries.append(Entry(kind, target, *spec, floating, single, written))
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
        flow = Flow(self.entries, unknown=self.unknown)
        nodes = [flow.graph.placeholder(f"input_{i}") for i in range(len(self._inputs))]
        for node, floating in zip(nodes, self._inputs, strict=True):
            node.meta["floating"] = floating
        for i, entry in enumerate(self.entries[:-1]):
            self._add(flow, i, entry, nodes)
        flow.outputs = [None if value is None else nodes[value.turn] for value in outputs]
        return flow

    def _add(self, flow: Flow, place: int, entry: Entry, nodes: list[fx.Node]) -> None:
        args, kwargs = _with_nodes((entry.args, entry.kwargs), nodes)
        if entry.kind == "player":
            node = flow.graph.create_node("call_module", entry.target, args, kwargs)
            if not all(entry.made):
                flow.fixed = f"{entry.target} returns tensors of whole numbers"
        elif entry.kind == "operation":
            func = entry.target if entry.written is None else Overwriting(entry.target, entry.written)
            node = flow.graph.create_node("call_function", func, args, kwargs)
        else:
            name = entry.target
            if entry.kind == "constant":
                name = f"constant_{len(flow.constants)}"
                flow.constants[name] = self.constants[entry.target]
            node = flow.graph.create_node("get_attr", name)
            node.meta["parameter"] = entry.kind == "parameter"
        node.meta |= {"entry": place, "grad": entry.grad, "outputs": len(entry.made), "single": entry.single}
        if entry.single:
            node.meta["floating"] = entry.made[0]
            nodes.append(node)
            return
        for i, floating in enumerate(entry.made):
            picked = flow.graph.call_function(operator.getitem, (node, i))
            picked.meta |= {"entry": -1, "grad": True, "floating": floating}
            nodes.append(picked)


def short(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _same(a: list[Entry], b: list[Entry]) -> bool:
    try:
        return a == b
    except Exception:  # an argument that cannot be compared, such as an array
        return False


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _with_nodes(tree: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(tree, Value):
        return nodes[tree.turn]
    if isinstance(tree, (tuple, list)):
        parts = [_with_nodes(part, nodes) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: _with_nodes(part, nodes) for key, part in tree.items()}
    return tree
