"""A run that is killed for real goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tests.lab.small import create, small_run, without_seconds

from ocnopt.lab.runs import RunFolder
from ocnopt.lab.training import train

KRONECKER = {"name": "ocnopt", "curvature": "kronecker", "refresh_every": 5}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ocnopt.lab", "train", *arguments, "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # two threads, unless told otherwise
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_steps(process: subprocess.Popen[str], folder: RunFolder, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(folder.metrics("step")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_9_and_resume(tmp_path: Path) -> None:
    config = small_run(KRONECKER, epochs=60, checkpoint_every=4)
    killed, whole = create(tmp_path / "killed", config), create(tmp_path / "whole", config)

    process = start("--resume", str(killed.path), "--threads", "1")
    wait_for_steps(process, killed, 30)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert killed.final() is None, "the run was over before it could be killed"
    # What a crash of the machine may leave on top of that: half a line.
    with killed.metrics_path.open("ab") as file:
        file.write(b'{"kind":"step","st')

    process = start("--resume", str(killed.path))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(whole)
    finally:
        torch.set_num_threads(before)
    assert without_seconds(killed.metrics()) == without_seconds(whole.metrics())
    (resumed,) = killed.environment()["resumed"]
    assert resumed["threads"] == killed.environment()["threads"] == 1
