"""C = A ⊗ C + λI, eq. (kfac): the Gauss-Newton matrix of a layer as a Kronecker product, inverted in its eigenbasis.

A = E[x x^T] over inputs (a bias is an extra input 1), C = E[h̃ h̃^T] over the samples' adjoints at the layer's
output, h̃ = B·h. With ``ekfac`` the eigenvalues Σ_A ⊗ Σ_C are replaced by second moments of the gradient, measured in
the eigenbasis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt.curvature.base import Curvature, Metric
from ocnopt.curvature.eigen import Eigen, decompose, turned
from ocnopt.curvature.inputs import Number, Seen, Sums, seen_of, squares_over
from ocnopt.curvature.tally import shape
from ocnopt.distributed import World, share_out
from ocnopt.layers.base import Adapter
from ocnopt.linalg import as_allowed, full_precision

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player

#: what a layer keeps from step to step
_STATE = (
    "input_factor", "output_factor", "statistics", "since_refresh", "refreshed_at", "early",
    "input_basis", "output_basis", "eigenvalues",
)  # fmt: skip


@dataclass
class KroneckerBlock:
    """C of one layer: U_C (S + λ) U_A^T, ``U_A: [g, a, a]``, ``U_C: [g, c, c]``, ``S: [g, c, a]``."""

    module: nn.Module
    adapter: Adapter
    names: tuple[str, ...]
    U_A: Tensor
    U_C: Tensor
    S: Tensor
    damping: float

    @cached_property
    def _damped(self) -> Tensor:
        return self.S + self.damping

    def solve(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        V = self.adapter.to_matrix(self.module, dict(zip(self.names, tensors, strict=True)))
        V = self._divided(self.U_C.mT @ V @ self.U_A)
        back = self.adapter.from_matrix(self.module, self.U_C @ V @ self.U_A.mT)
        return [back[n] for n in self.names]

    def _divided(self, V: Tensor) -> Tensor:
        if self.damping:
            return V / self._damped
        seen = self.S.amax() * torch.finfo(self.S.dtype).eps < self.S  # without damping a pseudo-inverse, eq. (kfac-u)
        return torch.where(seen, V / self.S, 0)


@dataclass
class KroneckerMetric(Metric):
    blocks: list[KroneckerBlock]

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        todo, out = list(vectors), []
        with full_precision(), as_allowed(vectors[0].device):
            for block in self.blocks:
                mine, todo = todo[: len(block.names)], todo[len(block.names) :]
                out += block.solve(mine)
        return out


@dataclass(eq=False)
class Layer:
    """A player in one step, and what it keeps from step to step."""

    player: Player
    state: dict[str, Any]
    passes: list[Seen] = field(default_factory=list)  # what this process saw of it
    samples: Number = 0.0  # how many all processes saw
    ok: Tensor = field(init=False)  # does this step tell something about it?
    weight: Tensor = field(init=False)  # of this step in the averages

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.state["input_factor"], self.state["output_factor"]

    @property
    def bases(self) -> tuple[Tensor, Tensor]:
        return self.state["input_basis"], self.state["output_basis"]

    def block(self, damping: float) -> KroneckerBlock:
        player = self.player
        assert player.adapter is not None
        assert player.module is not None
        return KroneckerBlock(
            player.module, player.adapter, player.own_names, *self.bases, self.state["eigenvalues"], damping
        )

    def begin(self, like: Tensor) -> None:
        """Make room for the factors, also where this process has not seen a sample."""
        adapter, module = self.player.adapter, self.player.module
        assert adapter is not None
        assert module is not None
        if "input_factor" in self.state:
            return
        g, c, a = shape(adapter, module)
        self.state["input_factor"], self.state["output_factor"] = like.new_zeros(g, a, a), like.new_zeros(g, c, c)
        self.state["statistics"] = like.new_zeros(())  # how many are in the factors
        self.state["since_refresh"] = 0

    def forget(self) -> None:
        for key in _STATE:
            self.state.pop(key, None)

    def rehearse(self, bucket: Bucket) -> None:
        """State without any statistics: the first look at the layer finds all of it out of date."""
        self.begin(bucket.ok)
        self.keep_on()
        self.state.update(refreshed_at=-self.state["since_refresh"], early=0)

    @property
    def _every(self) -> int:
        return interval(self.state, self.player.group, self.player.inside)

    @property
    def is_old(self) -> bool:
        """Is it time for another basis?"""
        return "input_basis" not in self.state or self.state["since_refresh"] >= self._every

    def has_learned(self) -> bool:
        """How many of the steps since the last refresh have counted? Only the device knows."""
        if "input_basis" not in self.state:
            return True
        found = _caught_up(self.state, self.player.group, self.player.inside)
        if "refreshed_at" in found:
            return True
        self.state.update(found)
        return False

    def average(self, average: Tensor, value: Tensor) -> None:
        """Go on with a running average; a value of a bad step may be anything."""
        average.lerp_(torch.where(self.ok, value, average), self.weight)

    def renew(self, **found: Tensor) -> None:
        """In place: a CUDA graph goes on with the new basis."""
        for key, value in found.items():
            if key in self.state:
                self.state[key].copy_(value)
            else:
                self.state[key] = value

    def rest(self, peers: Sequence[Player]) -> None:
        """There is a new basis. One that would last comes early to an end if its layer is refreshed at another time
        than its turn: each has one of its own, so that the refreshes of a network are spread over the steps.
        """
        state, group, inside = self.state, self.player.group, self.player.inside
        state.update(refreshed_at=int(state["statistics"]), since_refresh=0, early=0)
        every, unit = period(group, inside), group["factor_every"]
        if inside or len(peers) < 2 or every == unit or interval(state, group, inside) < every:
            return
        turns = stagger([_cost(peer) for peer in peers], every, unit)
        turn = turns[[peer is self.player for peer in peers].index(True)]
        state["early"] = (state["refreshed_at"] - 1 - turn) % every // unit * unit  # the first of all is at step 1

    def keep_on(self) -> None:
        """There is no new basis: the old one stays, and the next step tries again."""
        self.state["since_refresh"] = self._every
        if "input_basis" in self.state:
            return
        # nothing to keep: the diagonals of the factors, in coordinates as they are
        self.state["input_basis"], self.state["output_basis"] = map(_eye, self.factors)
        d, c = (v.diagonal(dim1=1, dim2=2).nan_to_num(0.0, 0.0, 0.0).clamp_min(0) for v in self.factors)
        self.state["eigenvalues"] = c[:, :, None] * d[:, None, :]


class Kronecker(Curvature):
    name = "kronecker"
    needs_model = True
    takes_tallies = True
    adds_up = True

    def measure(self, bucket: Bucket, a: Tensor | None) -> KroneckerMetric:
        layers = [Layer(player, bucket.state_of(i)) for i, player in enumerate(bucket.players)]
        for layer in layers:
            if not self.fits(layer.state, layer.player.params):  # a block that lost or gained its bias starts anew
                layer.forget()
        with full_precision():
            old = [layer for layer in layers if self.overdue(layer.state, bucket.group, layer.player.inside)]
            # the first look at the device since the last refresh; a bad step leaves no trace
            if old and bool(bucket.ok):
                bucket.failed_refreshes += self._refresh(old, bucket.peers, bucket.world)
            looking = [layer for layer in layers if self._looks(bucket, layer)]
            for layer in layers:
                if layer not in looking and not self.ready(layer.state):  # a rehearsal
                    layer.rehearse(bucket)
                elif layer not in looking:  # the step counts all the same
                    layer.state["statistics"] += bucket.ok
                    layer.state["since_refresh"] += 1
            self._learn(bucket, looking, a)
            return KroneckerMetric([layer.block(bucket.group["damping"]) for layer in layers])

    def _looks(self, bucket: Bucket, layer: Layer) -> bool:
        return id(layer.player) in bucket.seen and self.due(layer.state, bucket.group, layer.player.inside)

    def due(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        if self.refreshes(state, group, inside):
            return True
        if not inside and group["factor_every"] == 1:
            return True
        if self.overdue(state, group, inside):  # then the step begins with a refresh, and looks as it does after that
            state = {**state, **_caught_up(state, group, inside)}
        steps: int = state["since_refresh"] + 1
        return steps >= interval(state, group, inside) or (not inside and steps % group["factor_every"] == 0)

    def refreshes(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        last = not self.ready(state) or state["since_refresh"] + 1 >= interval(state, group, inside)
        return last and _at_once(state, group, inside)

    def overdue(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        if not self.ready(state) or _at_once(state, group, inside):
            return False
        return bool(state["since_refresh"] >= interval(state, group, inside))

    def catch_up(self, players: Sequence[Player], states: Sequence[dict[str, Any]], peers: Sequence[Player]) -> int:
        with full_precision():
            layers = [Layer(player, state) for player, state in zip(players, states, strict=True)]
            return self._refresh(layers, peers, World())

    def fits(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
        if "input_factor" not in state:
            return True
        (g, a, _), (_, c, _) = state["input_factor"].shape, state["output_factor"].shape
        return bool(g * c * a == sum(p.numel() for p in params))

    def ready(self, state: Mapping[str, Any]) -> bool:
        return "input_basis" in state

    def _learn(self, bucket: Bucket, layers: Sequence[Layer], a: Tensor | None) -> None:
        world, new, others = bucket.world, list[Layer](), list[Layer]()
        for layer in layers:
            (new if self.refreshes(layer.state, bucket.group, layer.player.inside) else others).append(layer)
            layer.begin(bucket.ok)
            layer.passes = seen_of(bucket, layer.player, a, keep=world.size == 1 and layer not in new)
            layer.samples = sum(one.batch for one in layer.passes)
            layer.state["since_refresh"] += 1
        if world.size == 1:
            self._weigh(bucket, layers)
        for portion in world.portions(new):
            self._average_factors(bucket, portion)
        self._refresh_now(bucket, new)
        for portion in world.portions(new):
            self._average_eigenvalues(bucket, portion)
        for portion in world.portions(others):
            self._average_factors(bucket, portion)
            self._average_eigenvalues(bucket, portion)
            for layer in portion:
                layer.passes = []  # with what was kept of them

    @staticmethod
    def _weigh(bucket: Bucket, layers: Sequence[Layer]) -> None:
        """How much this step counts in the averages: all in the first one, nothing if it is bad or tells nothing."""
        if not layers:
            return
        statistics = [layer.state["statistics"] for layer in layers]
        seen = [layer.samples > 0 for layer in layers]
        ok = bucket.ok.expand(len(layers))
        if not all(each is True for each in seen):
            ok = ok * torch.stack([torch.as_tensor(each, device=ok.device) for each in seen])
        weights = torch.sub(ok, ok * (torch.stack(statistics) > 0), alpha=bucket.group["factor_decay"])
        for layer, fine, weight in zip(layers, (ok > 0).unbind(), weights.unbind(), strict=True):
            layer.ok, layer.weight = fine, weight
        torch._foreach_add_(statistics, list(ok.unbind()))

    def _average_factors(self, bucket: Bucket, layers: Sequence[Layer]) -> None:
        sums = [Sums.over(layer.passes, *layer.factors) for layer in layers]
        if bucket.world.size > 1:
            sums = [each.to_add_up() for each in sums]
            bucket.world.sum_([torch.as_tensor(t) for each in sums for t in each])
            for layer, each in zip(layers, sums, strict=True):
                layer.samples = each.samples
            self._weigh(bucket, layers)
        for layer, each in zip(layers, sums, strict=True):
            for factor, value in zip(layer.factors, each.factors(), strict=True):
                layer.average(factor, value)

    def _average_eigenvalues(self, bucket: Bucket, layers: Sequence[Layer]) -> None:
        if not bucket.group["ekfac"]:
            return
        with as_allowed(bucket.ok.device):
            moments = [squares_over(layer.passes, layer.state["eigenvalues"], *layer.bases) for layer in layers]
        bucket.world.sum_(moments)
        for layer, moment in zip(layers, moments, strict=True):
            layer.average(layer.state["eigenvalues"], layer.samples * moment)  # h̃² / B

    def _refresh_now(self, bucket: Bucket, layers: Sequence[Layer]) -> None:
        """Of what this very step has seen."""
        fine = [layer for layer in layers if bool(layer.ok)]
        for layer in layers:
            if layer not in fine:
                layer.keep_on()
        bucket.failed_refreshes += self._refresh(fine, bucket.peers, bucket.world)

    def _refresh(self, layers: Sequence[Layer], peers: Sequence[Player], world: World) -> int:
        """Renew the eigenbases of layers that are old. A decomposition that fails leaves the old one; returns how many
        did.
        """
        old, failed = [layer for layer in layers if layer.has_learned()], 0
        found = decompose([factor for layer in old for factor in layer.factors], world)
        for layer, A, C in zip(old, found[::2], found[1::2], strict=True):
            if A is not None and C is not None:
                eigenvalues = self._in_new_basis(layer.player.group, layer.state, A, C)
                layer.renew(eigenvalues=eigenvalues, input_basis=A[1], output_basis=C[1])
                layer.rest(peers)
            else:
                failed += 1
                layer.keep_on()
        return failed

    @staticmethod
    def _in_new_basis(group: Mapping[str, Any], state: dict[str, Any], A: Eigen, C: Eigen) -> Tensor:
        """Σ_A ⊗ Σ_C. The averages of EKFAC go on instead: the diagonal of U S U^T, seen from the new basis. (One
        mini-batch would be a poor start: directions it does not see would have no curvature until the next.)
        """
        if not group["ekfac"] or "input_basis" not in state:
            return C[0][:, :, None] * A[0][:, None, :]
        return turned(state["eigenvalues"], (state["input_basis"], state["output_basis"]), (A[1], C[1]))


def interval(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> int:
    """Steps from the last refresh to the next. Where looks are rare, the first ones follow each other quickly, at steps
    1, 2, 3, 4, 6, 9, …: what the first mini-batch says of an untrained layer is soon out of date.
    """
    every, soon = period(group, inside), max(1, state.get("refreshed_at", 0) // 2)
    if inside or 1 < group["factor_every"] >= soon:
        every = min(every, soon)
    elif group["factor_every"] > 1:
        every = min(every, _whole(soon, group["factor_every"]))
    early: int = state.get("early", 0)
    return max(1, every - max(0, early))


def period(group: Mapping[str, Any], inside: bool) -> int:
    """Steps between refreshes once all is under way: as many as were asked for, and on to the next look. The looks at
    all layers thus stay together; inside a solve there are none in between.
    """
    every: int = group["refresh_every"]
    return every if inside else _whole(every, group["factor_every"])


def _whole(steps: int, unit: int) -> int:
    """Rounded up to a multiple."""
    return -(-steps // unit) * unit


def _caught_up(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> dict[str, int]:
    """What a refresh makes of the counters, if it is due: only the device knows how many steps have counted."""
    every = interval(state, group, inside)
    counted = int(state["statistics"])
    age: int = counted - state.get("refreshed_at", -every)
    return {"since_refresh": age} if age < every else {"since_refresh": 0, "refreshed_at": counted, "early": 0}


def _at_once(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
    """Does a refresh wait for what its step sees? The first one must, inside a solve looks are there for nothing else,
    and at every step no basis may be old. All others take what the steps before have left, so that a step as such is
    always the same, and one in a CUDA graph too.
    """
    return inside or group["refresh_every"] == 1 or state.get("refreshed_at", 0) <= 0


def stagger(costs: Sequence[float], every: int, unit: int) -> list[int]:
    """After how many steps, 1 to ``every``, in multiples of ``unit``, each piece of work is done: at evenly spaced
    times, as much at each as can be.
    """
    slots = every // unit
    times = min(slots, len(costs))
    if times < 2:
        return [every] * len(costs)
    return [(turn + 1) * slots // times * unit for turn in share_out(costs, times)]


def _cost(player: Player) -> float:
    """Of decomposing both factors: n³, of the weight as a matrix."""
    weight = player.params[0]
    c = weight.shape[0]
    return float(c**3 + (weight.numel() // max(1, c)) ** 3)


def _eye(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor).clone()
