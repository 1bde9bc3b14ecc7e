"""Hooks on the model and the tape of one step: what each layer saw, and what the loss thinks of its output.

Nothing is held before the backward pass has been there: a record lives in the tensor hooks of the autograd graph and
enters the tape when its first adjoint arrives. A graph that is thrown away takes its records with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from ocnopt import apart
from ocnopt.anatomy import Anatomy
from ocnopt.backwards import Backwards, Leaves, hook, sinks_of
from ocnopt.chain import Ends, is_chain
from ocnopt.distributed import World
from ocnopt.environment import Autocast, Environment, is_transforming
from ocnopt.fused.support import splits_on
from ocnopt.games.edges import Key
from ocnopt.games.flow import Flow, innermost
from ocnopt.games.following import Follower
from ocnopt.groups import Groups
from ocnopt.hooks import Hook, Hooks, Others
from ocnopt.layers import Adapter
from ocnopt.once import Once
from ocnopt.places import Place
from ocnopt.readings import Reading, Waiting
from ocnopt.records import Folded, Need, Pass, Record, Rollout, detached, floating, versions_of
from ocnopt.rng import AllRNG
from ocnopt.scaling import Scaling
from ocnopt.stock import Stock
from ocnopt.tallies import graph_is_kept
from ocnopt.trees import mapped, tensors

_NOTHING = Need()


class Tape:
    """Registers the hooks, keeps the records of the passes since the last step."""

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], need: Callable[[], Need], stock: Stock
    ) -> None:
        self.model, self.need = model, need
        self.modules = dict(modules)
        self.measured = innermost(modules)
        self.records: list[Record] = []
        self.waiting = Waiting()
        self._reached: dict[int, Pass] = {}  # by a backward pass, whether or not records tell of it
        self.folded: Folded | None = None  # what is left of earlier passes
        self.before_pass: Callable[[], None] = lambda: None  # told of a pass while the tape holds others
        self.trained: Callable[[], set[int]] = lambda: set(map(id, model.parameters()))  # ids, of the optimizer's
        self.order: list[str] = []  # of the last pass that was trained on; until one was, of the last pass
        self.flow: Flow | None = None  # likewise
        self._trained = False  # is it one that was trained on?
        self.borrowed = False  # did gradients come from a pass with weights of somebody else's?
        self._borrows = False  # is such a pass under way?
        self.summed: Callable[[], Mapping[str, Adapter]] = dict  # see ``Pass.summed``
        self.follower = Follower(modules if self.measured == set(modules) else {})
        self.rollout: Rollout | None = None
        self.randomised: set[str] = set()  # modules that draw random numbers which their adapter must draw again
        self.current: Pass | None = None
        self.asked = Need()  # of the pass under way
        self._several = False  # were there several passes before the last step?
        self._turns = 0
        self.open: list[Record] = []
        self.counts: dict[str, int] = {}  # of the calls of each module
        self.graph: list[Ends] = []  # of the calls of the pass under way
        self.ends: Ends | None = None  # of the call under way
        self._chains: dict[tuple[Any, ...], bool] = {}
        self._known: list[tuple[int, bool]] = []  # the parameters in the last pass, and which were trained
        self._leaves = Leaves()
        self._trained_modules: set[str] = set()  # those that hold some of them
        self.left_alone: set[str] = set()  # modules whose outputs nobody overwrites in place
        self._anatomy: Anatomy | None = None  # of the model, when it last ran with its own weights
        self._others = Others(model)
        apart.prepare()
        self._handles = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),  # also when the model raises
        ]
        self.scaling = Scaling(model, self._wants_scale)
        self._backwards = Backwards(model, self.scaling.gone, self.clear, self._drop)
        self.once = Once(self.hears, stock)
        self._places: list[tuple[nn.Module, RemovableHandle, RemovableHandle]] = []
        for name, module in modules.items():
            place = Place(self, name, module)
            before = module.register_forward_pre_hook(Hook(place.before), with_kwargs=True)
            after = module.register_forward_hook(Hook(place.after), prepend=True)
            self._places.append((module, before, after))
            self._handles += [before, after]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.scaling.remove()
        self.clear()

    @contextmanager
    def following(self, rollout: Rollout) -> Iterator[None]:
        """The hooks record nothing while the model runs again: they tell ``rollout``."""
        self._keep_places()
        self.rollout = rollout
        try:
            yield
        finally:
            self.rollout = None

    def release(self) -> None:
        """Give back what metrics and group gradients have been made of: a second pass wants memory."""
        for record in self.records:
            record.args, record.kwargs = (), {}
            if not record.origin.whole:  # what a layer wrote is compared with it
                record.h = {}

    def clear(self) -> None:
        """Forget what arrived. The graph may still be alive: a second backward pass through it starts from nothing."""
        if self._reached:
            self._several = len(self._reached) > 1
        self.folded, self._trained, self.borrowed = None, False, False
        self.forget()
        self.once.end()
        self._backwards.rest()
        self.scaling.clear()
        self.follower.clear()
        self._others.rest()

    def forget(self) -> None:
        """The records alone."""
        for this in self.passes:
            this.forget()
        for record in self.records:
            record.forget()
        self.records.clear()
        self._reached.clear()

    def _drop(self) -> None:
        """What was heard was not about training."""
        self.borrowed = False
        self.forget()

    def rescale(self, world: World) -> None:
        """Let the adjoints follow what was done to the gradients since the backward pass, by a scaler or anybody."""
        factor = self.scaling.factor(world) if self.need().calls or self.need().states else None
        for this in self.passes:
            this.scale = factor
            for account in this.accounts.values():
                account.finish(factor)
        if self.folded is not None:
            self.folded.scale = factor

    @property
    def hooked_by_others(self) -> bool:
        """Had others hooks on the model in the last pass?"""
        return self._others.there

    @property
    def passes(self) -> list[Pass]:
        """The passes that a backward pass went through."""
        return list(self._reached.values())

    # --- the model ---

    def needed(self) -> Need:
        """Nothing without gradients, in a second forward pass, with weights of others, or inside a backward pass: there
        a forward pass is activation checkpointing, run again, and the first one has been recorded.
        """
        idle = self.rollout is not None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        if idle or self._borrows or is_transforming():
            return _NOTHING
        return self.need() if self.current is None else self.asked

    def _is_lent(self, parameters: list[nn.Parameter]) -> bool:
        """Does ``functional_call`` run the model with weights of somebody else: tensors that are no parameters, or the
        parameters of another network?
        """
        mine = self.trained()
        return any(type(p) is Tensor for p in parameters) or not any(id(p) in mine for p in parameters)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.current, self.open, self.counts, self.graph, self.ends = None, [], {}, [], None
        self._borrows = False
        self.once.end()
        need = self.needed()
        if not need:
            return
        known, self._anatomy = self._anatomy, None
        anatomy = Anatomy.of(model, known)
        self.asked, parameters = need, anatomy.parameters
        self._borrows = anatomy is not known and self._is_lent(parameters)
        if self._borrows:
            return
        self._anatomy = anatomy
        if all(p.grad is None for p in parameters):
            self.clear()  # the gradients of earlier passes are gone, so their records are of no use
        elif self._backwards.only_looked():
            self._drop()
        elif self._reached:
            self.before_pass()
        self._look_at(parameters)
        if need.calls or need.states:  # then the model may run again
            self._others.watch(anatomy.modules)
            if not self._others.absent:
                self._keep_places()
        given = args, kwargs
        args, kwargs = detached(given)
        this = self.current = Pass(_batch_size(args, kwargs), args, kwargs, versions_of((args, kwargs)))
        this.leaves = self._leaves
        this.turn, self._turns = self._turns, self._turns + 1
        this.whole, this.split = need.whole, need.split
        if need.rank != 1 and this.batch is not None and not self._reached and not self._several:
            this.groups = Groups.of(this.batch, need.rank)
            self.once.gram = need.gram and not (need.fused and splits_on(parameters[0].device, this.groups.rank))
        this.summed = self.summed() if need.calls and not need.states else {}
        self._foresee(this, need, anatomy, tensors(given))

    def _foresee(self, this: Pass, need: Need, anatomy: Anatomy, inputs: list[Tensor]) -> None:
        """What can be known of a pass before it runs; and what it depends on, to be kept for another."""
        certain = None
        if need.flow or need.states:
            around = [type(mode) for mode in _get_current_function_mode_stack()]  # each may change what functions do
            this.given = (*map(_kind_of, inputs), *around)
            alone = self._others.absent and all(kind is DeviceContext for kind in around)
            if need.states and not need.whole and alone and _are_tensors(this, inputs):
                certain = self.follower.certain(this.given, anatomy)
        this.autocast = autocast = Autocast.of(anatomy)
        rng = AllRNG.none() if certain is not None else AllRNG.capture(anatomy.places.devices)
        this.rng = rng if need.calls or need.states else None
        if need.states:
            this.environment = Environment.of(self.model, anatomy, rng, autocast)
        if certain is not None:
            this.attend(certain)
            self.follower.attend(certain, self._read)
        elif need.flow or need.states:
            this.watched = self.follower.begin(self.model, anatomy, inputs, this.given, rng.of_torch, self._read)
        if need.states and not need.whole and (expected := self.follower.follows) is not None:
            this.asking = expected.asking if this.watched is None else None
            this.foreseeable = this.watched is not None or this.asking is not None

    def _look_at(self, parameters: list[nn.Parameter]) -> None:
        """Which are trained? Mostly those of the last pass."""
        known = [(id(p), p.requires_grad) for p in parameters]
        if known == self._known:
            return
        self._known, self._leaves = known, Leaves()  # others may act
        self.follower.look_again()
        self.scaling.watch(parameters)
        held = {n: m._parameters.values() for n, m in self.modules.items()}
        self._trained_modules = {n for n, own in held.items() if any(p is not None and p.requires_grad for p in own)}

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.once.end()
        flow = self.follower.end(output, self.current)
        this, self.current, self.open = self.current, None, []
        borrows, self._borrows = self._borrows, False
        idle = self._others.rest()
        if borrows and output is not None:
            self._when_trained_on(floating(output), self._borrow)
        if this is None:
            return None
        this.idle = idle
        if this.environment is not None:
            this.environment.idle = idle
        this.end(flow, False)
        if output is None:  # the model has raised: nothing comes of this pass
            return None
        if not self._trained:
            self.order, self.flow = this.order, flow
        outputs, need = floating(output), self.asked
        if need.flow and not need.states:
            seen = Pass(None, order=this.order, flow=flow)  # without what it saw
            self._when_trained_on(outputs, lambda: self.settle(seen))
        if not need.states:
            return None
        this.end(flow, self._is_chain(this, outputs))
        self.graph = []
        numbers = iter(range(len(outputs)))

        def alias(t: Tensor) -> Tensor:
            """Its gradient is that of what happens outside: a loss inside the model may read the same tensor."""
            i = next(numbers) if t.is_floating_point() else -1
            if t.grad_fn is None or i < 0:
                return t
            return self.alias(t, this, None, this.D, i)

        return mapped(alias, output)

    def alias(
        self, t: Tensor, this: Pass, record: Record | None, store: dict[Any, Reading], key: Any, alone: bool = False
    ) -> Tensor:
        """An alias of a tensor for one reader: a hook on it sees the gradient through this edge alone, and keeps it.

        Args:
            record: the call that reads it, if one does.
            alone: nobody else reads it, and none is needed.
        """
        reading = store[key] = Reading(t, this.batch if this.split else None)
        if not alone or t.grad_fn is None:
            t = t.view_as(t)
        hook(t, Arrival(self, this, record, reading, store is this.D))
        return t

    def _read(self, t: Tensor, value: int, entry: int, alone: bool) -> Tensor:
        """An operation is about to read a tensor, by an edge that is watched."""
        this = self.current
        return t if this is None else self.alias(t, this, None, this.readings, Key(value, entry), alone)

    def hears(self, this: Pass, record: Record | None) -> bool:
        """Does what arrives at a pass, or at a call in it, belong to the step?"""
        task = torch._C._current_graph_task_id()
        if this.heard[0] == task:  # the same is true of all that arrives in it
            return this.heard[1]
        if not this.all_reached():
            return self._backwards.counts(this.sinks if record is None else record.sinks)
        this.heard = task, self._backwards.counts_for_all()
        return this.heard[1]

    def reach(self, this: Pass) -> None:
        """A backward pass has come by."""
        self._reached.setdefault(id(this), this)

    def take(self, record: Record) -> None:
        """Its first adjoint has arrived. The groups of one pass are others where there are two: what the backward pass
        has split is of no use.
        """
        self.reach(record.origin)
        first = self.records[0].origin if self.records else record.origin
        if first is not record.origin:
            if first.groups is not None:
                for other in self.records:
                    other.columns.clear()
            first.groups = record.origin.groups = None
        self.records.append(record)
        record.arrived = True

    def _wants_scale(self) -> bool:
        """Is it of interest what becomes of the gradients of the backward pass under way?"""
        need = self.need()
        return need.calls or need.states

    def _when_trained_on(self, outputs: list[Tensor], then: Callable[[], None]) -> None:
        """For passes of which nothing else is asked."""

        def arrive(_: Tensor) -> None:
            if self._backwards.counts(sinks_of(self.model)):
                then()

        for t in outputs:
            if t.grad_fn is not None:
                t.register_hook(arrive)

    def settle(self, this: Pass) -> None:
        """This pass is trained on. Others, before or after it, have no say in who acts when."""
        self.order, self.flow, self._trained = this.order, this.flow, True
        if not this.settled and this.flow is not None:
            self.follower.learn(this.given, this.flow)
        this.settled = True

    def _borrow(self) -> None:
        self.borrowed = True

    def _keep_places(self) -> None:
        self._others.keep_places(self._places)
        first, last = self._handles[:2]
        cast(Hooks, self.model._forward_pre_hooks).move_to_end(first.id, last=False)
        cast(Hooks, self.model._forward_hooks).move_to_end(last.id)

    def _is_chain(self, this: Pass, outputs: list[Tensor]) -> bool:
        """Is the input of every layer the whole state?

        Not if parameters are used outside the calls that are seen: the change they make shows in no layer's input yet.
        The same calls may be wired otherwise tomorrow, so a chain is looked at each time that it does something else;
        what was not one once is never taken for one again, since only then are outputs kept (from the next pass on)
        that changes are added up from.
        """
        if this.asking is not None and this.flow is not None and this.flow.asking is this.asking:
            return True  # it did what it was expected to
        if this.watched is not None or not self._trained_modules <= self.measured & set(this.order):
            return False  # one that is watched for edges was none before, and its graph has not been looked at
        key = (tuple(this.order), tuple(bool(nodes) for _, nodes in self.graph))
        if self._chains.get(key, True):
            self._chains[key] = is_chain(self.graph, [t.grad_fn for t in outputs if t.grad_fn is not None])
        return self._chains[key]


class Arrival:
    """The hook at one edge."""

    __slots__ = ("outside", "reading", "record", "tape", "this")

    def __init__(self, tape: Tape, this: Pass, record: Record | None, reading: Reading, outside: bool) -> None:
        """``outside``: it leads out of the model."""
        self.tape, self.this, self.record, self.reading, self.outside = tape, this, record, reading, outside

    def __call__(self, g: Tensor) -> None:
        tape, this, record = self.tape, self.this, self.record
        if not tape.hears(this, record):
            return
        if record is None:
            tape.reach(this)
        elif not record.arrived:
            tape.take(record)
        compared = self.outside or this.compared  # outputs always are
        self.reading.arrive(g, not graph_is_kept(), compared, not compared, tape.waiting)
        if self.outside:
            tape.settle(this)


def _kind_of(t: Tensor) -> tuple[Any, ...]:
    """All of an input that code may know without knowing its numbers."""
    strides = t.stride() if t.layout is torch.strided else t.layout
    return t.shape, strides, t.dtype, t.device, t.requires_grad


def _are_tensors(this: Pass, inputs: list[Tensor]) -> bool:
    """Is the model given tensors, one after the other, and nothing else that code could ask for?"""
    if this.kwargs or len(this.args) != len({*map(id, inputs)}):
        return False
    return all(type(t) is Tensor for t in this.args) and not any(map(vars, inputs))


def _batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Samples are dimension 0 of the model's (first) input."""
    for t in tensors((args, kwargs)):
        if t.dim():
            return int(t.shape[0])
    return None
