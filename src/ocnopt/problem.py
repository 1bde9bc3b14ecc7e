"""One step as a control problem: players, stages, group gradients; then kernels, policy and action."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from ocnopt import multi, whole_step
from ocnopt.actor import Actor, Answer, Scalar
from ocnopt.bellman import Consistent, Paper, Policy, terminal_precision
from ocnopt.bucket import Bucket
from ocnopt.distributed import World
from ocnopt.forms import Forms
from ocnopt.fused.actor import FusedActor
from ocnopt.fused.choice import acting, takes_parts, why_not
from ocnopt.fused.lines import lines
from ocnopt.groups import Samples
from ocnopt.layers.base import compute_dtype
from ocnopt.linalg import full_precision
from ocnopt.moment import Moment
from ocnopt.phases import BELLMAN, GRADIENTS, UPDATE
from ocnopt.players import Player
from ocnopt.records import Told
from ocnopt.shelves import Shelf, Shelves
from ocnopt.stages import Stages


@dataclass
class Part:
    """The rows of one bucket: kernels and linear costs by parameter, before they are scaled and added up."""

    seats: list[int]  # of each row
    K: Tensor  # [rows, r, r]: G^T C^{-1} G
    u: Tensor | None  # [rows, r]: G^T C^{-1} ℓ, what goes through the metric
    free: Tensor | None  # [rows, r]: a decoupled decay drifts by ηγθ, whatever fraction of the rest is taken
    of_K: float  # what the rows of K have been divided by
    of_u: float
    scale: Scalar  # of all of them: η, or 1 in paper mode, where the step size is outside the metric
    step: Scalar  # of the rollout: 1, or η in paper mode
    fraction: tuple[float, Scalar]  # φ, as a quotient

    def rows(self, step: Scalar = 1.0, fraction: Scalar = 1.0) -> Tensor:
        """``[rows, r + 1, r]``: K, and u below it."""
        K = _times(self.K, self.of_K, fraction)
        u = torch.zeros_like(K[:, 0]) if self.u is None else _times(self.u, self.of_u, fraction)
        if self.free is not None:
            u = u + self.free
        return _times(torch.cat([K, u[:, None]], 1), self.scale, step)

    def taken(self) -> Tensor:
        """Of the fraction φ that is really taken."""
        over, under = self.fraction
        return self.rows(self.step, over / under)

    def add_to(self, J: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """J + Σ K and b − Σ u, in few launches."""
        J = _plus(J, self.K.sum(0).to(J), self.of_K, self.scale)
        if self.u is not None:
            b = _plus(b, self.u.sum(0).to(b), -self.of_u, self.scale)
        if self.free is not None:
            b = _plus(b, self.free.sum(0).to(b), -1.0, self.scale)
        return J, b


def _times(x: Tensor, *factors: Scalar) -> Tensor:
    """Without a launch for a factor of 1."""
    number = math.prod(f for f in factors if not isinstance(f, Tensor))
    x = x if number == 1 else x * number
    return reduce(torch.mul, (f.to(x) for f in factors if isinstance(f, Tensor)), x)


def _plus(x: Tensor, y: Tensor, factor: float, scale: Scalar) -> Tensor:
    """x + factor · scale · y."""
    if isinstance(scale, Tensor):
        return torch.addcmul(x, y, scale.to(x), value=factor)
    return torch.add(x, y, alpha=factor * scale)


@dataclass
class Kernels:
    """What the recursion needs of each seat, ``K: [N, r, r]`` and ``u: [N, r]``, and what weights w are expected to
    change.
    """

    parts: list[Part]
    stage_of: Sequence[int]
    like: Tensor  # of the dtype and on the device of the answers

    @property
    def K(self) -> Tensor:
        return self._by_seat[0]

    @property
    def u(self) -> Tensor:
        return self._by_seat[1]

    @cached_property
    def _by_seat(self) -> tuple[Tensor, Tensor]:
        return self._seats([part.rows() for part in self.parts])

    @cached_property
    def tails(self) -> tuple[Tensor, Tensor]:
        """Σ_{j≥k} K_j and Σ_{j≥k} u_j of each stage k."""
        places = [[self.stage_of[seat] for seat in part.seats] for part in self.parts]
        return self._add([part.rows() for part in self.parts], places, max(self.stage_of) + 1, tails=True)

    def add_to(self, J: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """J + Σ_k K_k and b − Σ_k u_k: all that the linear rollout of consistent mode needs."""
        for part in self.parts:
            J, b = part.add_to(J, b)
        return J, b

    def lines(self, precision: Tensor) -> tuple[Tensor, Tensor] | None:
        """By a kernel, where there is one, and the players are all of a kind."""
        return lines(self.parts[0], self.stage_of, precision) if len(self.parts) == 1 else None

    @cached_property
    def plan(self) -> tuple[Tensor, Tensor]:
        """(K, u) such that the full step of weights w changes the groups' losses by −(K w + u), to first order."""
        return self._seats([part.rows(part.step) for part in self.parts])

    @cached_property
    def taken(self) -> tuple[Tensor, Tensor]:
        """The same for the fraction φ of the step that is really taken."""
        return self._seats([part.taken() for part in self.parts])

    def _seats(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._add(rows, [part.seats for part in self.parts], len(self.stage_of))

    def _add(
        self, rows: Sequence[Tensor], places: Sequence[Sequence[int]], count: int, tails: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sums of the rows of each place, or of all from there on."""
        with full_precision():
            pairs = zip(places, rows, strict=True)
            sums = [torch.tensordot(_placement(at, count, self.like, tails), x.to(self.like), 1) for at, x in pairs]
        both = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        return both[:, :-1], both[:, -1]


@dataclass
class Problem:
    """The players of one step, by how they act. ``ok`` is 1 on the device, or 0 if this step must leave no trace."""

    players: list[Player]
    stages: Stages
    actors: list[Actor]
    fractions: Tensor
    ok: Tensor
    fine: Tensor  # the same as a boolean
    finite: Tensor  # [parameters and calls]
    checked: tuple[str, ...]  # their names

    # --- the backward pass of dynamic programming ---

    @BELLMAN
    def solve(self, mode: str, gauss_newton: float, cooperative: bool) -> tuple[Policy, Kernels]:
        precision = terminal_precision(self.fractions, gauss_newton)
        stage_of = self.stages.stage_of
        if mode == "consistent":
            for actor in self.actors:
                actor.measure(None)
            parts = [self._part(actor, paper=False) for actor in self.actors]
            kernels = Kernels(parts, stage_of, self.fractions)
            return Consistent(kernels, precision, stage_of, cooperative), kernels
        with full_precision():
            return self._solve_backward(Paper(precision, stage_of))

    def _solve_backward(self, policy: Paper) -> tuple[Paper, Kernels]:
        """Paper mode: the metric of a stage depends on a_{k+1}, i.e. on the metrics of all later stages."""
        parts, stage_of = [], self.stages.stage_of
        buckets = [actor for actor in self.actors if isinstance(actor, Bucket)]
        split = [[bucket.select(seats) for bucket in buckets] for seats in self.stages.seats]
        for theirs in reversed(split):
            here = [bucket for bucket in theirs if bucket is not None]
            for bucket in here:
                bucket.measure(policy.a.to(bucket.ok))
            mine = [self._part(bucket, paper=True) for bucket in here]
            nothing = torch.zeros_like(self.fractions)
            K, minus_u = Kernels(mine, stage_of, self.fractions).add_to(torch.diag(nothing), nothing)
            policy.add_stage(K, -minus_u)
            parts += mine
        policy.finish()
        self.actors = [bucket for stage in split for bucket in stage if bucket is not None]
        return policy, Kernels(parts, stage_of, self.fractions)

    @staticmethod
    def _part(actor: Actor, paper: bool) -> Part:
        scale, step = (1.0, actor.lr) if paper else (actor.lr, 1.0)
        K, u, free, share = actor.products()
        N, gain, seats = actor.fictitious, actor.gain, actor.shelf.parameter_seats
        return Part(seats, K, u, free, N * gain, share * gain, scale, step, actor.fraction)

    # --- acting ---

    @UPDATE
    def act(self, answer: Answer) -> None:
        """Update all players."""
        for actor in self.actors:
            actor.apply(answer.on(actor.ok))

    @UPDATE
    def coast(self) -> None:
        """Plan what the policy has no say in, before the players act one after another."""
        for actor in self.actors:
            actor.coast()

    @UPDATE
    def steer(self, seats: Sequence[int], answer: Answer) -> None:
        """Update the players of some seats."""
        for actor in self.actors:
            actor.steer(seats, answer.on(actor.ok))

    @UPDATE
    def settle(self) -> None:
        """All players have acted, one after another."""
        for actor in self.actors:
            actor.settle()

    @UPDATE
    def tick(self) -> None:
        """Advance the clocks: a step that was masked did not happen."""
        for clock in {id(a.moment.clock): a.moment.clock for a in self.actors}.values():
            clock += self.ok.to(clock)

    @property
    def failed_refreshes(self) -> int:
        return sum(actor.failed_refreshes for actor in self.actors)

    @property
    def settled_last(self) -> frozenset[str]:
        """State that does not change before all players have acted, one after another."""
        return frozenset.intersection(*(actor.settled_last for actor in self.actors))


_PLACEMENTS: dict[tuple[Any, ...], Tensor] = {}


def _placement(places: Sequence[int], count: int, like: Tensor, tails: bool) -> Tensor:
    """``[places, members]`` of zeros and ones: a sum by matrix product is deterministic, without a loop."""
    key = (tuple(places), count, tails, like.dtype, like.device)
    if key not in _PLACEMENTS:
        if len(_PLACEMENTS) > 256:
            _PLACEMENTS.clear()
        rows = [[float(place == k or (tails and place > k)) for place in places] for k in range(count)]
        _PLACEMENTS[key] = torch.tensor(rows, dtype=like.dtype, device=like.device)
    whole_step.keep(_PLACEMENTS[key])
    return _PLACEMENTS[key]


# --- posing the problem ---


@GRADIENTS
def pose(
    players: list[Player],
    stages: Stages,
    told: Told,
    state: Mapping[Tensor, dict[str, Any]],
    samples: Samples,
    loss: Tensor | None,
    group: Mapping[str, Any],
    world: World,
    seen: Set[int],
    known: Shelves,
) -> Problem:
    """Collect gradients, check that they are finite, give every player its form of group gradients and make them act.

    ``group``: whose hyper-parameters of the whole game count. ``world``: the processes that share the batch. ``seen``:
    ids of players of which any of them has calls. ``known``: the shelves of the last step.
    """
    maximize, rank = group["maximize"], samples.groups.rank
    forms = Forms(told.records, samples, maximize, told.folded, world, seen)
    shelves = known.of(players, stages, [forms.kind(player) for player in players], state)
    grads = [shelf.parts([p.grad for p in shelf.params if p.grad is not None]) for shelf in shelves]
    quick = [_fused(shelf, theirs, forms, group) for shelf, theirs in zip(shelves, grads, strict=True)]
    squares = [multi.squares(g) if q is None else q.squares for g, q in zip(grads, quick, strict=True)]
    # adjoints too: somebody may have repaired p.grad since; kernels see what became of them
    adjoints = _adjoints(players, told, rank > 1 and None in quick)
    device = players[0].params[0].device
    finite = [multi.moderate(each).to(device) for each in squares]
    if adjoints:
        look = multi.finite if any(p.curvature.needs_model for p in players) else multi.sums_finite
        finite.append(look([h for _, h in adjoints]).to(device))
    found = finite[0] if len(finite) == 1 else torch.cat(finite)
    fine = found.all()
    if loss is not None:
        fine = fine & torch.isfinite(loss.detach()).all().to(device)
    for everybody in (world, *known.everybody):
        fine = everybody.minimum(fine)
    forms.ok, ok = fine, fine.to(torch.promote_types(torch.float32, players[0].params[0].dtype))
    fractions = samples.groups.fractions(ok)
    actors: list[Actor] = []
    for shelf, theirs, sums, actor in zip(shelves, grads, squares, quick, strict=True):
        wide = compute_dtype(shelf.params[0].dtype)
        here = ok.to(shelf.params[0].device, wide)
        if actor is not None:
            actor.ok, actor.fine = here, fine.to(here.device)
            actors.append(actor)
            continue
        own, curvature = shelf.group, shelf.curvature
        actors.append(
            Bucket(
                shelf=shelf,
                gradients=forms.build(shelf, theirs, sums, fractions),
                calls={id(p): forms.calls_of(p) for p in shelf.players} if curvature.needs_model else {},
                tallies={id(p): forms.tallies_of(p) for p in shelf.players} if curvature.takes_tallies else {},
                seen=seen,
                moment=Moment(shelf.states[0]["step"], wide, (own["momentum"], own["decay"])),
                ok=here,
                world=world,
            )
        )
    checked = (*known.names, *(name for name, _ in adjoints)) if adjoints else known.names
    return Problem(players, stages, actors, fractions, ok, fine, found, checked)


def _fused(shelf: Shelf, grads: list[Tensor], forms: Forms, group: Mapping[str, Any]) -> FusedActor | None:
    """One that acts by fused kernels, where that can be had."""
    if shelf.group["fused"] is False:
        return None
    groups, paper = forms.samples.groups, group["bellman"] == "paper" and group["feedback"] != "off"
    why = why_not(shelf, groups.rank, paper, forms.world.size == 1)
    actor = None
    if why is None:
        columns = None if groups.rank == 1 else forms.columns_of(shelf, in_parts=takes_parts(shelf))
        wide = grads[0].new_empty((), dtype=torch.float32)
        actor = acting(shelf, grads, columns, groups.fractions(wide), group["maximize"])
    if actor is None and shelf.group["fused"]:
        why = why or "gradients or state are not laid out as the parameters are, or of another dtype"
        raise RuntimeError(f"fused=True cannot be had for {shelf.players[0].name!r}: {why}")
    return actor


def _adjoints(players: Sequence[Player], told: Told, split: bool) -> list[tuple[str, Tensor]]:
    """What the step is going to read besides gradients. Where that is squared, it must not overflow either."""
    passes, records, folded = told
    squared = any(p.curvature.needs_model for p in players)
    # what the backward pass has made of an adjoint is finite only if that is, and mostly shorter
    looked_at = [(r.name, r.h if squared else r.columns or r.h) for r in records if squared or split]
    adjoints = [(name, t) for name, store in looked_at for t in store.values()]
    # a product with what a layer read is finite only if its adjoint is
    readings = [(r.name, e) for r in records for e in r.readings.values()]
    readings += [pair for this in passes for pair in this.readings_of_players]
    adjoints += [(name, e.before) for name, e in readings if e.before is not None]
    tallies = {id(t): (r.name, t.adjoints) for r in records for t in r.tallies.values()}
    adjoints += tallies.values()  # those of many records in one
    if folded is not None:
        adjoints += [(p.name, folded.columns[q]) for p in players for q in p.params if q in folded.columns]
    return adjoints
