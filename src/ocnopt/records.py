"""What is kept of a step: forward passes, and the calls of modules in them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ocnopt.backwards import Leaves, all_reached, nodes_of, sinks_of
from ocnopt.backwards import Sinks as Sinks
from ocnopt.curvature.tally import Tally
from ocnopt.environment import Autocast, Environment
from ocnopt.games.cues import Cues
from ocnopt.games.edges import Edges, Key
from ocnopt.games.flow import Draws, Flow
from ocnopt.groups import Groups, Samples
from ocnopt.hosts import Execution
from ocnopt.layers.base import Adapter, Call, compute_dtype
from ocnopt.marks import Mark
from ocnopt.readings import Reading, arrived
from ocnopt.rng import AllRNG, RNGState
from ocnopt.tallies import Account
from ocnopt.trees import mapped, tensors

_ALL, _NONE = range(sys.maxsize), range(0)


@dataclass(frozen=True)
class Need:
    """What the configuration asks the hooks to keep."""

    flow: bool = False  # which module runs when, and who reads whom
    calls: bool = False  # inputs and output adjoints: groups of samples, Kronecker factors
    states: bool = False  # everything that a second forward pass is compared with
    split: bool = False  # is it compared sample by sample?
    whole: bool = False  # and layer by layer?
    rank: int | str = 1  # in how many groups a pass can be split before the step; 1: that is not known
    gram: bool = False  # some layers may have no use for explicit group gradients
    fused: bool = False  # unless kernels read these, as they may

    def __bool__(self) -> bool:
        return self.flow or self.calls or self.states


@dataclass(eq=False)
class Pass:
    """One forward pass of the attached model."""

    batch: int | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    autocast: Autocast | None = None
    environment: Environment | None = None
    idle: frozenset[int] = frozenset()  # hooks of others that changed nothing in it
    rng: AllRNG | None = None  # the random numbers that it began with
    order: list[str] = field(default_factory=list)  # modules in the order of their calls
    chain: bool = False
    flow: Flow | None = None
    foreseen: bool = False  # did it do what it was expected to, and were its live edges watched?
    compared: bool = False  # is it known where a second pass can be compared with it? Else it is run once more
    whole: bool = False  # are the outputs of layers kept, too, so that a change can be added up layer by layer?
    split: bool = False  # can changes be told sample by sample?
    watched: Edges | None = None  # of the data flow that it is expected to have: what is read of it
    asking: frozenset[str] | None = None  # of the chain that it is expected to be: who reads all of its input
    readings: dict[Key, Reading] = field(default_factory=dict)  # of the edges that are watched
    draws: Draws = field(default_factory=dict)
    fixed: str | None = None  # why it cannot be run again stage by stage
    D: dict[int, Reading] = field(default_factory=dict)  # the outputs of the model, as the loss read them
    called: dict[nn.Module, None] = field(default_factory=dict)  # the modules that were watched in it
    foreseeable: bool = False  # as long as it does what is expected, is it known what will be asked of it?
    certain: Cues | None = None  # that it is certain what it does
    opaque: bool = False  # were players given tensors in lists or dicts, where nobody can watch them?
    announced: bool = False  # is there a record that will come on the tape with its output's adjoint?
    scale: Tensor | None = None  # the factor by which adjoints are to be multiplied, if any
    turn: int = 0  # which pass since the hooks were set
    groups: Groups | None = None  # its samples, where it is split already in the backward pass
    given: Any = None  # its inputs but for their numbers, and what else functions may do something else under
    settled: bool = False  # has it been seen to be trained on?
    mixed: frozenset[str] = frozenset()  # modules whose dimension 0 only has the size of the batch
    mixed_inputs: frozenset[str] = frozenset()  # those of them in whose input it is so
    summed: Mapping[str, Adapter] = field(default_factory=dict)  # of the layers whose calls may be added up
    accounts: dict[tuple[str, str], Account] = field(default_factory=dict)  # of them, and of layers inside hosts
    leaves: Leaves = field(default_factory=Leaves)
    _sinks: Sinks | None = None
    _reached: tuple[int, bool] = (-1, False)  # in which backward pass
    heard: tuple[int, bool] = (-1, False)  # likewise: does what arrives in it belong to the step?

    @property
    def sinks(self) -> Sinks:
        """Of all its modules. Found when a backward pass comes by: most passes are one."""
        if self._sinks is None:
            self._sinks = nodes_of(self.leaves.of(self.called))
        return self._sinks

    def all_reached(self) -> bool:
        """Does the backward pass under way add to the gradients of all its modules?"""
        task = torch._C._current_graph_task_id()
        if self._reached[0] != task:
            self._reached = task, all_reached(self.sinks)
        return self._reached[1]

    def wanted(self, name: str, occurrence: int) -> Collection[int]:
        """The inputs of a call that somebody will ask about, where it is foreseen."""
        if self.watched is not None:
            return self.watched.into_player(name, occurrence)
        return _ALL if self.asking is not None and name in self.asking else _NONE

    def attend(self, cues: Cues) -> None:
        """It is certain what it does."""
        self.certain, self.watched, self.order, self.called = cues, cues.edges, cues.order, cues.called

    def is_alone(self, name: str, occurrence: int, i: int) -> bool:
        """Is it certain that nobody else reads that input of a call?"""
        return self.certain is not None and self.certain.alone(name, occurrence, i)

    def end(self, flow: Flow | None, chain: bool) -> None:
        self.flow, self.chain = flow, chain
        self.readings = dict(sorted(self.readings.items()))  # in one order, whoever watched
        self.foreseen = self.watched is not None and self.watched.flow is flow
        self.compared = chain or self.whole or self.foreseen

    @property
    def readings_of_players(self) -> list[tuple[str, Reading]]:
        """Of edges that lead to modules: whom, and what it read."""
        if self.watched is None:
            return []
        entries = self.watched.flow.entries
        return [(str(entries[key.entry].target), each) for key, each in self.readings.items() if key.input >= 0]

    def read_by(self, name: str, occurrence: int) -> dict[int, Reading]:
        """What a call read by edges that are watched, by input."""
        keys = {} if self.watched is None else self.watched.into_player(name, occurrence)
        return {i: self.readings[key] for i, key in keys.items() if key in self.readings}

    def inputs_changed(self) -> bool:
        return self.versions != versions_of((self.args, self.kwargs))

    def outputs_changed(self) -> bool:
        """Before the backward pass came by?"""
        return any(D.overwritten for D in self.D.values())

    def change(self, outputs: Mapping[int, Tensor]) -> Tensor | None:
        """⟨∂L/∂x_K, δx_K⟩ of the outputs of another pass, or ``None`` where the two cannot be compared."""
        read = arrived(self.D)
        if self.outputs_changed() or any(i not in outputs or D.shape != outputs[i].shape for i, D in read.items()):
            return None
        changes = [D.change(outputs[i]) for i, D in read.items()]
        terms = [change.sum() if change.dim() else change for change in changes]
        return self.scaled(reduce(torch.add, terms)) if terms else None

    def forget(self) -> None:
        """What the backward pass said: another one may come through the same graph, and starts from nothing."""
        for reading in (*self.D.values(), *self.readings.values()):
            reading.forget()
        self.accounts.clear()
        if self.flow is not None:
            self.flow.held.discard(self)

    def scaled(self, adjoint: Tensor) -> Tensor:
        """An adjoint in the scale of the gradients."""
        if self.scale is None:
            return adjoint
        return adjoint.to(compute_dtype(adjoint.dtype)) * self.scale.to(adjoint.device)


@dataclass
class Record:
    """One execution of one module in a :class:`Pass`."""

    name: str
    module: nn.Module
    occurrence: int
    origin: Pass
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    rng: RNGState | None = None
    training: bool = True
    autocast: torch.dtype | None = None
    arity: int = 0  # how many floating-point tensors it read
    opaque: bool = False  # some of its inputs were not read: they came in a list or dict, or nobody was to ask
    readings: dict[int, Reading] = field(default_factory=dict)  # by input
    outputs: dict[int, Tensor] = field(default_factory=dict)
    arrived: bool = False  # is it on the tape?
    h: dict[int, Tensor] = field(default_factory=dict)  # ∂L/∂output, by output
    sizes: dict[int, tuple[torch.dtype, list[Tensor]]] = field(default_factory=dict)  # of h: dtype, all ⟨h, h⟩
    columns: dict[str, Tensor] = field(default_factory=dict)  # of its groups, parts of gradients that backward left
    left: dict[str, Mark] = field(default_factory=dict)  # the gradients that it gave autograd, see Once
    inner: dict[str, list[Call]] | None = None  # calls of the layers inside a host, where it was asked
    strays: frozenset[str] = frozenset()  # layers inside a host that were called by somebody else, too
    # what its calls have been added to, by path, with those of its other executions in the same pass
    tallies: dict[str, Tally] = field(default_factory=dict)
    spent: bool = False  # no other backward pass can come by
    _sinks: Sinks | None = None

    @property
    def sinks(self) -> Sinks:
        """A frozen layer goes by the others."""
        if self._sinks is None:
            self._sinks = sinks_of(self.module) or self.origin.sinks
        return self._sinks

    def calls(self, path: str) -> list[Call]:
        """Of the module itself, or of the layer of that name inside it; none where they have been added up."""
        if path in self.tallies:
            return []
        if not path:
            return [self.call()]
        return [] if self.inner is None else self.inner.get(path, [])

    def execution(self) -> Execution:
        """As the host sees it that the record is about."""
        h = {i: self.origin.scaled(h) for i, h in self.h.items()}
        how = self.autocast, self.overwritten(), self.training
        return Execution(self.args, self.kwargs, self.outputs, h, *how)

    def call(self, scaled: bool = True) -> Call:
        """As the layer's adapter sees it. Only for records whose (first) output an adjoint arrived at."""
        h = self.origin.scaled(self.h[0]) if scaled else self.h[0]
        return Call(self.module, self.args, self.kwargs, h, self.rng, self.training, self.autocast)

    def keep(self, columns: Mapping[str, Tensor]) -> None:
        """Group gradients of a backward pass, or of one more."""
        self.columns = {n: self.columns[n] + G if n in self.columns else G for n, G in columns.items()}

    def split(self, groups: Groups) -> dict[str, Tensor] | None:
        """What the backward passes left, in the scale of the gradients, or ``None`` if they knew of other groups."""
        if not self.columns or groups != self.origin.groups:
            return None
        return {name: self.origin.scaled(G) for name, G in self.columns.items()}

    def has_rows(self) -> bool:
        """Has dimension 0 of input and output the size of the batch? Nothing else is added up."""
        if "" in self.tallies:
            return True
        sizes = {t.shape[:1] for t in (*tensors((self.args, self.kwargs))[:1], self.h[0])}
        return self.origin.batch is None or sizes == {(self.origin.batch,)}

    def rows_are_samples(self) -> bool:
        """Does dimension 0 of input and output run over the samples, as far as sizes and the probe can tell?"""
        return self.has_rows() and self.name not in self.origin.mixed

    def forget(self) -> None:
        """As that of a pass."""
        for reading in self.readings.values():
            reading.forget()
        for store in (self.h, self.sizes, self.outputs, self.columns, self.left, self.tallies):
            if store:
                store.clear()
        self.inner, self.arrived = None, False
        if self.spent:  # its graph may be alive for long, but not its record
            self.let_go()

    def let_go(self) -> None:
        """Of what it saw."""
        self.args, self.kwargs, self.versions, self.inner = (), {}, [], None
        self.h.clear()

    def overwritten(self) -> bool:
        """Have the arguments been changed in place since the call began?"""
        return self.versions != [*versions_of(self.args), *(versions_of(self.kwargs) if self.kwargs else ())]


