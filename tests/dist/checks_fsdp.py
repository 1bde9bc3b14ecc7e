"""Run in two processes that hold a part of each parameter, as ``fully_shard`` leaves them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.dist.two import SIZE, assert_close, mine
from tests.toys import FEATURES, batches
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from ocnopt import Curvature, Metric, OCNOpt

PLAIN: list[dict[str, Any]] = [
    {"curvature": curvature, "feedback": feedback, "bellman": bellman}
    for curvature, feedback, bellman in product(("identity", "adaptive"), ("linear", "off"), ("consistent", "paper"))
    if feedback == "linear" or bellman == "consistent"
]


def network() -> nn.Sequential:
    """Parameters that cannot be cut in two equal parts: of 3 entries, and of 1, of which a process gets nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 1), nn.Tanh(), nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


def sharded(mesh: Any = None) -> nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensors: Any) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def part_of(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def moments(opt: OCNOpt) -> list[Tensor]:
    return [v for own in opt.state.values() for v in own.values() if isinstance(v, Tensor)]


def step(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    opt.step()


def assert_two_equal_one(rank: int, options: dict[str, Any], shown: bool = False, mesh: Any = None) -> None:
    model, twin = sharded(mesh), network()
    opt = OCNOpt(model.parameters(), 0.05, model=model if shown else None, **options)
    its = OCNOpt(twin.parameters(), 0.05, model=twin if shown else None, **options)
    for x, y in batches(3, size=8):
        step(model, opt, *mine(rank, x, y))
        step(twin, its, x, y)
        assert_close(whole(model.parameters()), twin.parameters())
    assert_close(whole(moments(opt)), moments(its))
    if options["feedback"] == "linear":
        assert_close([opt.diagnostics.w, opt.diagnostics.s], [its.diagnostics.w, its.diagnostics.s])
        assert opt.diagnostics.predicted_change == pytest.approx(its.diagnostics.predicted_change)


def an_evaluation_by_another_way(rank: int) -> None:
    """With gradients on, between backward pass and step: the layers act as in the pass that is trained on."""

    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            a, b, last = self
            return last(b(a(x).tanh()).tanh() if self.training else a(b(x)))

    model = Backwards(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))
    for layer in model[:2]:
        fully_shard(layer)
    fully_shard(model)
    opt = OCNOpt(model.parameters(), 0.05, model=model, bellman="paper")
    for x, y in batches(2, dtype=torch.float32):
        opt.zero_grad()
        cross_entropy(model.train()(x), y).backward()
        model.eval()(x)
        model.reshard()  # a backward pass would have done it
        opt.step()
        assert [layer.name for layer in opt.diagnostics.layers] == ["0", "1", "2"]


def two_equal_one(rank: int) -> None:
    for options in PLAIN:
        assert_two_equal_one(rank, options)


def two_equal_one_with_the_model_shown(rank: int) -> None:
    for options in PLAIN:
        assert_two_equal_one(rank, options, shown=True)


def two_equal_one_with_everything_else(rank: int) -> None:
    assert_two_equal_one(rank, {**PLAIN[0], "weight_decay": 0.1, "ema": False, "nesterov": True})
    assert_two_equal_one(rank, {**PLAIN[3], "weight_decay": 0.1, "decoupled_weight_decay": True})
    assert_two_equal_one(rank, {**PLAIN[0], "players": 2, "maximize": True, "momentum": 0.0})


def a_curvature_of_ones_own(rank: int) -> None:
    """Whose code may fail: then numbers are put back where they were."""

    class Constant(Metric):
        def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
            return [2 * v for v in vectors]

    class Own(Curvature):
        name = "own"

        def measure(self, bucket: Any, a: Tensor | None) -> Metric:
            return Constant()

    assert_two_equal_one(rank, {"curvature": Own(), "feedback": "linear", "bellman": "consistent"})


def copies_of_parts(rank: int) -> None:
    """A mesh of two dimensions: parameters are copied along one and cut along the other."""
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
        assert_two_equal_one(rank, PLAIN[0], mesh=mesh)


def some_parameters_are_whole(rank: int) -> None:
    """They count once."""
    model, twin = network(), network()
    fully_shard(model[4])
    opt, its = (OCNOpt(m.parameters(), 0.05, curvature="identity") for m in (model, twin))
    for x, y in batches(3, size=8):
        for m, o in ((model, opt), (twin, its)):
            step(m, o, x, y)  # the same batch: nobody averages the gradients of the others
    assert_close(whole(model.parameters()), twin.parameters())


def state_is_cut_like_its_parameter(rank: int) -> None:
    model = sharded()
    opt = OCNOpt(model.parameters())
    step(model, opt, *batches(1)[0])
    for p in model.parameters():
        for key in ("momentum", "second_moment"):
            assert isinstance(opt.state[p][key], DTensor)
            assert opt.state[p][key].placements == p.placements
    assert [part_of(p).shape[0] for p in (model[0].bias, model[4].bias)] == ([1, 2] if rank == 0 else [0, 1])
    held = sum(part_of(p).numel() * part_of(p).element_size() for p in model.parameters())
    assert opt.memory_usage()["momentum"] == held


def what_is_not_finite_in_one_part(rank: int) -> None:
    model = sharded()
    opt = OCNOpt(model.parameters())
    x, y = batches(1)[0]
    step(model, opt, x, y)
    before, state = [t.clone() for t in whole(model.parameters())], [t.clone() for t in whole(moments(opt))]
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    if rank == 1:
        part_of(model[4].bias.grad).fill_(torch.nan)
    opt.step()
    assert_close(whole(model.parameters()), before, 0, 0)
    assert_close(whole(moments(opt)), state, 0, 0)
    with pytest.warns(UserWarning, match=r"gradient of 'parameter 7'" if rank else "another process"):
        assert opt.diagnostics.skipped_steps == 1


def a_scaler(rank: int) -> None:
    model, twin = sharded(), network()
    opt, its = OCNOpt(model.parameters()), OCNOpt(twin.parameters())
    x, y = batches(1)[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    step(twin, its, x, y)
    assert_close(whole(model.parameters()), twin.parameters())


def checkpoints(rank: int) -> None:
    """Two steps, saved, loaded into fresh parts, two more steps: as four steps in one go."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    folder, data = Path(str(box[0])), batches(4, size=8)
    model, twin = sharded(), network()
    opt, its = OCNOpt(model.parameters()), OCNOpt(twin.parameters())
    for x, y in data[:2]:
        step(model, opt, *mine(rank, x, y))
    saved = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(saved, checkpoint_id=folder)
    fresh = sharded()
    new = OCNOpt(fresh.parameters())
    loaded = {"model": fresh.state_dict(), "opt": get_optimizer_state_dict(fresh, new)}
    dcp.load(loaded, checkpoint_id=folder)
    fresh.load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh, new, loaded["opt"])
    for x, y in data[2:]:
        step(fresh, new, *mine(rank, x, y))
        step(model, opt, *mine(rank, x, y))
    for x, y in data:
        step(twin, its, x, y)
    assert_close(whole(fresh.parameters()), whole(model.parameters()), 0, 0)
    assert_close(whole(moments(new)), whole(moments(opt)), 0, 0)
    assert_close(whole(fresh.parameters()), twin.parameters())


def what_needs_whole_layers_is_refused(rank: int) -> None:
    for options in ({"curvature": "kronecker"}, {"rank": 2}, {"feedback": "nonlinear"}, {"game": "noncooperative"}):
        model = sharded()
        (argument,) = options
        with pytest.raises(RuntimeError, match=f"{argument}=.* needs whole layers, and fully_shard leaves"):
            OCNOpt(model.parameters(), model=model, **options)
    model = sharded()
    opt = OCNOpt(model.parameters(), model=model)
    cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    opt.param_groups[0]["feedback"] = "nonlinear"
    before = [t.clone() for t in whole(model.parameters())]
    with pytest.raises(RuntimeError, match="needs whole layers"):
        opt.step()
    assert_close(whole(model.parameters()), before, 0, 0)


def other_ways_to_cut_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("one", "other"))
    for placements, named in (((Shard(0), Shard(1)), "placed as"), ((Replicate(), Shard(0)), None)):
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
        p.grad = distribute_tensor(torch.ones(4, 4), mesh, placements)
        opt = OCNOpt([p])
        if named is None:
            opt.step()
        else:
            with pytest.raises(RuntimeError, match=r"shape \(4, 4\) is placed as"):
                opt.step()
    line = init_device_mesh("cpu", (SIZE,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4), m, [Shard(0)] * m.ndim)) for m in (line, mesh["other"])]
    with pytest.raises(RuntimeError, match="different meshes"):
        OCNOpt(params).step()


CHECKS = [
    two_equal_one,
    two_equal_one_with_the_model_shown,
    two_equal_one_with_everything_else,
    a_curvature_of_ones_own,
    an_evaluation_by_another_way,
    copies_of_parts,
    some_parameters_are_whole,
    state_is_cut_like_its_parameter,
    what_is_not_finite_in_one_part,
    a_scaler,
    checkpoints,
    what_needs_whole_layers_is_refused,
    other_ways_to_cut_are_refused,
]
