"""``opt.step()`` from a CUDA graph of itself: what it did for a few steps on end, it does again in one launch.

The forward and backward passes are the user's, and run as they are written. What a step reads of them (gradients, and
what the hooks have kept) is copied to where the graph reads it, or pointed at. A step that is not like those before is
an ordinary one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt import clockwork, intake, phases, whole_step
from ocnopt.actor import have_moved
from ocnopt.fused.launched import LaunchedActor
from ocnopt.hosts import Host
from ocnopt.players import Player
from ocnopt.problem import Problem
from ocnopt.recording import Recording, Studio, told_of_waiting
from ocnopt.surroundings import Surroundings
from ocnopt.terms import Terms
from ocnopt.whereabouts import Places, readers_of

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt

#: ordinary steps of a kind before one of it is captured, which takes as long as several of them
_WARM_UP = 5
#: graphs of the same hyper-parameters: who has steps of more kinds than that gets no others
_MOST = 8

Step = Callable[[], Problem]


class Replays:
    """Those of one optimizer."""

    def __init__(self) -> None:
        self.reason: str | None = None  # why the last step did not come from a graph
        self.captures = 0
        self._on_end = 0  # ordinary steps
        self._studio: Studio | None = None
        self._looked_at: tuple[Any, ...] = ()  # what the answer to ``_never`` depends on
        self._never: str | None = None
        self._said: set[str] = set()
        self._forget()

    def clear(self) -> None:
        """Give up all graphs, and forget the model."""
        self._looked_at = ()
        self._forget()

    def _forget(self) -> None:
        self._kinds: dict[Hashable, Kind] = {}
        self._failed: str | None = None

    @property
    def are_usual(self) -> bool:
        """Are most steps replays, as far as is known?"""
        none = self._never is not None or self._failed is not None
        return bool(self._looked_at) and not none and not whole_step.announced()

    def step(self, opt: OCNOpt, terms: Terms, everybody: list[Player], players: list[Player], run: Step) -> None:
        """Make a step of these players, as ``run`` would."""
        self._follow_changes(opt, terms, everybody)
        self.reason = self._never or self._failed or _why_not_now(opt)
        if self.reason is None:
            failed = clockwork.catch_up(opt)
            self._of_kind(opt, players, run)
            opt._diagnostics.failed_refreshes += failed
        else:
            run()
        self._on_end = 0 if self.reason is None else self._on_end + 1
        lasting = self.reason in (self._never, self._failed) or self._on_end > 2 * _WARM_UP
        if self.reason is not None and lasting and terms.whole["graphed"]:
            self._say(self.reason)

    def _follow_changes(self, opt: OCNOpt, terms: Terms, everybody: list[Player]) -> None:
        looked_at = terms, opt._model, opt._world, everybody
        if self._looked_at and all(a is b for a, b in zip(looked_at, self._looked_at, strict=True)):
            return
        self._looked_at = looked_at
        self._forget()
        self._never = _why_never(opt, terms)

    def _of_kind(self, opt: OCNOpt, players: list[Player], run: Step) -> None:
        taken = intake.Intake((), []) if opt._tape is None else intake.taken_in(opt._tape)
        kind = taken.kind, tuple(players), clockwork.kind(opt), _settings(opt)
        known = self._kinds.get(kind) or self._new(kind)
        if known.places is not None and not known.is_as_it_was(opt, taken.tensors):
            known = self._again(kind, known)
        if self._failed is not None:
            run()
        elif known.graph is not None:
            known.graph.replay()
            have_moved(p for player in players for p in player.params)
            known.replays += 1
            opt._fallbacks.reasons.update(known.reasons)
        elif known.places is not None:
            self._captured(known, opt, run)
        else:
            self._ordinary(known, taken.tensors, opt, players, run)

    def _new(self, kind: Hashable) -> Kind:
        if len(self._kinds) > 8 * _MOST:  # each has been seen a few times at most
            self._kinds = {key: known for key, known in self._kinds.items() if known.places is not None}
        self._kinds[kind] = known = Kind()
        return known

    def _again(self, kind: Hashable, known: Kind) -> Kind:
        """Something is not where it was. If that is so each time, graphs are of no use."""
        new = self._new(kind)
        new.restarts = known.restarts + 1 if known.replays < 2 else 0
        if new.restarts > 1:
            self._fail("what the step reads is somewhere else at each step")
        return new

    def _ordinary(self, known: Kind, taken: list[Tensor], opt: OCNOpt, players: list[Player], run: Step) -> None:
        self.reason, known.seen = "the first steps warm up", known.seen + 1
        if known.seen < _WARM_UP:
            known.readers = readers_of(run())
            return
        params = [p for player in players for p in player.params]
        if sum(kind.places is not None for kind in self._kinds.values()) == _MOST:
            self.reason = "there are steps of too many kinds"
        elif any(t.device != params[0].device for t in taken):
            self._fail("what the step reads is not all on the device")
        else:
            self._prepare(known, taken, opt, params)
        if known.places is None:
            run()
        else:
            self._watched(known.places, opt, run)

    def _prepare(self, known: Kind, taken: list[Tensor], opt: OCNOpt, params: list[Tensor]) -> None:
        """Make room for a graph, if there is enough of it."""
        copied = taken if known.readers else [*taken, *params]
        needed, room = sum(t.numel() * t.element_size() for t in copied), _room(params[0].device)
        if needed > room and opt.param_groups[0]["graphed"] is None:
            self._fail(f"a copy of what the step reads takes {needed >> 20} MiB: graphed=True makes it all the same")
            return
        try:
            known.places, known.surroundings = Places(opt, taken, params, known.readers), Surroundings(opt, params)
        except torch.OutOfMemoryError:
            self._fail("there is too little memory for a copy of what the step reads")

    def _fail(self, why: str) -> None:
        """From now on all steps are ordinary ones."""
        self._forget()
        self.reason = self._failed = why

    def _watched(self, places: Places, opt: OCNOpt, run: Step) -> None:
        """An ordinary step that tells whether it could be captured, and leaves nothing to be built in a capture."""
        waits: list[str] = []
        with told_of_waiting(waits), places.read(opt):
            run()
        if waits:
            self._fail(f"the step waits for the device ({waits[0]})")

    def _captured(self, known: Kind, opt: OCNOpt, run: Step) -> None:
        assert known.places is not None
        if self._studio is None or self._studio.device != known.places.device:
            self._studio = Studio(known.places.device)
        capture = whole_step.Capture(whole=False, pointing=known.places.pointing)

        def captured() -> None:
            run()

        with torch.cuda.device(known.places.device), known.places.read(opt):
            graph = self._studio.record(captured, opt, clockwork.flow_of(opt), capture)
        if isinstance(graph, str):
            self._fail(graph)
            run()
            return
        self.captures, known.graph, known.reasons = self.captures + 1, graph, dict(opt._fallbacks.reasons)
        graph.replay()

    def _say(self, why: str) -> None:
        """Once."""
        if why not in self._said:
            self._said.add(why)
            warnings.warn(f"graphed=True: {why}", stacklevel=7)


def _room(device: torch.device) -> float:
    """What may be taken unasked for, in bytes: who has large tensors does not wait for launches."""
    return torch.cuda.get_device_properties(device).total_memory / 32 if device.type == "cuda" else torch.inf


def _why_never(opt: OCNOpt, terms: Terms) -> str | None:
    """Why no step of these hyper-parameters can come from a graph."""
    if terms.whole["graphed"] is False:
        return "graphed=False"
    model = nn.Module() if opt._model is None else opt._model
    if (why := clockwork.why_never(model, opt) or clockwork.why_not_ours(opt)) is not None:
        return why
    if any(isinstance(module, Host) for module in model.modules()):
        return "solvers of Neural ODEs decide in Python what they do"
    return None if terms.whole["feedback"] != "nonlinear" else _why_not_again(opt)


def _why_not_again(opt: OCNOpt) -> str | None:
    """Why a graph of a second pass might not do what the model does then."""
    for name, module in () if opt._tape is None else opt._tape.modules.items():
        if not type(module).__module__.startswith("torch.nn.modules."):
            return f"{name!r} is a {type(module).__name__}, and may decide in Python what it does"
    return None


def _why_not_now(opt: OCNOpt) -> str | None:
    """Why the coming step cannot, although others can."""
    if whole_step.capturing() or whole_step.announced():
        return "whole steps are captured"
    if phases.listening():
        return "the phases of the step are being timed"
    if opt._fallbacks.pausing:
        return "what some layers see is of no use, and looked at again now and then"
    if opt._tape is not None and (why := intake.why_not(opt._tape)) is not None:
        return why
    return clockwork.why_eager(opt, clockwork.flow_of(opt))


def _settings(opt: OCNOpt) -> Hashable:
    """What else a step depends on, and kernels that were chosen for it."""
    rates = [id(group["lr"]) if isinstance(group["lr"], Tensor) else None for group in opt.param_groups]
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return (*rates, *precision, torch.are_deterministic_algorithms_enabled())


@dataclass
class Kind:
    """Steps that do the same."""

    seen: int = 0  # ordinary ones
    readers: list[LaunchedActor] = field(default_factory=list)  # see :class:`Places`
    places: Places | None = None  # once it is about to be captured
    graph: Recording[None] | None = None
    reasons: dict[str, str] = field(default_factory=dict)  # of what stands in for something in it
    surroundings: Surroundings | None = None  # likewise
    replays: int = 0
    restarts: int = 0  # how often on end it has come to nothing

    def is_as_it_was(self, opt: OCNOpt, taken: list[Tensor]) -> bool:
        """Is everything where a graph reads it? What is somewhere else at each step is put there."""
        assert self.places is not None
        assert self.surroundings is not None
        return self.surroundings.hold(opt) and self.places.fill(taken)
