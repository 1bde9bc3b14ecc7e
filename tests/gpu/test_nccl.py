"""The backend of GPUs, in one process: what is sent, and what is not waited for."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ocnopt import OCNOpt
from ocnopt.distributed import World

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True, params=["nccl", "cpu:gloo,cuda:nccl"])
def process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    torch.cuda.set_device(0)
    dist.init_process_group(request.param, init_method=address, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


class Talkative(World):
    """Sends messages although there is nobody else: one GPU is all there is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.size = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double().cuda()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 5).double().cuda(), torch.randint(3, (16,)).cuda()


def trained(model: nn.Module, opt: OCNOpt) -> list[Tensor]:
    for _ in range(4):
        opt.zero_grad()
        cross_entropy(model(batch()[0]), batch()[1]).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_messages() -> None:
    world = Talkative(dist.group.WORLD)
    tensors = [torch.arange(3.0), torch.ones(2, 2).double(), torch.tensor(2.0), torch.ones(2).cuda(), torch.ones(0)]
    before = [t.clone() for t in tensors]
    world.sum_(tensors)  # over one process: what it was, by way of the GPU where the backend knows no other
    torch.testing.assert_close(tensors, before)
    for flag in (torch.tensor(True), torch.tensor(False).cuda()):
        assert torch.equal(world.minimum(flag), flag)
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = torch.ones(3, device="cuda")
        world.sum_([numbers])
        world.minimum(numbers > 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_of_integers() -> None:
    world = World(dist.group.WORLD)
    world.size = 1
    assert world.gather_ints([3, 1]) == [[3, 1]]
    mine = torch.tensor([2**40, -1], device=world._within_reach(torch.device("cpu")))
    theirs = [torch.empty_like(mine)]
    dist.all_gather(theirs, mine)
    assert theirs[0].tolist() == [2**40, -1]


@pytest.mark.parametrize("bellman", ["consistent", "paper"])
def test_a_wrapped_network_learns_what_a_bare_one_does(bellman: str) -> None:
    found = []
    for wrap in (DistributedDataParallel, nn.Sequential):
        net = network()
        model = wrap(net)
        opt = OCNOpt(net.parameters(), 0.05, model=model, curvature="kronecker", bellman=bellman, refresh_every=2)
        found.append(trained(model, opt))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_parts_of_parameters() -> None:
    found = []
    for cut in (True, False):
        model = fully_shard(network()) if cut else network()
        found.append([t.full_tensor() if cut else t for t in trained(model, OCNOpt(model.parameters(), model=model))])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # there is one process
def test_the_older_wrapper_is_refused(shown: bool) -> None:
    model = FullyShardedDataParallel(network(), use_orig_params=shown)
    with pytest.raises(RuntimeError, match=r"use torch\.distributed\.fsdp\.fully_shard"):
        OCNOpt(model.parameters(), model=model if shown else None).step()
