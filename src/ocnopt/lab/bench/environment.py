"""Where numbers were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ocnopt


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads and commit."""
    cuda = device.type == "cuda"
    return {
        "ocnopt": ocnopt.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "precision": torch.get_float32_matmul_precision(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """Of the repository that this package is run from; with a + where files have changed since. ``None`` elsewhere."""
    here = Path(ocnopt.__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
