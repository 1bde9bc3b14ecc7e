"""``opt.step()`` from a CUDA graph of itself: what it did for a few steps on end, it does again in one launch.

The forward and backward passes are the user's, and run as they are written. What a step reads of them (gradients, and
what the hooks have kept) is copied to where the graph reads it, or pointed at. A step that is not like those before is
an ordinary one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt import clockwork, intake, phases, whole_step
from ocnopt.fused.actor import FusedActor
from ocnopt.hosts import Host
from ocnopt.layers.base import compute_dtype
from ocnopt.players import Player
from ocnopt.problem import Problem
from ocnopt.recording import Recording, Studio, told_of_waiting
from ocnopt.terms import Terms

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
        self._studio: Studio | None = None
        self._looked_at: tuple[Any, ...] = ()  # what the answer to ``_never`` depends on
        self._never: str | None = None
        self._said: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: dict[Hashable, int] = {}  # ordinary steps of each kind
        self._readers: dict[Hashable, list[FusedActor]] = {}  # who can be told where gradients are, by kind of step
        self._failed: str | None = None
        if self._studio is not None:
            self._studio.clear()

    def step(self, opt: OCNOpt, terms: Terms, players: list[Player], run: Step) -> None:
        """Make a step: ``run`` would."""
        self._follow_changes(opt, terms)
        self.reason = self._never or self._failed or _why_not_now(opt)
        if self.reason is None:
            failed = clockwork.catch_up(opt)
            self._of_kind(opt, players, run)
            opt._diagnostics.failed_refreshes += failed
        else:
            run()
        if self.reason is not None and terms.whole["graphed"]:
            self._say(self.reason)

    def _follow_changes(self, opt: OCNOpt, terms: Terms) -> None:
        looked_at = terms, opt._model, opt._world
        if self._looked_at and all(a is b for a, b in zip(looked_at, self._looked_at, strict=True)):
            return
        self._looked_at = looked_at
        self._forget()
        self._never = _why_never(opt, terms)

    def _of_kind(self, opt: OCNOpt, players: list[Player], run: Step) -> None:
        taken = intake.Intake((), []) if opt._tape is None else intake.taken_in(opt._tape)
        kind = taken.kind, tuple(players), clockwork.kind(opt), _settings(opt)
        if kind in self._graphs:
            if not self._graphs[kind].replay(opt, taken.tensors):
                self.reason = "tensors are not where they were, or not of the size that they had"
                del self._graphs[kind], self._seen[kind]
                run()
            return
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        self.reason = "the first steps warm up"
        if seen < _WARM_UP:
            run()
        elif seen == _WARM_UP:
            self._watched(kind, run)
        elif len(self._graphs) == _MOST or len(self._seen) > 8 * _MOST:
            self.reason = self._failed = "there are steps of too many kinds"
            run()
        else:
            self._captured(kind, taken.tensors, opt, players, run)

    def _watched(self, kind: Hashable, run: Step) -> None:
        """An ordinary step that tells whether it could be captured."""
        waits: list[str] = []
        with told_of_waiting(waits):
            self._readers[kind] = _readers(run())
        if waits:
            self._failed = f"the step waits for the device ({waits[0]})"

    def _captured(self, kind: Hashable, taken: list[Tensor], opt: OCNOpt, players: list[Player], run: Step) -> None:
        params = [p for player in players for p in player.params]
        if self._studio is None or self._studio.device != params[0].device:
            self._studio = Studio(params[0].device)
        readers = self._readers.pop(kind)
        # a table cannot be sent in the middle of a capture
        pointing = bool(readers) and all(reader.reads(_grads(reader.shelf.params)) for reader in readers)
        graph: Graph | str = "what the step reads is not all on the device"
        if all(t.device == self._studio.device for t in taken):
            graph = Graph.of(opt, taken, params, pointing, run, self._studio)
        if isinstance(graph, str):
            self.reason = self._failed = graph
            run()
            return
        self.captures, self.reason = self.captures + 1, None
        self._graphs[kind] = graph
        graph.step.replay()

    def _say(self, why: str) -> None:
        """Once."""
        if why not in self._said:
            self._said.add(why)
            warnings.warn(f"graphed=True: {why}", stacklevel=7)


def _why_never(opt: OCNOpt, terms: Terms) -> str | None:
    """Why no step of these hyper-parameters can come from a graph."""
    if terms.whole["graphed"] is False:
        return "graphed=False"
    model = opt._model or nn.Module()
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
    if whole_step.capturing():
        return "somebody else is capturing"
    if phases.listening():
        return "the phases of the step are being timed"
    if opt._fallbacks.pausing:
        return "what some layers see is of no use, and looked at again now and then"
    if opt._tape is not None and (why := intake.why_not(opt._tape)) is not None:
        return why
    return clockwork.why_eager(opt, clockwork.flow_of(opt))


def _settings(opt: OCNOpt) -> Hashable:
    """What else a step depends on, and kernels that were chosen for it."""
    rates = tuple([group["lr"] if isinstance(group["lr"], Tensor) else None for group in opt.param_groups])
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return (*map(id, rates), *precision, torch.are_deterministic_algorithms_enabled())


@dataclass
class Graph:
    """A step that was captured, and where it reads what it reads."""

    step: Recording[list[FusedActor]]
    inputs: Inputs
    rates: Rates
    params: list[tuple[Tensor, int]]  # with their addresses
    state: list[tuple[dict[str, Any], str, Tensor]]
    reasons: dict[str, str]  # of what stood in for something in it

    @classmethod
    def of(
        cls, opt: OCNOpt, taken: list[Tensor], params: list[Tensor], pointing: bool, run: Step, studio: Studio
    ) -> Graph | str:
        """``pointing``: kernels are told where gradients are; else they are copied."""
        rates, inputs = Rates(opt), Inputs(taken if pointing else [*taken, *_grads(params)])

        def captured() -> list[FusedActor]:
            problem = run()
            return _readers(problem)

        capture = whole_step.Capture(whole=False, pointing=pointing, rates=rates.places)
        with _reading(opt, iter(inputs.places), () if pointing else params):
            step = studio.record(captured, opt, clockwork.flow_of(opt), capture)
        if isinstance(step, str):
            return step
        if not pointing:
            step.result = []
        state = clockwork.tensors_of_state(opt, params)
        return cls(step, inputs, rates, [(p, p.data_ptr()) for p in params], state, dict(opt._fallbacks.reasons))

    def replay(self, opt: OCNOpt, taken: list[Tensor]) -> bool:
        """Make the step, if everything is where it was."""
        if not self.step.result:
            taken = [*taken, *_grads([p for p, _ in self.params])]
        if not self._is_as_it_was() or not self.inputs.fit(taken):
            return False
        self.rates.follow()
        self.inputs.fill(taken)
        self.step.replay()
        opt._fallbacks.reasons.update(self.reasons)
        return True

    def _is_as_it_was(self) -> bool:
        if not all(p.data_ptr() == address for p, address in self.params):
            return False
        if not all(own.get(key) is tensor for own, key, tensor in self.state):
            return False
        return all(reader.reads(_grads(reader.shelf.params)) for reader in self.step.result)


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _readers(problem: Problem) -> list[FusedActor]:
    """Those who are told where gradients are, if that is everybody. They hold on to none."""
    fused = [actor for actor in problem.actors if isinstance(actor, FusedActor)]
    for actor in fused:
        actor.let_go()
    return fused if len(fused) == len(problem.actors) else []


@contextmanager
def _reading(opt: OCNOpt, places: Iterator[Tensor], params: Sequence[Tensor]) -> Iterator[None]:
    """Run a block in which a step reads other tensors than those it was given; gradients of ``params`` come last."""
    tape, given = opt._tape, _grads(params)
    with nullcontext() if tape is None else intake.unharmed(tape):
        if tape is not None:
            intake.put_back(tape, places)
        for p, place in zip(params, places, strict=True):
            p.grad = place
        try:
            yield
        finally:
            for p, grad in zip(params, given, strict=True):
                p.grad = grad


class Inputs:
    """Where a graph reads what is somewhere else at each step."""

    def __init__(self, taken: Sequence[Tensor]) -> None:
        self.places = [t.detach().clone() for t in taken]
        self._alike: dict[torch.dtype, list[int]] = {}
        for i, t in enumerate(taken):
            self._alike.setdefault(t.dtype, []).append(i)

    def fit(self, taken: Sequence[Tensor]) -> bool:
        if len(taken) != len(self.places):
            return False
        return all(
            t.shape == place.shape and t.dtype == place.dtype for t, place in zip(taken, self.places, strict=True)
        )

    def fill(self, taken: Sequence[Tensor]) -> None:
        for index in self._alike.values():
            torch._foreach_copy_([self.places[i] for i in index], [taken[i] for i in index])


class Rates:
    """Where a graph reads step sizes. Those that are tensors on the device it reads themselves."""

    def __init__(self, opt: OCNOpt) -> None:
        self._groups = opt.param_groups
        self._kept = [group["lr"] for group in opt.param_groups]
        self._known: dict[int, float] = {}
        self.places: dict[int, Tensor] = {}
        for group in opt.param_groups:
            lr, p = group["lr"], next(iter(group["params"]), None)
            if p is not None and not (isinstance(lr, Tensor) and lr.device == p.device):
                self._known[id(group)] = float(lr)
                self.places[id(group)] = torch.full((), float(lr), dtype=compute_dtype(p.dtype), device=p.device)

    def follow(self) -> None:
        """A scheduler has changed them, maybe."""
        for group in self._groups:
            key = id(group)
            if key in self.places and self._known[key] != (lr := float(group["lr"])):
                self._known[key] = lr
                self.places[key].fill_(lr)
