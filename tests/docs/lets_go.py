"""Started by torchrun in every process: run a script, and fail if somebody still holds its process group afterwards."""

from __future__ import annotations

import runpy
import sys
import weakref
from typing import Any

import torch.distributed as dist

groups: list[weakref.ref[Any]] = []
init_process_group = dist.init_process_group


def init_and_watch(*args: Any, **kwargs: Any) -> None:
    init_process_group(*args, **kwargs)
    groups.append(weakref.ref(dist.group.WORLD))


if __name__ == "__main__":
    dist.init_process_group = init_and_watch
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert len(groups) == 1, "the script makes one process group"
    assert groups[0]() is None, "a process group is still held after destroy_process_group"
