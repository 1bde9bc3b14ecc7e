"""One step as a control problem: players, stages, group gradients; then kernels, policy and action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ocnopt import shards
from ocnopt.bellman import Consistent, Paper, Policy, terminal_precision
from ocnopt.bucket import Bucket, Scalar
from ocnopt.distributed import World
from ocnopt.forms import Forms, gradient_of
from ocnopt.groups import Samples
from ocnopt.layers.base import compute_dtype
from ocnopt.linalg import full_precision
from ocnopt.moment import Moment
from ocnopt.multi import finite, sums_finite
from ocnopt.phases import BELLMAN, GRADIENTS, UPDATE
from ocnopt.players import Player
from ocnopt.records import Folded, Record
from ocnopt.stages import Stages


@dataclass
class Part:
    """The rows of one bucket: kernels and linear costs by parameter, before they are added up."""

    seats: list[int]  # of each row
    K: Tensor  # [rows, r, r]
    u: Tensor  # [rows, r]: what goes through the metric
    free: (
        Tensor | None
    )  # [rows, r]: a decoupled decay drifts by ηγθ at each step, whatever fraction of the rest is taken
    step: Scalar  # of the rollout: 1, or η in paper mode, where the step size is outside the metric
    fraction: Scalar  # φ

    def rows(self, step: Scalar = 1.0, fraction: Scalar = 1.0) -> Tensor:
        """``[rows, r + 1, r]``: K, and u below it."""
        K, u, free = self.K, self.u, self.free
        if isinstance(scale := step * fraction, Tensor) or scale != 1:
            K, u = scale * K, scale * u
        if free is not None:
            u = u + (step * free if isinstance(step, Tensor) or step != 1 else free)
        return torch.cat([K, u[:, None]], 1)


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

    @cached_property
    def total(self) -> tuple[Tensor, Tensor]:
        """Σ_k K_k and Σ_k u_k: all that the linear rollout of consistent mode needs."""
        whole = [part.rows().sum(0).to(self.like) for part in self.parts]
        both = whole[0] if len(whole) == 1 else torch.stack(whole).sum(0)
        return both[:-1], both[-1]

    @cached_property
    def plan(self) -> tuple[Tensor, Tensor]:
        """(K, u) such that the full step of weights w changes the groups' losses by −(K w + u), to first order."""
        return self._seats([part.rows(part.step) for part in self.parts])

    @cached_property
    def taken(self) -> tuple[Tensor, Tensor]:
        """The same for the fraction φ of the step that is really taken."""
        return self._seats([part.rows(part.step, part.fraction) for part in self.parts])

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
    """The players of one step, in buckets. ``ok`` is 1 on the device, or 0 if this step must leave no trace."""

    players: list[Player]
    stages: Stages
    buckets: list[Bucket]
    fractions: Tensor
    ok: Tensor
    finite: Tensor  # [parameters and calls]
    checked: list[str]  # their names

    # --- the backward pass of dynamic programming ---

    @BELLMAN
    def solve(self, mode: str, gauss_newton: float, cooperative: bool) -> tuple[Policy, Kernels]:
        precision = terminal_precision(self.fractions, gauss_newton)
        stage_of = self.stages.stage_of
        with full_precision():
            if mode == "consistent":
                for bucket in self.buckets:
                    bucket.measure(None)
                parts = [self._part(bucket, paper=False) for bucket in self.buckets]
                kernels = Kernels(parts, stage_of, self.fractions)
                return Consistent(kernels, precision, stage_of, cooperative), kernels
            return self._solve_backward(Paper(precision, stage_of))

    def _solve_backward(self, policy: Paper) -> tuple[Paper, Kernels]:
        """Paper mode: the metric of a stage depends on a_{k+1}, i.e. on the metrics of all later stages."""
        parts, stage_of = [], self.stages.stage_of
        split = [[bucket.select(seats) for bucket in self.buckets] for seats in self.stages.seats]
        for theirs in reversed(split):
            here = [bucket for bucket in theirs if bucket is not None]
            for bucket in here:
                bucket.measure(policy.a.to(bucket.ok))
            mine = [self._part(bucket, paper=True) for bucket in here]
            policy.add_stage(*Kernels(mine, stage_of, self.fractions).total)
            parts += mine
        policy.finish()
        self.buckets = [bucket for stage in split for bucket in stage if bucket is not None]
        return policy, Kernels(parts, stage_of, self.fractions)

    def _part(self, bucket: Bucket, paper: bool) -> Part:
        assert bucket.metric is not None
        lr = bucket.lr
        scale, step = (bucket.gain, lr) if paper else (bucket.gain * lr, 1.0)
        Gi = bucket.preconditioned = bucket.gradients.preconditioned(bucket.metric)
        K = bucket.gradients.kernels(Gi) * (bucket.fictitious * scale)
        cost, drift = bucket.linear_cost(Gi), bucket.decoupled_drift()
        u = torch.zeros_like(K[:, 0]) if cost is None else scale * cost
        free = None if drift is None else drift * (1.0 if paper else lr)
        bucket.owners.sum_([K, u] if free is None else [K, u, free])
        return Part(bucket.parameter_seats(), K, u, free, step, bucket.fraction)

    # --- acting ---

    @UPDATE
    def act(self, w: Tensor) -> None:
        """Update all players with weights w."""
        for bucket in self.buckets:
            bucket.apply(w.to(bucket.ok))

    @UPDATE
    def coast(self) -> None:
        """Plan what the policy has no say in, before the players act one after another."""
        for bucket in self.buckets:
            bucket.coast()

    @UPDATE
    def steer(self, seats: Sequence[int], w: Tensor) -> None:
        """Update the players of some seats with weights w."""
        for bucket in self.buckets:
            chosen = bucket.select(seats)
            if chosen is not None:
                chosen.steer(w.to(bucket.ok))

    @UPDATE
    def tick(self) -> None:
        """Advance the clocks: a step that was masked did not happen."""
        for clock in {id(b.moment.clock): b.moment.clock for b in self.buckets}.values():
            clock += self.ok.to(clock)

    @property
    def failed_refreshes(self) -> int:
        return sum(bucket.failed_refreshes for bucket in self.buckets)


