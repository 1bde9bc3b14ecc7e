"""Peak memory of a contender: network, batch, optimizer and a few steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from ocnopt.lab.bench.contenders import CONTENDERS, Contender, find
from ocnopt.lab.bench.memory import Peak, apart, give_back
from ocnopt.lab.bench.networks import Network
from ocnopt.lab.bench.training import Setup, silent


def peak_memory(contender: Contender, setup: Setup, graphed: bool = False) -> int | None:
    """Bytes. On a GPU torch counts them itself; a CPU contender gets a fresh process."""
    if setup.device.type == "cuda":
        return _here(contender, setup, graphed)
    return apart(_in_this_process, contender.name, setup.network, setup.batch, torch.get_num_threads())


def _in_this_process(name: str, network: Network, batch: int, threads: int) -> int | None:
    torch.set_num_threads(threads)
    return _here(find(name)[0], Setup(network, batch, torch.device("cpu")), graphed=False)


def _here(contender: Contender, setup: Setup, graphed: bool) -> int | None:
    with silent():
        # libraries load code and set up tables when they are first used; that is nobody's memory
        for first in (CONTENDERS["sgd"], contender):
            _steps(first, replace(setup, batch=2), graphed)
        give_back()
        peak = Peak(setup.device)
        _steps(contender, setup, graphed)
        return peak.bytes()


def _steps(contender: Contender, setup: Setup, graphed: bool) -> None:
    """The first one refreshes what is refreshed now and then."""
    training = setup.build(contender, graphed)
    for _ in range(training.warm_up):
        training.step()
