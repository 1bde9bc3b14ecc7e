"""A network with its optimizer, ready to take steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ocnopt import GraphedStep, graphed_step
from ocnopt.lab.bench.contenders import CONTENDERS, Contender, set_interval
from ocnopt.lab.bench.networks import Network, loss_of

#: eager steps before any is timed, and steps after which a graph is there: of a whole step; of the optimizer's
WARM_UP, WARM_UP_GRAPHED, WARM_UP_CUDA = 3, 6, 14
_NEVER = 10**9


@dataclass(frozen=True)
class Setup:
    """What a contender is given, and where."""

    network: Network
    batch: int
    device: torch.device

    def build(self, contender: Contender, graphed: bool = False) -> Training:
        return Training(self, contender, graphed)

    def gradient(self) -> Callable[[], None]:
        """Forward and backward of a network that no optimizer watches."""
        return self.build(CONTENDERS["sgd"]).gradient


class Training:
    """``reason``: why its steps are not made by a graph, where they were meant to be."""

    def __init__(self, setup: Setup, contender: Contender, graphed: bool = False) -> None:
        self.contender, self.device = contender, setup.device
        self.model = setup.network.build().to(setup.device)
        x, y = setup.network.sample(setup.batch)
        self.batch = x.to(setup.device), y.to(setup.device)
        # a step that is captured has options of its own, which a CPU does not know
        self.optimizer = contender.make(self.model, graphed and setup.device.type == "cuda")
        self.graph: GraphedStep | None = None
        self.reason: str | None = None
        if graphed and contender.why_eager is None:
            assert isinstance(self.optimizer, Optimizer)
            with silent():
                self.graph = graphed_step(self.model, loss_of, self.optimizer, self.batch)
        elif graphed:
            self.reason = contender.why_eager

    @property
    def warm_up(self) -> int:
        if self.graph is not None:
            return WARM_UP_GRAPHED
        return WARM_UP_CUDA if self.device.type == "cuda" else WARM_UP

    def loss(self) -> Tensor:
        x, y = self.batch
        return loss_of(self.model(x), y)

    def gradient(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        if self.graph is not None:
            self.graph(*self.batch)
            self.reason = self.graph.reason
            return
        self.gradient()
        self.optimizer.step()

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def pause_refreshes(self) -> None:
        """Ordinary steps only from here on, where that can be had: a graph is captured anew when an option changes."""
        if self.contender.interval is not None and self.graph is None:
            set_interval(self.optimizer, self.contender.interval, _NEVER)

    def refresh(self) -> None:
        """One step, in which everything that is refreshed now and then is; then pause."""
        assert self.contender.interval is not None
        set_interval(self.optimizer, self.contender.interval, 1)
        self.step()
        self.pause_refreshes()


@contextmanager
def silent() -> Iterator[None]:
    """Why there is no graph is in the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
