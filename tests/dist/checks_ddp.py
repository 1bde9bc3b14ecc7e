"""Run in two processes that share each batch, wrapped in DistributedDataParallel."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.dist.two import SIZE, assert_close, assert_same_everywhere, floats, mine, shared
from tests.games.markov import Residual
from tests.toys import FEATURES, batches, mlp, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.curvature import Identity, eigen

ROWS = 16  # more than features: in a null space of the factors any eigenbasis is as good as any other

KRONECKER: list[dict[str, Any]] = [
    {"curvature": "kronecker", "feedback": feedback, "bellman": bellman, "ekfac": ekfac}
    for feedback, bellman, ekfac in product(("linear", "off"), ("consistent", "paper"), (True, False))
    if feedback == "linear" or bellman == "consistent"
]
PLAIN: list[dict[str, Any]] = [
    {"curvature": curvature, "feedback": feedback, "bellman": bellman}
    for curvature, feedback, bellman in product(("identity", "adaptive"), ("linear", "off"), ("consistent", "paper"))
]
#: the shortest that shows an average, a second eigenbasis and a step between two looks
OFTEN = {"damping": 0.1, "refresh_every": 2, "momentum": 0.5}


class Convolutional(nn.Module):
    """Positions that share weights, and parameters without Kronecker structure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv1d(1, 3, 2)
        self.norm = nn.LayerNorm(FEATURES - 1)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.norm(self.first(x[:, None])).tanh().mean(2)
        logits: Tensor = self.last(features)
        return logits


def alone(model: nn.Module, **options: Any) -> OCNOpt:
    return OCNOpt(model.parameters(), 0.05, model=model, process_group=False, **{**OFTEN, **options})


def together(model: nn.Module, ddp: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, OCNOpt]:
    wrapped = shared(model, **(ddp or {}))
    return wrapped, OCNOpt(model.parameters(), 0.05, model=wrapped, **{**OFTEN, **options})


def loss_of(model: nn.Module, x: Tensor, y: Tensor, rows: int = ROWS) -> Tensor:
    """The mean over the rows of the whole batch, up to the mean over processes that is taken of it."""
    return cross_entropy(model(x), y, reduction="sum") * SIZE / rows


