"""A pass that is expected to do what an earlier one did.

To write an operation down takes longer than many an operation does. Where it is known what comes next, it is enough
to see that it is what comes: the same function, of the same tensors and the same other arguments.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

from ocnopt.games.flow import Entry, Flow, Mode, Value, attribute, equal, kind_of, values_in
from ocnopt.trees import is_alone, mapped, tensors

#: (tensor, value, entry, whether nobody else reads it) → an alias for the operation of that entry to read
Read = Callable[[Tensor, int, int, bool], Tensor]


class Step(NamedTuple):
    """One entry that something was done at: a call, an operation, or the end."""

    entry: Entry
    place: int  # of the entry among all
    begin: int  # that of the first entry since the step before: tensors that were there already
    made: range  # the turns of what comes out
    turns: int  # how many there were before all of these
    beside: tuple[int, ...]  # where something is overwritten: turns of other tensors that somebody is going to read
    plain: tuple[int, ...] | None  # the turns of its arguments, where these are tensors and nothing else
    real: int | None  # the turn of what comes out, where that is one tensor of real numbers
    changed: int | None  # which of its positional arguments is overwritten, if one is


def path(entries: Sequence[Entry], inputs: int) -> list[Step]:
    """The entries of a pass with so many inputs."""
    last: dict[int, int] = {}  # where each turn is read for the last time
    for place, entry in enumerate(entries):
        for value in values_in((entry.args, entry.kwargs)):
            last[value.turn] = place
    steps, turn, begin, turns = [], inputs, 0, inputs
    for place, entry in enumerate(entries):
        made = range(turn, turn + len(entry.made))
        if entry.kind in ("operation", "player", "output"):
            beside: tuple[int, ...] = ()
            changed = None
            if entry.written is not None:
                value = values_in((entry.args, entry.kwargs))[entry.written]
                beside = tuple(t for t in range(turn) if t != value.turn and last.get(t, -1) >= place)
                changed = next((i for i, spec in enumerate(entry.args) if spec is value), None)
            real = made.start if entry.single and entry.made == ("real",) else None
            steps.append(Step(entry, place, begin, made, turns, beside, _plain(entry), real, changed))
            begin, turns = place + 1, made.stop
        turn = made.stop
    return steps


def _plain(entry: Entry) -> tuple[int, ...] | None:
    if type(entry.args) is not tuple or entry.kwargs or not all(type(spec) is Value for spec in entry.args):
        return None
    return tuple(spec.turn for spec in entry.args)


class Walk:
    """A pass along the path of a flow, as far as it has come."""

    def __init__(self, flow: Flow, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.flow, self._model, self._device = flow, model, flow.device
        steps = flow.steps(len(inputs))
        self._origins = flow.origins
        self._rest = iter(steps)
        self.step = next(self._rest)  # that is expected now
        self.constants: list[Tensor] = []
        self._refs: list[weakref.ref[Tensor] | None] = [None] * steps[-1].made.stop
        for turn, t in enumerate(inputs):
            self._refs[turn] = weakref.ref(t)

    def is_next(self, kind: str, target: Any) -> bool:
        """May it be that this is what is expected now?"""
        entry = self.step.entry
        return (entry.target is target or equal(entry.target, target)) and entry.kind == kind

    def taken(self, args: Any, kwargs: Any) -> Step | None:
        """The step that is expected now, if its arguments are these, and so is what it runs under."""
        step, refs = self.step, self._refs
        entry = step.entry
        mode, specs, named = entry.mode, entry.args, entry.kwargs
        if is_grad_enabled() is not mode.grad or len(args) != len(specs):
            return None
        if (mode.autocast or is_any_autocast_enabled()) and not self._casts_as(mode):
            return None
        for spec, given in zip(specs, args, strict=True):
            if type(spec) is Value and (ref := refs[spec[0]]) is not None:
                if given is None or ref() is not given:
                    return None
            elif spec is not given and not self._is(spec, given):
                return None
        if kwargs or named:
            if len(kwargs) != len(named):
                return None
            for key, spec in named.items():
                if kwargs.get(key, self) is not spec:  # mostly a constant of Python
                    return step if self._is(named, kwargs) else None
        return step

    def _casts_as(self, mode: Mode) -> bool:
        on, dtype = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        return on is mode.autocast and (dtype == mode.dtype or not on)

    def _is(self, spec: Any, given: Any) -> bool:
        kind = type(spec)
        if kind is Value:
            ref = self._refs[spec.turn]
            if ref is None:
                return self._was_there(spec.turn, given)
            return given is not None and ref() is given
        if isinstance(given, Tensor):
            return False
        if kind is tuple or kind is list:
            return type(given) is kind and len(given) == len(spec) and all(map(self._is, spec, given))
        if kind is dict:
            same = type(given) is dict and list(spec) == list(given)
            return same and all(map(self._is, spec.values(), given.values()))
        if isinstance(spec, (tuple, list, dict)) and kind is not torch.Size:
            return False  # there may be tensors in it
        return spec is given or (kind is type(given) and equal(spec, given))

    def _was_there(self, turn: int, t: Any) -> bool:
        """Is it the parameter, or the buffer, that is read for the first time now, or another constant in its place?"""
        if turn not in self._origins or not isinstance(t, Tensor):
            return False
        kind, target = self._origins[turn]
        if kind == "constant":
            if t.grad_fn is not None or (t.shape, t.dtype) != target or self._is_known(t):
                return False
            self.constants.append(t)
        elif attribute(self._model, target) is not t:
            return False
        self._refs[turn] = weakref.ref(t)
        return True

    def _is_known(self, t: Tensor) -> bool:
        """Is a tensor anything but a constant?"""
        if any(ref is not None and ref() is t for ref in self._refs):
            return True
        return any(t is other for other in (*self._model.parameters(), *self._model.buffers()))

    def aliased(self, step: Step, turns: Iterable[int], read: Read, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a step with what ``read`` makes of those turns."""
        aliases: dict[int, Tensor] = {}
        for turn in turns:
            ref = self._refs[turn]
            t = None if ref is None else ref()
            if t is not None and t.requires_grad:
                aliases[id(t)] = read(t, turn, step.place, False)
        if step.plain is not None:
            return tuple([aliases.get(id(t), t) for t in args]), kwargs
        both: tuple[Any, Any] = mapped(lambda t: aliases.get(id(t), t), (args, kwargs))
        return both

    def is_safe(self, step: Step, changed: Tensor) -> bool:
        """Does nobody read what shares its memory with a tensor that is overwritten?"""
        refs = (self._refs[turn] for turn in step.beside)
        others = (None if ref is None else ref() for ref in refs)
        return is_alone(changed, (other for other in others if other is not changed))

    def arrive(self, step: Step, out: Any) -> bool:
        """Is this what was expected to come out of a step? Then it is over."""
        if step.real is not None:
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return False
            self._refs[step.real] = weakref.ref(out)
            self.step = next(self._rest)
            return True
        entry, (made, single) = step.entry, made_of(out)
        if single is not entry.single or len(made) != len(entry.made):
            return False
        for turn, t, kind in zip(step.made, made, entry.made, strict=True):
            if kind_of(t) != kind:
                return False
            self._refs[turn] = weakref.ref(t)
        self.step = next(self._rest)
        return True

    def end(self, outputs: Sequence[Tensor]) -> bool:
        """Did it come to the end of the path? Then the flow is that of this pass, too."""
        step = self.step
        if step.entry.kind != "output" or len(step.entry.args) != len(outputs):
            return False
        if step.entry.mode != Mode.now(self._device):
            return False
        for value, t in zip(step.entry.args, outputs, strict=True):
            if t.grad_fn is not None if value is None else not self._is(value, t):
                return False
        theirs = self.flow.constants
        if self.flow.held and not all(map(operator.is_, theirs.values(), self.constants)):
            return False  # an earlier pass is going to run again, with others
        self.flow.constants = dict(zip(theirs, self.constants, strict=True))
        return True

    def so_far(self) -> tuple[list[Entry], list[Tensor], int, list[tuple[Tensor, Value]]]:
        """Entries, constants and the number of turns before the step that was to come; tensors that are still there."""
        step = self.step
        entries = self.flow.entries[: step.begin]
        constants = self.constants[: sum(entry.kind == "constant" for entry in entries)]
        refs = enumerate(self._refs[: step.turns])
        there = [(t, Value(turn)) for turn, ref in refs if ref is not None and (t := ref()) is not None]
        return entries, constants, step.turns, there


def made_of(out: Any) -> tuple[Sequence[Tensor], bool]:
    """The tensors that came out, and whether it is one and nothing else."""
    return ((out,), True) if isinstance(out, Tensor) else (tensors(out), False)
