"""Takes down the data flow of a pass while the model runs."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ocnopt.apart import Unfollowed
from ocnopt.games.edges import Edges
from ocnopt.games.expected import Read, Step, Walk, made_of
from ocnopt.games.flow import Entry, Flow, Mode, Overwriting, Value, equal, filled, kind_of, short
from ocnopt.games.plain import QUERIES
from ocnopt.rng import RNGState
from ocnopt.trees import is_alone, mapped, tensors


class Recorder(Unfollowed):
    """Calls of players are opaque: :meth:`enter` and :meth:`leave` stand around them."""

    def __init__(
        self,
        model: nn.Module,
        inputs: list[Tensor],
        device: str = "cpu",
        devices: Iterable[torch.device] | None = None,
        expected: Flow | None = None,
        watched: Edges | None = None,
        read: Read = lambda t, value, entry, alone: t,
    ) -> None:
        """``device``: the kind of that of the parameters. ``devices``: whose random numbers to keep where they are
        drawn; ``None``: of none. ``expected``: the flow that the pass is likely to have. ``watched``: edges of that
        flow; operations at their ends get what ``read`` makes of the tensors.
        """
        super().__init__()
        self._model, self._watched, self._read = model, watched, read
        self.entries: list[Entry] = []
        self.draws: dict[int, RNGState] = {}
        self._rng = None if devices is None else RNGState.capture(devices)
        self.unknown: str | None = None
        self._asks = False  # see :class:`Flow`
        self.constants: list[Tensor] = []
        self._device = device
        self._values: dict[int, Value] = {}
        self._refs: dict[int, weakref.ref[Tensor]] = {}  # an id is that of a tensor as long as it lives
        self._turns = 0
        self._inside = 0  # calls of players, one in another
        self._stands_aside = False  # while one of them runs
        self._call: tuple[Any, Any, Mode] | None = None
        self._step: Step | None = None  # the call as it was expected
        self._inputs = [kind_of(t) for t in inputs]
        follows = expected is not None and self._rng is None and expected.device == self._device
        self._walk = Walk(expected, model, inputs) if follows and expected is not None else None
        if self._walk is None:
            for t in inputs:
                self._bind(t, self._next())

    def __exit__(self, *raised: Any) -> None:
        if not self._stands_aside:  # as it does for ever where a player was interrupted
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @cached_property
    def _parameters(self) -> dict[int, str]:
        return {id(p): name for name, p in self._model.named_parameters()}

    @cached_property
    def _buffers(self) -> dict[int, str]:
        return {id(b): name for name, b in self._model.named_buffers()}

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or self.unknown is not None:
            return func(*args, **kwargs)
        walk = self._walk
        if walk is not None and walk.is_next("operation", func):
            if (step := walk.taken(args, kwargs)) is not None:
                return self._follow(walk, step, func, args, kwargs)
            self._leave_path()
        into = tensors((args, kwargs))
        versions = [_version(t) for t in into]
        aliases = self._watched is not None and self._walk is None
        given = self._aliased(func, args, kwargs) if aliases else (args, kwargs)
        out = func(*given[0], **given[1])
        written = [i for i, (t, version) in enumerate(zip(into, versions, strict=True)) if _version(t) != version]
        return self._take_down(func, args, kwargs, into, given, written, out)

    def _take_down(
        self, func: Callable[..., Any], args: Any, kwargs: Any, into: list[Tensor], given: Any, written: Any, out: Any
    ) -> Any:
        made = tensors(out)
        if written:  # buffers are put back before another pass
            written = [i for i in written if id(into[i]) not in self._buffers]
        if not written and (same := _given_back(func, into, tensors(given), out)) is not None:
            self._asks = True
            return same
        if written or made:
            self._leave_path()
        if len(written) > 1 or any(id(into[i]) in self._parameters for i in written):
            self.unknown = f"{short(func)} changes several tensors, or a parameter, in place"
        elif written and self._is_shared(into[written[0]]):
            self.unknown = f"{short(func)} changes a tensor in place of which there are views"
        elif written and (spec := self._spec(args, kwargs, func)) is not None:
            changed = into[written[0]]
            self._note("operation", func, spec, [changed], True, written[0])
            for t in made:
                self._bind(t, self._values[id(changed)])
        elif not written and made and (spec := self._spec(args, kwargs, func)) is not None:
            self._note("operation", func, spec, made, isinstance(out, Tensor))
        elif not written and not made and func not in QUERIES:
            self._asks = True
        return out

    def _follow(self, walk: Walk, step: Step, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An operation that was expected."""
        given: tuple[Any, Any] = args, kwargs
        if self._watched is not None and (turns := self._watched.into_operation(step.place)):
            given = walk.aliased(step, turns, self._read, args, kwargs)
        written = step.entry.written
        if written is None:
            out = func(*given[0], **given[1])
            if not _is_one_of(out, *given) and walk.arrive(step, out):
                return out
        else:
            changed = tensors((args, kwargs))[written] if step.changed is None else args[step.changed]
            version = _version(changed)
            out = func(*given[0], **given[1])
            alone = not step.beside or walk.is_safe(step, changed)
            if out is changed and _version(changed) != version and alone and walk.arrive(step, out):
                return out
        self._leave_path()
        into, written_to = tensors((args, kwargs)), [] if written is None else [written]
        return self._take_down(func, args, kwargs, into, given, written_to, out)

    def _leave_path(self) -> None:
        """Something else happens than was expected: from here on it is written down, after what was done so far."""
        if self._walk is None:
            return
        walk, self._walk = self._walk, None
        self.entries, self.constants, self._turns, there = walk.so_far()
        for t, value in there:
            self._bind(t, value)

    def _aliased(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the operation is to read them, if it is the one that is expected to come next."""
        assert self._watched is not None
        entries, place = self._watched.flow.entries, len(self.entries)
        while place < len(entries) and entries[place].kind not in ("operation", "player", "output"):
            place += 1  # tensors that were there before are noted when they are first read
        turns = self._watched.into_operation(place)
        if not turns or not equal(entries[place].target, func):
            return args, kwargs
        aliases: dict[int, Tensor] = {}

        def read(t: Tensor) -> Tensor:
            value = self._values.get(id(t))
            if value is None or value.turn not in turns or not t.requires_grad:
                return t
            if id(t) not in aliases:
                aliases[id(t)] = self._read(t, value.turn, place, False)
            return aliases[id(t)]

        both: tuple[Any, Any] = mapped(read, (args, kwargs))
        return both

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """A player is about to run: what happens inside is its own business. Returns the step, if it was expected."""
        self._inside += 1
        if self._inside == 1:
            self._call = self._step = None
            walk = self._walk
            if walk is not None and walk.is_next("player", name):
                self._step = walk.taken(args, kwargs)
            if self._step is None and self.unknown is None:
                self._leave_path()
                self._call = self._spec(args, kwargs, name)
            self._stands_aside = is_innermost(self)
            if self._stands_aside:
                torch._C._pop_torch_function_stack()
            return self._step
        return None

    def leave(self, name: str, output: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        step = self._step
        if self._walk is not None and step is not None and not self._walk.arrive(step, output):
            self._leave_path()
            self._call = step.entry.args, step.entry.kwargs, step.entry.mode
        if self._call is not None:
            self._note("player", name, self._call, tensors(output), isinstance(output, Tensor))
        if self._stands_aside:
            self._stands_aside = False
            torch._C._push_on_torch_function_stack(self)

    @property
    def follows(self) -> Flow | None:
        """What is expected, if it has done nothing else so far."""
        return None if self._walk is None else self._walk.flow

    def finish(self, output: Any, known: Iterable[Flow]) -> Flow:
        """The flow of this pass: one of those already known, if it did the same."""
        flow = self._flow(output, known)
        flow.asks = flow.asks or self._asks
        return flow

    def _flow(self, output: Any, known: Iterable[Flow]) -> Flow:
        outputs = [t for t in tensors(output) if t.is_floating_point()]
        if self._walk is not None:
            if not self._inside and self._walk.end(outputs):
                return self._walk.flow
            self._leave_path()
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
        return not is_alone(t, (ref() for key, ref in self._refs.items() if key != id(t)))

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
        self.entries.append(Entry(kind, target, *spec, tuple(map(kind_of, made)), single, written))
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
        args, kwargs = filled((entry.args, entry.kwargs), lambda value: nodes[value.turn])
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


def _is_one_of(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Has it given back what it was given?"""
    for t in (out,) if type(out) is Tensor else made_of(out)[0]:
        for one in args:
            if one is t:
                return True
        if kwargs and any(one is t for one in kwargs.values()):
            return True
    return False


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Is it the first to see what is called now?"""
    count = torch._C._len_torch_function_stack()
    return count > 0 and torch._C._get_function_stack_at(count - 1) is mode


def take_off(mode: TorchFunctionMode) -> None:
    """It is to see nothing more, wherever it stands among others, if it does."""
    if not any(each is mode for each in _get_current_function_mode_stack()):
        return
    above = []
    while not is_innermost(mode):
        above.append(torch._C._pop_torch_function_stack())
    torch._C._pop_torch_function_stack()
    for each in reversed(above):
        torch._C._push_on_torch_function_stack(each)


def _given_back(func: Any, into: list[Tensor], read: list[Tensor], out: Any) -> Tensor | None:
    """What was given to a function that did nothing and returned it, as ``to`` and ``contiguous`` may: no operation.

    ``read``: aliases of ``into``, perhaps. What ends in ``_`` has done something, such as ``detach_``.
    """
    if short(func).endswith("_"):
        return None
    return next((t for t, alias in zip(into, read, strict=True) if out is alias), None)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