def assert_two_equal_one(net: nn.Module, rank: int, options: dict[str, Any], steps: int = 5, **ddp: Any) -> None:
    twin = copy.deepcopy(net)
    model, opt = together(net, ddp, **options)
    its = alone(twin, **options)
    for x, y in batches(steps, size=ROWS):
        opt.zero_grad()
        its.zero_grad()
        cross_entropy(model(*mine(rank, x)), *mine(rank, y)).backward()
        opt.step()
        cross_entropy(twin(x), y).backward()
        its.step()
        assert_close(net.parameters(), twin.parameters())
        if opt.diagnostics.layers:
            assert_close([opt.diagnostics.w, opt.diagnostics.s], [its.diagnostics.w, its.diagnostics.s], 1e-7, 1e-9)
    assert_same_everywhere([*net.parameters(), *floats(opt)])
    for ours, theirs in zip(opt.state.values(), its.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        kept = {"input_factor", "output_factor", "statistics", "momentum", "second_moment", "step"} & ours.keys()
        assert_close([ours[key] for key in kept], [theirs[key] for key in kept])


def two_equal_one_with_gradients_alone(rank: int) -> None:
    """The model is not even shown, nor the group: p.grad is all there is."""
    for options in PLAIN:
        net, twin = mlp(), mlp()
        model = shared(net)
        opt = OCNOpt(net.parameters(), 0.05, **options)
        its = OCNOpt(twin.parameters(), 0.05, **options)
        for x, y in batches(3, size=ROWS):
            opt.zero_grad()
            its.zero_grad()
            cross_entropy(model(*mine(rank, x)), *mine(rank, y)).backward()
            cross_entropy(twin(x), y).backward()
            opt.step()
            its.step()
        assert_close(net.parameters(), twin.parameters())
        assert_same_everywhere(net.parameters())


def two_equal_one_with_gradients(rank: int) -> None:
    for options in PLAIN:
        assert_two_equal_one(mlp(), rank, options)


def two_equal_one_with_factors(rank: int) -> None:
    for options in KRONECKER:
        assert_two_equal_one(mlp(), rank, options)


def two_equal_one_with_convolutions(rank: int) -> None:
    for options in KRONECKER[::2]:
        assert_two_equal_one(Convolutional().double(), rank, options)


def looks_are_rare(rank: int) -> None:
    assert_two_equal_one(mlp(), rank, {"curvature": "kronecker", "factor_every": 2, "refresh_every": 4})
    # bases that serve two steps after their statistics
    assert_two_equal_one(mlp(), rank, {"curvature": "kronecker", "refresh_every": 20}, steps=25)


def options_of_the_wrapper(rank: int) -> None:
    for ddp in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        assert_two_equal_one(mlp(), rank, KRONECKER[0], **ddp)


def uneven_batches(rank: int) -> None:
    """The gradient is the mean of two means, over 10 rows and over 6."""
    for options in KRONECKER:
        net, twin = mlp(), mlp()
        (model, opt), its = together(net, **options), alone(twin, **options)
        for x, y in batches(3, size=ROWS):
            opt.zero_grad()
            its.zero_grad()
            rows = slice(0, 10) if rank == 0 else slice(10, None)
            cross_entropy(model(x[rows]), y[rows]).backward()
            opt.step()
            each = cross_entropy(twin(x), y, reduction="none")
            ((each[:10].mean() + each[10:].mean()) / 2).backward()
            its.step()
            assert_close(net.parameters(), twin.parameters())


def an_empty_batch(rank: int) -> None:
    """The other process has all of it, at first, at last, and once nobody has anything."""
    for options in KRONECKER:
        net, twin = mlp(), mlp()
        (model, opt), its = together(net, **options), alone(twin, **options)
        for i, (x, y) in enumerate(batches(4, size=ROWS)):
            opt.zero_grad()
            its.zero_grad()
            busy = rank == i % 2 and i != 2
            loss_of(model, x if busy else x[:0], y if busy else y[:0]).backward()
            opt.step()
            if i != 2:
                (loss_of(twin, x, y) / SIZE).backward()
            else:
                twin(x[:0]).sum().backward()
            its.step()
            assert_close(net.parameters(), twin.parameters())


class Optional(nn.Module):
    """Takes a detour that only some batches need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.detour, self.last = nn.Linear(FEATURES, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        x = self.first(x).tanh()
        y: Tensor = self.last(self.detour(x).tanh() if detour else x)
        return y


def a_layer_that_one_process_does_not_use(rank: int) -> None:
    for options in KRONECKER:
        if options["bellman"] == "paper":  # processes that play different games are refused
            continue
        net, twin = Optional().double(), Optional().double()
        (model, opt), its = together(net, {"find_unused_parameters": True}, **options), alone(twin, **options)
        for x, y in batches(4, size=ROWS):
            opt.zero_grad()
            its.zero_grad()
            cross_entropy(model(*mine(rank, x), rank == 1), *mine(rank, y)).backward()
            opt.step()
            for i in range(SIZE):
                (cross_entropy(twin(*mine(i, x), i == 1), *mine(i, y)) / SIZE).backward()
            its.step()
            assert_close(net.parameters(), twin.parameters())
        assert_same_everywhere([*net.parameters(), *floats(opt)])


def processes_that_play_different_games(rank: int) -> None:
    net = Optional().double()
    model, opt = together(net, {"find_unused_parameters": True}, bellman="paper")
    x, y = batches(1)[0]
    before = values(net)
    cross_entropy(model(x, rank == 1), y).backward()
    with pytest.raises(RuntimeError, match=r"the 2 processes .* do not run the same layers in the same order"):
        opt.step()
    assert_close(values(net), before, 0, 0)


def one_process_evaluates_by_another_way(rank: int) -> None:
    """With gradients on, between backward pass and step: the layers act as in the pass that is trained on."""
    net = Optional().double()
    model, opt = together(net, {"find_unused_parameters": True}, bellman="paper")
    for x, y in batches(2, size=ROWS):
        opt.zero_grad()
        cross_entropy(model(*mine(rank, x), True), *mine(rank, y)).backward()
        if rank == 1:
            net(x, False)
        opt.step()
        assert opt.diagnostics.layers[1].name == "detour"
    assert_same_everywhere(net.parameters())


def accumulation(rank: int) -> None:
    for options in KRONECKER:
        net, twin = mlp(), mlp()
        (model, opt), its = together(net, **options), alone(twin, **options)
        for x, y in batches(3, size=2 * ROWS):
            opt.zero_grad()
            its.zero_grad()
            x_1, x_2 = mine(rank, x)[0].chunk(2)
            y_1, y_2 = mine(rank, y)[0].chunk(2)
            with model.no_sync():
                (cross_entropy(model(x_1), y_1) / 2).backward()
            (cross_entropy(model(x_2), y_2) / 2).backward()
            opt.step()
            cross_entropy(twin(x), y).backward()
            its.step()
            assert_close(net.parameters(), twin.parameters())


def scaled_and_clipped(rank: int) -> None:
    """Adjoints follow what was done to the mean of the gradients."""
    for scaled in (True, False):
        net, twin = mlp(), mlp()
        (model, opt), its = together(net, **KRONECKER[0]), alone(twin, **KRONECKER[0])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for x, y in batches(4, size=ROWS):
            opt.zero_grad()
            its.zero_grad()
            scaler.scale(cross_entropy(model(*mine(rank, x)), *mine(rank, y))).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            cross_entropy(twin(x), y).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            its.step()
            assert_close(net.parameters(), twin.parameters(), 1e-7)


def what_is_not_finite_in_one_process(rank: int) -> None:
    """Gradients are repaired everywhere, adjoints are not."""
    for options in KRONECKER:
        net = mlp()
        model, opt = together(net, **options)
        for i, (x, y) in enumerate(batches(4, size=ROWS)):
            opt.zero_grad()
            loss = cross_entropy(model(*mine(rank, x)), *mine(rank, y))
            (loss * float("nan") if i == 2 and rank == 0 else loss).backward()
            for p in net.parameters():
                p.grad.nan_to_num_(1.0)
            before = [t.clone() for t in (*values(net), *floats(opt))]
            opt.step()
            if i == 2:
                assert_close(values(net), before[: len(values(net))], 0, 0)
        assert_same_everywhere([*net.parameters(), *floats(opt)])
        with pytest.warns(UserWarning, match="another process" if rank else r"gradient of '0\.0'|of '2'"):
            assert opt.diagnostics.skipped_steps == 1


def a_loss_that_is_not_finite_in_one_process(rank: int) -> None:
    net = mlp()
    model, opt = together(net)
    before = values(net)

    def closure() -> Tensor:
        x, y = batches(1)[0]
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss * float("nan") if rank == 1 else loss

    opt.step(closure)
    assert_close(values(net), before, 0, 0)


def calls_that_are_of_no_use_in_one_process(rank: int) -> None:
    """Both take the adaptive curvature instead, in that step, and go on afterwards."""
    net, twin = mlp(), mlp()
    (model, opt), its = together(net, **KRONECKER[0]), alone(twin, **KRONECKER[0])
    for i, (x, y) in enumerate(batches(3, size=ROWS)):
        opt.zero_grad()
        its.zero_grad()
        part = mine(rank, x)[0].clone()
        cross_entropy(model(part), *mine(rank, y)).backward()
        whole = x.clone()
        cross_entropy(twin(whole), y).backward()
        if i == 1:
            whole.zero_()
            if rank == 1:
                part.zero_()
            with pytest.warns(UserWarning, match=r"0\.0: its (input was overwritten|calls are of no use on another)"):
                opt.step()
            with pytest.warns(UserWarning, match="overwritten"):
                its.step()
        else:
            opt.step()
            its.step()
        assert_close(net.parameters(), twin.parameters())
    assert_same_everywhere([*net.parameters(), *floats(opt)])


def gradients_of_different_parameters(rank: int) -> None:
    net = mlp()
    model, opt = together(net, **KRONECKER[0])
    before = values(net)
    cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    if rank == 1:
        net[2].weight.grad = net[2].bias.grad = None
    with pytest.raises(RuntimeError, match=r"the 2 processes .* do not have gradients of the same parameters"):
        opt.step()
    assert_close(values(net), before, 0, 0)


def each_matrix_is_decomposed_once(rank: int) -> None:
    for bellman in ("consistent", "paper"):
        net = mlp()
        model, opt = together(net, curvature="kronecker", bellman=bellman)
        cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
        with patch.object(eigen, "safe_eigh", wraps=eigen.safe_eigh) as spy:
            opt.step()
        found = [m.shape[-1] for call in spy.call_args_list for m in call.args[0]]  # those of one size at once
        counts: list[Any] = [None] * SIZE
        dist.all_gather_object(counts, found)
        assert sorted(counts[0] + counts[1]) == [3, 4, 4, 5, 5, 6]  # inputs with a bias, and outputs, of three layers
        assert len(counts[0]) == len(counts[1]) == 3


def a_decomposition_that_fails(rank: int) -> None:
    """In one process, for one matrix of one layer, and in both that layer keeps what it had."""
    net = mlp()
    model, opt = together(net, curvature="kronecker", refresh_every=1)
    genuine = eigen.safe_eigh
    failed = 0
    for i, (x, y) in enumerate(batches(3, size=ROWS)):
        opt.zero_grad()
        cross_entropy(model(*mine(rank, x)), *mine(rank, y)).backward()
        eigen.safe_eigh = lambda m, fail=i == 1: None if fail and m.shape[-1] == 6 else genuine(m)
        basis = None if i == 0 else opt.state[net[0][0].weight]["input_basis"].clone()
        try:
            opt.step()
        finally:
            eigen.safe_eigh = genuine
        failed += opt.diagnostics.failed_refreshes
        if i == 1:
            assert torch.equal(opt.state[net[0][0].weight]["input_basis"], basis)
            assert opt.diagnostics.failed_refreshes == 1
    assert failed == 1
    assert_same_everywhere([*net.parameters(), *floats(opt)])


def nobody_has_said_which_processes(rank: int) -> None:
    for options in ({"curvature": "kronecker"}, {"rank": 2}, {"feedback": "nonlinear"}):
        net = mlp()
        opt = OCNOpt(net.parameters(), model=net, **options)
        cross_entropy(net(batches(1)[0][0]), batches(1)[0][1]).backward()
        before = values(net)
        with pytest.raises(RuntimeError, match="reads more than gradients, and there are 2 processes: pass the Dist"):
            opt.step()
        assert_close(values(net), before, 0, 0)
        assert not opt.state
        opt.attach(net, process_group=False)
        cross_entropy(net(batches(1)[0][0]), batches(1)[0][1]).backward()
        opt.step()


def a_network_for_each_process(rank: int) -> None:
    """They take different numbers of steps, and nobody waits."""
    net = mlp(seed=rank)
    opt = alone(net, curvature="kronecker")
    for x, y in batches(1 + 2 * rank):
        opt.zero_grad()
        cross_entropy(net(x), y).backward()
        opt.step()


def wrapped_elsewhere(rank: int) -> None:
    """As trainers do: the optimizer sees the bare model, and is told the group."""
    net, twin = mlp(), mlp()
    opt = OCNOpt(net.parameters(), 0.05, model=net, process_group=dist.group.WORLD, **{**OFTEN, **KRONECKER[0]})
    its, model = alone(twin, **KRONECKER[0]), shared(net)
    for x, y in batches(3, size=ROWS):
        opt.zero_grad()
        its.zero_grad()
        cross_entropy(model(*mine(rank, x)), *mine(rank, y)).backward()
        cross_entropy(twin(x), y).backward()
        opt.step()
        its.step()
        assert_close(net.parameters(), twin.parameters())


def names_are_those_of_the_network(rank: int) -> None:
    _, opt = together(mlp(), curvature="kronecker")
    assert [player.name for player in opt._players()] == ["0.0", "1.0", "2"]


def chance_is_the_same_everywhere(rank: int) -> None:
    torch.manual_seed(rank)  # random numbers of the processes differ, as those of a data loader should
    net = Residual(projection=True).double()
    for p in net.parameters():
        dist.broadcast(p.detach(), 0)
    model, opt = together(net, bellman="paper", alignment="random")
    seen = set()
    for x, y in batches(8):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        seen.add(tuple(opt.diagnostics.stage_of))
        assert_same_everywhere(net.parameters())
    assert len(seen) > 1
    opt.param_groups[0]["alignment"] = "adaptive"
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="alignment='adaptive' would get another reward in each process"):
        opt.step()


def a_process_that_may_stop_early(rank: int) -> None:
    net = mlp()
    model, opt = together(net, curvature="kronecker")
    x, y = batches(1)[0]
    with model.join():
        cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match=r"inside join\(\) one may stop before the others"):
            opt.step()


class Sizes(Identity):
    """Reads the calls of its layers, and keeps to itself what it reads."""

    name = "sizes"
    needs_model = True


def a_curvature_that_does_not_add_up(rank: int) -> None:
    net = mlp()
    model, opt = together(net, curvature=Sizes())
    before = values(net)
    cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    with pytest.raises(RuntimeError, match="curvature='sizes' does not add up what it reads over the processes"):
        opt.step()
    assert_close(values(net), before, 0, 0)


def gradients_alone_may_stop_early(rank: int) -> None:
    net = mlp()
    model, opt = together(net)
    with model.join():
        for x, y in batches(1 + rank):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()


CHECKS = [
    two_equal_one_with_gradients_alone,
    two_equal_one_with_gradients,
    two_equal_one_with_factors,
    two_equal_one_with_convolutions,
    looks_are_rare,
    options_of_the_wrapper,
    uneven_batches,
    an_empty_batch,
    a_layer_that_one_process_does_not_use,
    processes_that_play_different_games,
    one_process_evaluates_by_another_way,
    accumulation,
    scaled_and_clipped,
    what_is_not_finite_in_one_process,
    a_loss_that_is_not_finite_in_one_process,
    calls_that_are_of_no_use_in_one_process,
    gradients_of_different_parameters,
    each_matrix_is_decomposed_once,
    a_decomposition_that_fails,
    nobody_has_said_which_processes,
    a_network_for_each_process,
    wrapped_elsewhere,
    chance_is_the_same_everywhere,
    a_curvature_that_does_not_add_up,
    gradients_alone_may_stop_early,
    names_are_those_of_the_network,
    a_process_that_may_stop_early,
]
