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

from ocnopt.rng import RNGState
from ocnopt.trees import mapped, tensors

if TYPE_CHECKING:
    from ocnopt.games.edges import Edges
    from ocnopt.games.expected import Step


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
    asks: bool = False  # was code of the model told what may be otherwise: numbers in a tensor, or nothing was done?
    copies: bool = False  # when it is run again, must what it overwrites be copied first?
    uses: int = 0  # of how many steps it was
    version: int = 0  # how often other numbers have been found in its code
    rounds: dict[Any, Any] = field(default_factory=dict)  # what follows from it, see Game
    watched: Edges | None = None  # the live edges of the last step, if they are going to be those of the next one
    asking: frozenset[str] | None = None  # of a chain: the modules at whose inputs the policy is asked
    held: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # passes that no step has been made of yet
    _steps: tuple[list[Entry], list[Step]] | None = None

    @property
    def why_fixed(self) -> str | None:
        return self.unknown or self.fixed

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls of players, in the order of the program."""
        return [n for n in self.graph.nodes if n.op == "call_module"]

    def steps(self, inputs: int) -> list[Step]:
        """The path of a pass of so many inputs that does the same."""
        from ocnopt.games.expected import path

        if self._steps is None or self._steps[0] is not self.entries:
            self._steps = self.entries, path(self.entries, inputs)
        return self._steps[1]

    @cached_property
    def origins(self) -> dict[int, tuple[str, Any]]:
        """What the turns are of that were there before: a parameter, a buffer, a constant."""
        nodes = [n for n in self.graph.nodes if n.op == "get_attr"]
        return {n.meta["turn"]: (e.kind, e.target) for n in nodes for e in [self.entries[n.meta["entry"]]]}

    def run(
        self, node: fx.Node, read: Callable[[fx.Node], Any], model: nn.Module, draws: Draws, in_place: bool = False
    ) -> Any:
        """The value of a node that is not an input, from the values of the nodes it reads.

        ``in_place``: what it overwrites may be overwritten.
        """
        if node.op == "get_attr":
            name = str(node.target)
            return self.constants[name] if name in self.constants else attribute(model, name)
        args, kwargs = filled(node.meta["spec"], read)
        run: Any = node.target if callable(node.target) else model.get_submodule(node.target)
        run = run.in_place if in_place else run
        rng, mode = draws.get(node.meta["entry"]), node.meta["mode"]
        if rng is None and mode.holds(self.device):
            out = run(*args, **kwargs)
        else:
            with nullcontext() if rng is None else rng.restored(), mode.restored(self.device):
                out = run(*args, **kwargs)
        return out if isinstance(out, Tensor) else tensors(out)

    def fits(self, entries: list[Entry], constants: list[Tensor]) -> bool:
        """Did another pass do the same? One with other numbers only while no earlier pass is going to run again."""
        same = equal(self.entries, entries)
        if same and all(map(operator.is_, self.constants.values(), constants)):
            return True
        return not self.held and (same or _alike(self.entries, entries))

    def again(self, entries: list[Entry], constants: list[Tensor]) -> None:
        """Another pass did the same, but perhaps with other numbers in its code and other constants."""
        self.constants = dict(zip(self.constants, constants, strict=True))
        if equal(self.entries, entries):
            return
        self.entries, self.version = entries, self.version + 1
        nodes = {node.meta["turn"]: node for node in self.graph.nodes if "turn" in node.meta}
        for node in self.graph.nodes:
            if node.meta.get("entry", -1) >= 0:
                entry = entries[node.meta["entry"]]
                node.meta["spec"] = filled((entry.args, entry.kwargs), lambda value: nodes[value.turn])


def filled(tree: Any, what: Callable[[Any], Any]) -> Any:
    """With something for every value or node."""
    if isinstance(tree, (Value, fx.Node)):
        return what(tree)
    if isinstance(tree, (tuple, list)):
        parts = [filled(part, what) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: filled(part, what) for key, part in tree.items()}
    return tree


def values_in(tree: Any) -> list[Value]:
    """In the order of the tensors that they stand for."""
    if isinstance(tree, Value):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [value for part in parts for value in values_in(part)]


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


def attribute(model: nn.Module, name: str) -> Any:
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

    def changed(self, node: fx.Node) -> fx.Node:
        """What a node of this function overwrites."""
        read: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), read.append)
        return read[self.place]

    def in_place(self, *args: Any, **kwargs: Any) -> Tensor:
        """Without the copy: for who has no other use of that tensor."""
        changed = tensors((args, kwargs))[self.place]
        self.func(*args, **kwargs)
        return changed


def is_due(flow: Flow) -> bool:
    """Is the coming use of a data flow one at which it is verified, and the device waited for?"""
    return flow.uses + 1 in (1, 10, 100, 1000)


def short(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _alike(a: Any, b: Any) -> bool:
    """Equal, but for numbers with a decimal point: a rate in the code may change from pass to pass."""
    if isinstance(a, float) and isinstance(b, float):
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return equal(a, b)


def equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # what cannot be compared, such as an array
        return False


def kind_of(t: Tensor) -> str:
    """Of its numbers."""
    return "real" if t.is_floating_point() else "complex" if t.is_complex() else "whole"