_PLACEMENTS: dict[tuple[Any, ...], Tensor] = {}


def _placement(places: Sequence[int], count: int, like: Tensor, tails: bool) -> Tensor:
    """``[places, members]`` of zeros and ones: a sum by matrix product is deterministic, without a loop."""
    key = (tuple(places), count, tails, like.dtype, like.device)
    if key not in _PLACEMENTS:
        if len(_PLACEMENTS) > 256:
            _PLACEMENTS.clear()
        rows = [[float(place == k or (tails and place > k)) for place in places] for k in range(count)]
        _PLACEMENTS[key] = torch.tensor(rows, dtype=like.dtype, device=like.device)
    return _PLACEMENTS[key]


# --- posing the problem ---


@GRADIENTS
def pose(
    players: list[Player],
    stages: Stages,
    records: Sequence[Record],
    folded: Folded | None,
    state: Mapping[Tensor, dict[str, Any]],
    samples: Samples,
    loss: Tensor | None,
    maximize: bool,
    world: World,
    seen: Set[int],
) -> Problem:
    """Collect gradients, check that they are finite, give every player its form of group gradients and fill the
    buckets.

    ``world``: the processes that share the batch. ``seen``: ids of players of which any of them has calls.
    """
    device = players[0].params[0].device
    # adjoints too: somebody may have repaired p.grad since. Where they are squared, they must not overflow either
    squared = any(p.curvature.needs_model for p in players)
    adjoints = [(r.name, h) for r in records for h in (r.h if squared or samples.groups.rank > 1 else r.d).values()]
    tallies = {id(t): (r.name, t.adjoints) for r in records for t in r.tallies.values()}
    adjoints += tallies.values()  # those of many records in one
    if folded is not None:
        adjoints += [(p.name, folded.columns[q]) for p in players for q in p.params if q in folded.columns]
    checked = [p.name for p in players for _ in p.params] + [name for name, _ in adjoints]
    fine = finite([gradient_of(q) for p in players for q in p.params])
    if adjoints:
        look = finite if squared else sums_finite
        fine = torch.cat([fine, look([h for _, h in adjoints]).to(device)])
    ok = fine.all()
    if loss is not None:
        ok = ok & torch.isfinite(loss.detach()).all().to(device)
    for everybody in (world, *shards.everybody(q for p in players for q in p.params)):
        ok = everybody.minimum(ok)
    dtype = torch.promote_types(torch.float32, players[0].params[0].dtype)
    fractions = samples.groups.fractions(torch.empty(0, dtype=dtype, device=device))
    forms = Forms(records, samples, ok, maximize, folded, world, seen)
    sorted_in: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    fresh: dict[torch.device, Tensor] = {}
    _stop_clocks(players, state)
    for i, player in enumerate(players):
        first = player.params[0]
        for p in player.params:
            if not state[p]:
                state[p]["step"] = fresh.setdefault(p.device, torch.zeros((), dtype=torch.float32, device=p.device))
        clock, owners = state[first]["step"], shards.owners(first)
        alike = (id(player.group), player.curvature, first.device, first.dtype, id(clock))
        sorted_in[*alike, owners, forms.kind(player)].append(i)
    buckets = []
    for (*_, owners, kind), chosen in sorted_in.items():
        theirs = [players[i] for i in chosen]
        params = [q for p in theirs for q in p.params]
        buckets.append(
            Bucket(
                group=theirs[0].group,
                curvature=theirs[0].curvature,
                players=theirs,
                params=params,
                states=[state[q] for q in params],
                peers=[p for p in players if p.curvature is theirs[0].curvature],
                seats=[stages.seat_of[id(p)] for p in theirs],
                gradients=forms.build(kind, theirs, fractions),
                calls={id(p): forms.calls_of(p) for p in theirs} if theirs[0].curvature.needs_model else {},
                tallies={id(p): forms.tallies_of(p) for p in theirs} if theirs[0].curvature.takes_tallies else {},
                moment=Moment(state[params[0]]["step"], compute_dtype(params[0].dtype)),
                seen=seen,
                ok=ok.to(params[0].device, compute_dtype(params[0].dtype)),
                world=world,
                owners=owners,
            )
        )
    return Problem(players, stages, buckets, fractions, ok.to(dtype), fine, checked)


def _stop_clocks(players: Sequence[Player], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """A parameter without a gradient stands still, so it must not share a clock with those that step."""
    stepping = {id(q) for player in players for q in player.params}
    ticking = {id(own["step"]) for p, own in state.items() if id(p) in stepping and own}
    stopped: dict[int, Tensor] = {}
    for p, own in state.items():
        if own and id(p) not in stepping and id(own["step"]) in ticking:
            own["step"] = stopped.setdefault(id(own["step"]), own["step"].clone())
