"""C = A ⊗ C + λI, eq. (kfac): the Gauss-Newton matrix of a layer as a Kronecker product, inverted in its eigenbasis.

A = E[x x^T] over inputs (a bias is an extra input 1), C = E[h̃ h̃^T] over the samples' adjoints at the layer's
output, h̃ = B·h. With ``ekfac`` the eigenvalues Σ_A ⊗ Σ_C are replaced by second moments of the gradient, measured in
the eigenbasis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ocnopt.curvature import beside
from ocnopt.curvature.base import Curvature, Metric
from ocnopt.curvature.eigen import Eigen, decompose, turned
from ocnopt.curvature.inputs import Sums, seen_of, squares_over
from ocnopt.curvature.layer import ASIDE, BASES, KroneckerBlock, Layer
from ocnopt.curvature.turns import at_once, caught_up, interval, serves, takes_time
from ocnopt.distributed import World
from ocnopt.linalg import as_allowed, full_precision

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player


@dataclass
class KroneckerMetric(Metric):
    blocks: list[KroneckerBlock]
    is_new = True

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        todo, out = list(vectors), []
        with full_precision(), as_allowed(vectors[0].device):
            for block in self.blocks:
                mine, todo = todo[: len(block.names)], todo[len(block.names) :]
                out += block.solve(mine)
        return out


class Kronecker(Curvature):
    name = "kronecker"
    needs_model = True
    takes_tallies = True
    adds_up = True
    aside = ASIDE

    def measure(self, bucket: Bucket, a: Tensor | None) -> KroneckerMetric:
        layers = [Layer(player, bucket.state_of(i)) for i, player in enumerate(bucket.players)]
        for layer in layers:
            if not self.fits(layer.state, layer.player.params):  # a block that lost or gained its bias starts anew
                layer.forget()
        with full_precision():
            bucket.failed_refreshes += self._serve(layers, bucket.world)
            old = [layer for layer in layers if self._ends(layer.state, bucket.group, layer.player.inside)]
            # the first look at the device since the last refresh; a bad step leaves no trace
            if old and bool(bucket.ok):
                bucket.failed_refreshes += self._renew(old, bucket.peers, bucket.world)
            looking = [layer for layer in layers if self._looks(bucket, layer)]
            for layer in layers:
                if layer not in looking and not self.ready(layer.state):  # a rehearsal
                    layer.rehearse(bucket.ok)
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
        if self._ends(state, group, inside):  # then the step begins with a refresh, and looks as it does after that
            state = {**state, **caught_up(state, group, inside)}
        steps: int = state["since_refresh"] + 1
        return steps >= interval(state, group, inside) or (not inside and steps % group["factor_every"] == 0)

    def refreshes(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        last = not self.ready(state) or state["since_refresh"] + 1 >= interval(state, group, inside)
        return last and at_once(state, group, inside)

    def overdue(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        return self._ends(state, group, inside) or serves(state, group, inside)

    def untouched(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> Set[str]:
        renewed = self.refreshes(state, group, inside) or self.overdue(state, group, inside)
        return {*ASIDE} if renewed else {*ASIDE, *BASES}

    def _ends(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        """Has the basis had its time?"""
        if not self.ready(state) or at_once(state, group, inside):
            return False
        return bool(state["since_refresh"] >= interval(state, group, inside))

    def catch_up(self, players: Sequence[Player], states: Sequence[dict[str, Any]], peers: Sequence[Player]) -> int:
        with full_precision():
            layers = [Layer(player, state) for player, state in zip(players, states, strict=True)]
            failed = self._serve(layers, World())
            old = [layer for layer in layers if self._ends(layer.state, layer.player.group, layer.player.inside)]
            return failed + self._renew(old, peers, World())

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
            ok = ok * torch.stack([each if isinstance(each, Tensor) else ok.new_full((), each) for each in seen])
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
            for factor, value, share in zip(layer.factors, (each.A, each.C), each.shares, strict=True):
                layer.average(factor, value, share)

    def _average_eigenvalues(self, bucket: Bucket, layers: Sequence[Layer]) -> None:
        if not bucket.group["ekfac"]:
            return
        with as_allowed(bucket.ok.device):
            moments = [
                squares_over(layer.passes, layer.state["eigenvalues"], *layer.bases, layer.inputs_seen())
                for layer in layers
            ]
        bucket.world.sum_(moments)
        for layer, moment in zip(layers, moments, strict=True):
            layer.average(layer.state["eigenvalues"], moment, layer.samples)  # h̃² / B

    def _refresh_now(self, bucket: Bucket, layers: Sequence[Layer]) -> None:
        """Of what this very step has seen."""
        fine = [layer for layer in layers if bool(layer.ok)]
        for layer in layers:
            if layer not in fine:
                layer.keep_on()
        bucket.failed_refreshes += self._refresh(fine, bucket.peers, bucket.world)

    def _renew(self, layers: Sequence[Layer], peers: Sequence[Player], world: World) -> int:
        """Of what the steps before have left: at once, or begun, to serve some steps later. Returns how many failed."""
        now = [layer for layer in layers if not takes_time(layer.player.group)]
        for layer in layers:
            if layer not in now and layer.has_learned():
                layer.set_aside(peers, world)
        return self._refresh(now, peers, world)

    def _serve(self, layers: Sequence[Layer], world: World) -> int:
        """Bases that were begun, and whose time has come. Returns how many failed."""
        due = [layer for layer in layers if serves(layer.state, layer.player.group, layer.player.inside)]
        if world.size > 1:
            every = decompose([factor for layer in due for factor in layer.aside], world)
        else:
            every = [eigen for layer in due for eigen in beside.finish(layer.aside)]
        failed = 0
        for layer, A, C in zip(due, every[::2], every[1::2], strict=True):
            if A is not None and C is not None:
                eigenvalues = self._in_new_basis(layer.player.group, layer.state, A, C)
                layer.renew(eigenvalues=eigenvalues, input_basis=A[1], output_basis=C[1])
            else:
                failed += 1
            layer.serve(made=A is not None and C is not None)
        return failed

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
                layer.serve(made=True)
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
        with as_allowed(A[1].device):
            return turned(state["eigenvalues"], (state["input_basis"], state["output_basis"]), (A[1], C[1]))