@dataclass
class Folded:
    """Group gradients of passes that are over, added up: r·P numbers, however many they were."""

    first: Pass  # what it did, without what it saw
    rows: list[int] = field(default_factory=list)  # of each pass
    columns: dict[Tensor, Tensor] = field(default_factory=dict)  # parameter → [r, *shape], of the groups so far
    whole: dict[Tensor, str] = field(default_factory=dict)  # parameters that could not be split, and why
    scale: Tensor | None = None  # as that of a pass

    @classmethod
    def after(cls, this: Pass) -> Folded:
        """The first pass is over."""
        return cls(Pass(None, order=this.order, flow=this.flow))

    def of(self, p: Tensor, samples: Samples) -> Tensor | None:
        """``[r, *shape]``, in the scale of the gradients."""
        if p not in self.columns:
            return None
        G = self.columns[p]
        before, after = samples.first, samples.groups.rank - samples.first - len(G)
        G = torch.cat([G.new_zeros(before, *G.shape[1:]), G, G.new_zeros(after, *G.shape[1:])])
        return G if self.scale is None else G * self.scale.to(G)


class Rollout:
    """Told of every module call while the model runs a second time (see :mod:`ocnopt.rollout`)."""

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        """``inputs``: the tensors among the arguments."""

    def after(self, name: str, occurrence: int, outputs: list[Tensor]) -> None:
        """``outputs``: the floating-point tensors among the results."""


def detached(tree: Any) -> Any:
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:  # what nearly all layers are given
        return (tree[0].detach(),)
    return mapped(Tensor.detach, tree)


def floating(tree: Any) -> list[Tensor]:
    if type(tree) is Tensor:  # what nearly all of them return
        return [tree] if tree.is_floating_point() else []
    return [t for t in tensors(tree) if t.is_floating_point()]


def versions_of(tree: Any) -> list[int]:
    return [t._version for t in tensors(tree) if not t.is_inference()]


class Told(NamedTuple):
    """What forward and backward passes have left for a step."""

    passes: Sequence[Pass] = ()
    records: Sequence[Record] = ()
    folded: Folded | None = None
