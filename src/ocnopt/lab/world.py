"""One process or many: what ``torchrun`` changes, in one place."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ocnopt
from ocnopt.lab.schema import ConfigError

T = TypeVar("T")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among those that train one network together."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network as it is to be called: its gradients are averaged over the processes."""
        return network if self.size == 1 else DistributedDataParallel(network)

    def sum(self, numbers: Tensor) -> Tensor:
        """Added up over the processes."""
        if self.size > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers)
        return numbers

    def agree(self, value: T) -> T:
        """What the main process has, on every process."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        agreed: T = box[0]
        return agreed

    def agree_on(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the main process."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, src=0)


def is_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN)


def refuse_torchrun(command: str) -> None:
    """For commands that start processes of their own."""
    if is_torchrun():
        raise ConfigError(f"{command} is started without torchrun: it trains several networks at a time, see --workers")


def find_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one. Under ``torchrun`` each process gets the GPU of its number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name} was asked for, but torch sees no CUDA device")
        if name == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if is_torchrun() else 0)
        if device.index >= (count := torch.cuda.device_count()):
            raise ConfigError(f"device {device} was asked for, but the last one that torch sees is cuda:{count - 1}")
    return device


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Meet the other processes that ``torchrun`` has started; alone, there is nobody to meet."""
    if not is_torchrun():
        yield World()
        return
    if dist.is_initialized():  # somebody outside has met them already
        yield World(dist.get_rank(), dist.get_world_size())
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Imported later, as DistributedDataParallel does, its functions have the group for a default, and gloo's threads
    # outlive destroy_process_group: one that lets go of a tensor while Python ends aborts the process.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def describe_environment(device: torch.device, world: World) -> dict[str, Any]:
    """What a run depends on besides its configuration."""
    return {
        "command": _command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ocnopt": ocnopt.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "byteorder": sys.byteorder,
    }


def _command() -> list[str]:
    """The command line, the program without its folder. A worker process has that of the one that started it."""
    program, arguments = Path(sys.argv[0]), sys.argv[1:]
    if program.name != "__main__.py":
        return [program.name, *arguments]
    package = [program.parent.name]
    for folder in program.parent.parents:
        if not (folder / "__init__.py").exists():
            break
        package.insert(0, folder.name)
    return ["python", "-m", ".".join(package), *arguments]
