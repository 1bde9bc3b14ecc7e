"""The hooks on one module: what it read, and what the loss thinks of what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ocnopt.backwards import add, hook
from ocnopt.environment import autocast_dtype
from ocnopt.hosts import Host
from ocnopt.layers import Adapter
from ocnopt.readings import product
from ocnopt.records import Need, Pass, Record, detached, floating, versions_of
from ocnopt.rng import RNGState
from ocnopt.tallies import add_up, graph_is_kept
from ocnopt.trees import mapped, tensors

if TYPE_CHECKING:
    from ocnopt.capture import Tape


class Place:
    """One of the modules that the tape watches. It is the tape that knows which pass is under way."""

    def __init__(self, tape: Tape, name: str, module: nn.Module) -> None:
        self.tape, self.name, self._is_host = tape, name, isinstance(module, Host)
        # a module around other players would count their changes a second time
        self.measured = name in tape.measured

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape, name = self.tape, self.name
        occurrence = tape.counts.get(name, 0)
        tape.counts[name] = occurrence + 1
        if tape.rollout is not None:
            tape.rollout.before(name, occurrence, tensors((args, kwargs)))
            return None
        this = tape.current
        if (attendance := tape.follower.attendance) is not None and this is not None:
            attendance.enter(name)
            plain = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
            return self._as_foreseen(this, module, occurrence, args, kwargs, plain)
        step = None
        if self.measured and (recorder := tape.follower.recorder) is not None:
            step = recorder.enter(name, args, kwargs)
        if step is not None and this is not None and this.foreseeable:
            plain, trains = step.plain is not None, step.entry.mode.grad
            return self._as_foreseen(this, module, occurrence, args, kwargs, plain) if trains else None
        need = tape.needed()
        if not need:
            return None
        this = this or Pass(None)
        this.order.append(name)
        if not self.measured or not (need.calls or need.states):
            return None
        this.called[module] = None
        record = self._record(this, module, occurrence, args, kwargs, need)
        passed_on = self._watch_inputs(record, args, kwargs) if need.states else None
        tape.once.begin(record)
        return passed_on

    def _as_foreseen(self, this: Pass, module: nn.Module, occurrence: int, args: Any, kwargs: Any, plain: bool) -> Any:
        """Only what is going to be asked for is watched. Without calls the first layer is enough to bring the pass on
        the tape by what it writes, and others come there by what they read. ``plain``: the arguments are tensors.
        """
        tape, wanted = self.tape, this.wanted(self.name, occurrence)
        if this.certain is None:
            this.order.append(self.name)
            this.called[module] = None
            if this.asking is not None:
                self._note_inputs([t.grad_fn for t in floating((args, kwargs)) if t.requires_grad])
        if tape.asked.calls or not this.announced:
            record = self._record(this, module, occurrence, args, kwargs, tape.asked)
            record.opaque = this.asking is not None and not wanted
        elif not wanted:
            return None
        elif this.watched is not None and plain:  # all that is to be kept are readings of edges
            return self._watch(this, None, occurrence, wanted, args), kwargs
        else:
            record = Record(self.name, module, occurrence, this)
        if plain:
            passed_on = self._watch(this, record, occurrence, wanted, args), kwargs
        else:
            passed_on = self._watch_inputs(record, args, kwargs)
        if this.groups is not None:
            tape.once.begin(record)
        return passed_on

    def _watch(
        self, this: Pass, record: Record | None, occurrence: int, wanted: Container[int], args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """As :meth:`_watch_inputs`, of tensors and nothing else."""
        given, i = list(args), 0
        for place, t in enumerate(args):
            if t.is_floating_point():
                if i in wanted and t.requires_grad:
                    given[place] = self._alias(this, record, occurrence, i, t)
                i += 1
        return tuple(given)

    def _alias(self, this: Pass, record: Record | None, occurrence: int, i: int, t: Tensor) -> Tensor:
        """An alias of an input. Its reading is kept with the call, or with the pass where it is known by its edge."""
        alone = this.is_alone(self.name, occurrence, i)
        if this.watched is None:
            assert record is not None
            return self.tape.alias(t, this, record, record.readings, i, alone)
        key = this.watched.into_player(self.name, occurrence)[i]
        # a pass that is trained on goes through it even where it stops short of the parameters of that call
        return self.tape.alias(t, this, None, this.readings, key, alone)

    def _record(self, this: Pass, module: nn.Module, occurrence: int, args: Any, kwargs: Any, need: Need) -> Record:
        record = Record(self.name, module, occurrence, this)
        if need.calls:
            record.args, record.versions = detached(args), versions_of(args)
            if kwargs:
                record.kwargs = detached(kwargs)
                record.versions += versions_of(kwargs)
        record.training = module.training
        record.autocast = autocast_dtype(module)
        if self.name in self.tape.randomised:
            record.rng = RNGState.capture({p.device for p in module.parameters()})
        self.tape.open.append(record)
        return record

    def _watch_inputs(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on aliases of the inputs."""
        nodes: list[Any] = []
        args = self._pass_on(record, nodes, args)
        kwargs = {name: self._pass_on(record, nodes, value) for name, value in kwargs.items()}
        self._note_inputs(nodes)
        return args, kwargs

    def _note_inputs(self, nodes: list[Any]) -> None:
        """Should the pass do something else than was expected, its graph tells whether it is a chain."""
        self.tape.ends = nodes, []
        self.tape.graph.append(self.tape.ends)

    def _pass_on(self, record: Record, nodes: list[Any], value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._watched(record, nodes, value, alias=True)
        if type(value) is tuple:
            return tuple([self._pass_on(record, nodes, v) for v in value])
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
            record.opaque = this.opaque = True
            return t
        if this.watched is not None and i not in this.watched.into_player(record.name, record.occurrence):
            return t
        return self._alias(this, record, record.occurrence, i, t)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        tape = self.tape
        if tape.rollout is not None:
            tape.rollout.after(self.name, tape.counts[self.name] - 1, floating(output))
            return None
        tape.once.end()
        changed = None
        if tape.open and tape.open[-1].module is module:
            changed = self._watch_outputs(tape.open.pop(), output)
        if tape.ends is not None:
            outputs = floating(output if changed is None else changed)
            tape.ends[1].extend([t.grad_fn for t in outputs if t.requires_grad])
            tape.ends = None
        if self.measured and (recorder := tape.follower.recorder) is not None:
            recorder.leave(self.name, output if changed is None else changed)
        elif (attendance := tape.follower.attendance) is not None:
            attendance.leave()
        return changed

    def _watch_outputs(self, record: Record, output: Any) -> Any:
        outputs, this = floating(output), record.origin
        trained = [i for i, t in enumerate(outputs) if t.requires_grad]
        if not trained:
            return None
        handed_out = None in [outputs[i].grad_fn for i in trained]
        if handed_out:  # a hook on a leaf (a parameter, handed out as it is) would stay for ever
            output = mapped(lambda t: t.view_as(t) if t.requires_grad and t.grad_fn is None else t, output)
            outputs = floating(output)
        keep = self._keepers(record, outputs)
        adapter = this.summed.get(record.name) if len(outputs) == 1 else None
        for i in trained:
            hook(outputs[i], self._arrival(record, i, keep, adapter))
        this.announced = True
        return output if handed_out else None

    def _arrival(
        self, record: Record, i: int, keep: list[Callable[[], None]], adapter: Adapter | None
    ) -> Callable[[Tensor], None]:
        """The hook of output i. ``adapter``: with which the call is added to others, if it may be."""
        tape, this = self.tape, record.origin
        kept = this.whole or tape.asked.calls

        def arrive(h: Tensor) -> None:
            if not tape.hears(this, record) or record.tallies:
                return
            if not record.arrived:
                tape.take(record)
                for each in keep:
                    each()
            if kept:
                add(record.h, i, h)
            if not this.compared:
                record.sizes.setdefault(i, (h.dtype, []))[1].append(product(h.detach(), h.detach()))
            record.spent = not graph_is_kept()
            if adapter is not None and record.spent:
                add_up(record, adapter)

        return arrive

    def _keepers(self, record: Record, outputs: list[Tensor]) -> list[Callable[[], None]]:
        """What keeps the outputs, those that the loss does not depend on included, once the first adjoint arrives.

        In a chain outputs are not compared, and nothing here holds on to them; a host will ask for its own.
        """
        if record.origin.whole or (self._is_host and self.tape.needed().calls):
            # detached tensors share their memory: an in-place activation after the layer overwrites them
            return [self._keeper(record, i, t.detach()) for i, t in enumerate(outputs)]
        return []

    def _keeper(self, record: Record, i: int, out: Tensor) -> Callable[[], None]:
        """Keeps the output as it was: a copy, until it is known that nobody overwrites it."""
        left_alone = self.tape.left_alone
        version, kept = out._version, out if record.name in left_alone else out.clone()

        def keep() -> None:
            overwritten = out._version != version
            (left_alone.discard if overwritten else left_alone.add)(record.name)
            if not (overwritten and kept is out):
                record.outputs[i] = kept

        return keep
