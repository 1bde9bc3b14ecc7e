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
from torch.utils.hooks import RemovableHandle

from ocnopt.backwards import Backwards, add, sinks_of
from ocnopt.chain import Ends, is_chain
from ocnopt.distributed import World
from ocnopt.environment import Autocast, Environment, autocast_dtype, is_transforming
from ocnopt.games.flow import Flow, innermost
from ocnopt.games.following import Follower
from ocnopt.groups import Groups
from ocnopt.hooks import Hook, Hooks, Others
from ocnopt.hosts import Host
from ocnopt.layers import Adapter
from ocnopt.once import Once
from ocnopt.readings import Reading, product
from ocnopt.records import Folded, Need, Pass, Record, Rollout, Sinks, detached, floating, versions_of
from ocnopt.rng import AllRNG, RNGState
from ocnopt.scaling import Scaling
from ocnopt.tallies import add_up, graph_is_kept
from ocnopt.trees import mapped, tensors


class Tape:
    """Registers the hooks, keeps the records of the passes since the last step."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], need: Callable[[], Need]) -> None:
        self.model, self.need = model, need
        self._modules = dict(modules)
        self._measured = innermost(modules)
        self.records: list[Record] = []
        self.folded: Folded | None = None  # what is left of earlier passes
        self.before_pass: Callable[[], None] = lambda: None  # told of a pass while the tape holds others
        self.trained: Callable[[], set[int]] = lambda: set(map(id, model.parameters()))  # ids, of the optimizer's
        self.order: list[str] = []  # of the last pass that was trained on; until one was, of the last pass
        self.flow: Flow | None = None  # likewise
        self._trained = False  # is it one that was trained on?
        self.borrowed = False  # did gradients come from a pass with weights of somebody else's?
        self._borrows = False  # is such a pass under way?
        self.summed: Callable[[], Mapping[str, Adapter]] = dict  # see ``Pass.summed``
        self._follower = Follower()
        self.rollout: Rollout | None = None
        self.randomised: set[str] = set()  # modules that draw random numbers which their adapter must draw again
        self._current: Pass | None = None
        self._asked = Need()  # of the pass under way
        self._several = False  # were there several passes before the last step?
        self._turns = 0
        self._open: list[Record] = []
        self._counts: dict[str, int] = {}
        self._graph: list[Ends] = []
        self._chains: dict[tuple[Any, ...], bool] = {}
        self._chain = False  # was the last pass one?
        self.asking: set[str] | None = None  # the modules at whose inputs the policy of a chain is asked
        self._thawed: list[bool] = []  # which parameters were trained in the last pass
        self._left_alone: set[str] = set()  # modules whose outputs nobody overwrites in place
        self._others = Others(model)
        self._handles = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._end), always_call=True),  # also when the model raises
        ]
        self._scaling = Scaling(model, lambda: self.need().calls or self.need().states)
        self._backwards = Backwards(model, self._scaling.gone, self.clear, self._drop)
        self.once = Once(self._backwards.counts)
        self._places: list[tuple[nn.Module, RemovableHandle, RemovableHandle]] = []
        for name, module in modules.items():
            before = module.register_forward_pre_hook(Hook(self._before(name)), with_kwargs=True)
            after = module.register_forward_hook(Hook(self._after(name)), prepend=True)
            self._places.append((module, before, after))
            self._handles += [before, after]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._scaling.remove()
        self.clear()

    @contextmanager
    def following(self, rollout: Rollout) -> Iterator[None]:
        """The hooks record nothing while the model runs again: they tell ``rollout``."""
        self.rollout = rollout
        try:
            yield
        finally:
            self.rollout = None

    def release(self) -> None:
        """Give back what is needed neither for metrics nor for group gradients any more: a second pass wants memory."""
        for record in self.records:
            record.readings, record.outputs, record.args, record.kwargs = {}, {}, (), {}

    def clear(self) -> None:
        """Forget what arrived. The graph may still be alive: a second backward pass through it starts from nothing."""
        if self.records:
            self._several = len(self.passes) > 1
        self.folded, self._trained, self.borrowed = None, False, False
        self.forget()
        self.once.end()
        self._backwards.rest()
        self._scaling.clear()
        self._follower.clear()
        self._others.rest()

    def forget(self) -> None:
        """The records alone."""
        for this in self.passes:
            this.forget()
        for record in self.records:
            record.forget()
        self.records.clear()

    def _drop(self) -> None:
        """What was heard was not about training."""
        self.borrowed = False
        self.forget()

    def rescale(self, world: World) -> None:
        """Let the adjoints follow what was done to the gradients since the backward pass, by a scaler or anybody."""
        factor = self._scaling.factor(world) if self.need().calls or self.need().states else None
        for this in self.passes:
            this.scale = factor
            for account in this.accounts.values():
                account.finish(factor)
        if self.folded is not None:
            self.folded.scale = factor

    @property
    def passes(self) -> list[Pass]:
        """The passes that a backward pass went through."""
        return list({id(r.origin): r.origin for r in self.records}.values())

    # --- the model ---

    def _needed(self) -> Need:
        """Nothing without gradients, in a second forward pass, with weights of others, or inside a backward pass: there
        a forward pass is activation checkpointing, run again, and the first one has been recorded.
        """
        idle = self.rollout is not None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        if idle or self._borrows or is_transforming():
            return Need()
        return self.need() if self._current is None else self._asked

    def _is_lent(self, parameters: list[nn.Parameter]) -> bool:
        """Does ``functional_call`` run the model with weights of somebody else: tensors that are no parameters, or the
        parameters of another network?
        """
        mine = self.trained()
        return any(type(p) is Tensor for p in parameters) or not any(id(p) in mine for p in parameters)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current, self._open, self._counts, self._graph = None, [], {}, []
        self._borrows = False
        self.once.end()
        need = self._needed()
        if not need:
            return
        self._asked, parameters = need, list(model.parameters())
        self._borrows = self._is_lent(parameters)
        if self._borrows:
            return
        if all(p.grad is None for p in parameters):
            self.clear()  # the gradients of earlier passes are gone, so their records are of no use
        elif self._backwards.only_looked():
            self._drop()
        elif self.records:
            self.before_pass()
        self._scaling.watch(parameters)
        if self._thawed != (thawed := [p.requires_grad for p in parameters]):
            self._thawed, self.asking = thawed, None  # others may act
        if need.calls or need.states:  # then the model may run again
            self._keep_places()
            self._others.watch()
        given = args, kwargs
        args, kwargs = detached(given)
        self._current = Pass(_batch_size(args, kwargs), args, kwargs, versions_of((args, kwargs)))
        self._current.turn, self._turns = self._turns, self._turns + 1
        self._current.autocast = Autocast.capture(model)
        if need.rank != 1 and self._current.batch is not None and not self.records and not self._several:
            self._current.groups, self.once.gram = Groups.of(self._current.batch, need.rank), need.gram
        self._current.rng = AllRNG.capture(devices_of(model)) if need.calls or need.states else None
        self._current.summed = self.summed() if need.calls and not need.states else {}
        if need.states:
            self._current.environment = Environment.capture(model)
        if need.flow or need.states:
            self._current.given = tuple((t.shape, t.dtype) for t in tensors(given))
            self._current.watched = self._follower.begin(model, tensors(given), self._current.given, self._read)
        self._current.whole, self._current.split = need.whole, need.split

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.once.end()
        flow = self._follower.end(output, self._current)
        this, self._current, self._open = self._current, None, []
        borrows, self._borrows = self._borrows, False
        idle = self._others.rest()
        if borrows and output is not None:
            self._when_trained_on(floating(output), self._borrow)
        if this is None:
            return None
        this.idle = idle
        self._keep_places()
        if this.environment is not None:
            this.environment.idle = idle
        this.flow = flow
        if output is None:  # the model has raised: nothing comes of this pass
            return None
        if not self._trained:
            self.order, self.flow = this.order, flow
        outputs, need = floating(output), self.need()
        if need.flow and not need.states:
            seen = Pass(None, order=this.order, flow=flow)  # without what it saw
            self._when_trained_on(outputs, lambda: self._settle(seen))
        if not need.states:
            return None
        nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
        this.chain = self._chain = self._is_chain(tuple(this.order), nodes)
        self._graph = []
        numbers = iter(range(len(outputs)))

        def alias(t: Tensor) -> Tensor:
            """Its gradient is that of what happens outside: a loss inside the model may read the same tensor."""
            i = next(numbers) if t.is_floating_point() else -1
            if t.grad_fn is None or i < 0:
                return t
            return self._alias(t, this, this.sinks, this.D, i, then=lambda: self._settle(this))

        return mapped(alias, output)

    def _rows(self, this: Pass) -> int | None:
        """The number of samples, if changes are to be told sample by sample."""
        return this.batch if this.split else None

    def _when_trained_on(self, outputs: list[Tensor], then: Callable[[], None]) -> None:
        """For passes of which nothing else is asked."""

        def hook(_: Tensor) -> None:
            if self._backwards.counts(sinks_of(self.model)):
                then()

        for t in outputs:
            if t.grad_fn is not None:
                t.register_hook(hook)

    def _settle(self, this: Pass) -> None:
        """This pass is trained on. Others, before or after it, have no say in who acts when."""
        self.order, self.flow, self._trained = this.order, this.flow, True
        if not this.settled and this.flow is not None:
            self._follower.learn(this.given, this.flow)
        this.settled = True

    def _borrow(self) -> None:
        self.borrowed = True

    def _keep_places(self) -> None:
        for module, before, after in self._places:
            self._others.keep_places(module, before.id, after.id)
        first, last = self._handles[:2]
        cast(Hooks, self.model._forward_pre_hooks).move_to_end(first.id, last=False)
        cast(Hooks, self.model._forward_hooks).move_to_end(last.id)

    # --- its modules ---

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            opened = len(self._open)
            with self._follower.aside():
                passed_on = act(module, args, kwargs)
            if len(self._open) > opened:
                self.once.begin(self._open[-1])
            return passed_on

        def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            occurrence = self._counts.get(name, 0)
            self._counts[name] = occurrence + 1
            if self.rollout is not None:
                self.rollout.before(name, occurrence, tensors((args, kwargs)))
                return None
            if name in self._measured:
                self._follower.enter(name, args, kwargs)
            need = self._needed()
            if not need:
                return None
            this = self._current or Pass(None)
            this.order.append(name)
            # a module around other players would count their changes a second time
            if not (need.calls or need.states) or name not in self._measured:
                return None
            record = Record(name, module, occurrence, this)
            if need.calls:
                record.args, record.kwargs = detached(args), detached(kwargs)
                record.versions = versions_of((args, kwargs))
            record.training = module.training
            own = sinks_of(module)
            this.sinks += own
            record.sinks = own or this.sinks  # a frozen layer goes by the others
            record.autocast = autocast_dtype(module)
            if name in self.randomised:
                record.rng = RNGState.capture(devices_of(module))
            self._open.append(record)
            return self._watch_inputs(record, args, kwargs) if need.states else None

        return hook

    def _watch_inputs(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on aliases of the inputs."""
        nodes: list[Any] = []
        args = self._pass_on(record, nodes, args)
        kwargs = {name: self._pass_on(record, nodes, value) for name, value in kwargs.items()}
        self._graph.append((nodes, []))
        return args, kwargs

    def _pass_on(self, record: Record, nodes: list[Any], value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._watched(record, nodes, value, alias=True)
        if type(value) is tuple:
            return tuple(self._pass_on(record, nodes, v) for v in value)
        for t in tensors(value):  # whoever gave us a list or dict may want it back with what the module adds to it
            self._watched(record, nodes, t, alias=False)
        return value

    def _watched(self, record: Record, nodes: list[Any], t: Tensor, alias: bool) -> Tensor:
        if not t.is_floating_point():
            return t
        i, this = record.arity, record.origin
        record.arity += 1
        if not t.requires_grad:
            return t
        nodes.append(t.grad_fn)
        if not alias:
            record.opaque = True
            return t
        if this.watched is not None and not this.watched.into_player(record.name, record.occurrence, i):
            return t
        if self._chain and self.asking is not None and record.name not in self.asking:
            record.opaque = True
            return t
        return self._alias(t, this, record.sinks, record.readings, i)

    def _read(self, t: Tensor, value: int, entry: int) -> Tensor:
        """An operation is about to read a tensor, by an edge that is watched."""
        this = self._current
        return t if this is None else self._alias(t, this, this.sinks, this.readings, (value, entry))

    def _alias(
        self,
        t: Tensor,
        this: Pass,
        sinks: Sinks,
        store: dict[Any, Reading],
        key: Any,
        then: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """An alias of a tensor for one reader: a hook on it sees the gradient through this edge alone, and keeps it."""
        reading = store[key] = Reading(t, self._rows(this))
        t = t.view_as(t)

        def hook(g: Tensor) -> None:
            if self._backwards.counts(sinks):
                compared = this.compared or store is this.D  # outputs always are
                reading.arrive(g, last=not graph_is_kept(), kept=compared, sized=not compared)
                then()

        t.register_hook(hook)
        return t

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self.rollout is not None:
                self.rollout.after(name, self._counts[name] - 1, floating(output))
                return None
            self.once.end()
            with self._follower.aside():
                changed = self._watch_outputs(module, output)
                if name in self._measured:
                    self._follower.leave(name, output if changed is None else changed)
            return changed

        return hook

    def _watch_outputs(self, module: nn.Module, output: Any) -> Any:
        if not self._open or self._open[-1].module is not module:
            return None
        record = self._open.pop()
        handed_out = any(t.requires_grad and t.grad_fn is None for t in floating(output))
        if handed_out:  # a hook on a leaf (a parameter, handed out as it is) would stay for ever
            output = mapped(lambda t: t.view_as(t) if t.requires_grad and t.grad_fn is None else t, output)
        outputs = floating(output)
        keep = self._keepers(record, outputs) if any(t.requires_grad for t in outputs) else []
        adapter = record.origin.summed.get(record.name) if len(outputs) == 1 else None
        for i, t in enumerate(outputs):
            if t.requires_grad:
                t.register_hook(self._arrival(record, i, keep, adapter))
                if self._graph:
                    self._graph[-1][1].append(t.grad_fn)
        return output if handed_out else None

    def _arrival(
        self, record: Record, i: int, keep: list[Callable[[], None]], adapter: Adapter | None
    ) -> Callable[[Tensor], None]:
        """The hook of output i. ``adapter``: with which the call is added to others, if it may be."""
        kept = record.origin.whole or self._asked.calls

        def hook(h: Tensor) -> None:
            if not self._backwards.counts(record.sinks) or record.tallies:
                return
            if not record.arrived:
                self._join(record.origin)
                self.records.append(record)
                record.arrived = True
                for each in keep:
                    each()
            if kept:
                add(record.h, i, h)
            if not record.origin.compared:
                record.sizes.setdefault(i, (h.dtype, []))[1].append(product(h.detach(), h.detach()))
            record.spent = not graph_is_kept()
            if adapter is not None and record.spent:
                add_up(record, adapter)

        return hook

    def _join(self, this: Pass) -> None:
        """The groups of one pass are others where there are two: what the backward pass has split is of no use."""
        first = self.records[0].origin if self.records else this
        if first is this:
            return
        if first.groups is not None:
            for record in self.records:
                record.columns.clear()
        first.groups = this.groups = None

    def _keepers(self, record: Record, outputs: list[Tensor]) -> list[Callable[[], None]]:
        """What keeps the outputs, those that the loss does not depend on included, once the first adjoint arrives.

        In a chain outputs are not compared, and nothing here holds on to them; a host will ask for its own.
        """
        need = self.need()
        if (need.states and record.origin.whole) or (need.calls and isinstance(record.module, Host)):
            # detached tensors share their memory: an in-place activation after the layer overwrites them
            return [self._keeper(record, i, t.detach()) for i, t in enumerate(outputs)]
        return []

    def _keeper(self, record: Record, i: int, out: Tensor) -> Callable[[], None]:
        """Keeps the output as it was: a copy, until it is known that nobody overwrites it."""
        version, kept = out._version, out if record.name in self._left_alone else out.clone()

        def keep() -> None:
            overwritten = out._version != version
            (self._left_alone.discard if overwritten else self._left_alone.add)(record.name)
            if not (overwritten and kept is out):
                record.outputs[i] = kept

        return keep

    def _is_chain(self, order: tuple[str, ...], outputs: list[Any]) -> bool:
        """Is the input of every layer the whole state?

        Not if parameters are used outside the calls that are seen: the change they make shows in no layer's input yet.
        The same calls may be wired otherwise tomorrow, so a chain is looked at each time; what was not one once is
        never taken for one again, since only then are outputs kept (from the next pass on) that changes are added up
        from.
        """
        trained = {n for n, m in self._modules.items() if any(p.requires_grad for p in m.parameters(recurse=False))}
        if not trained <= self._measured & set(order):
            return False
        key = (order, tuple(bool(nodes) for _, nodes in self._graph))
        if self._chains.get(key, True):
            self._chains[key] = is_chain(self._graph, outputs)
        return self._chains[key]


def devices_of(module: nn.Module) -> set[torch.device]:
    return {p.device for p in module.parameters()}


def _batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Samples are dimension 0 of the model's (first) input."""
    for t in tensors((args, kwargs)):
        if t.dim():
            return int(t.shape[0])
    return None
