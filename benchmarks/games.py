"""ResNet-18 as a game: a step over the live edges against one with the accumulated state, in the same minutes.

    python benchmarks/games.py --device cpu --threads 2
    python benchmarks/games.py --device cuda --inner 5 --json games.json

Adaptive curvature, nonlinear feedback of rank 1. The contenders take turns (A B C A B C …), each with its own network;
a ratio is the median over the rounds of the ratio within each. The live state is meant to cost at most 15 % more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _report import markdown
from _training import environment

from ocnopt import OCNOpt
from ocnopt.lab import models
from ocnopt.lab.bench.timing import CLOCKS, Spread, Turns, ratio, timed

LIMIT = 1.15
WARM_UP = 3
BASELINE = "accumulated"
#: the second one of the same kind shows the noise
CONTENDERS: dict[str, dict[str, Any]] = {
    BASELINE: {"state": "accumulated"},
    "accumulated again": {"state": "accumulated"},
    "live": {"state": "live"},
    "live, random alignment": {"state": "live", "alignment": "random"},
    "linear feedback": {"feedback": "linear"},
}


class Training:
    """A ResNet-18 on CIFAR shapes with its optimizer, ready to take steps."""

    def __init__(self, options: dict[str, Any], batch: int, device: torch.device) -> None:
        self.model = models.build("resnet18", (3, 32, 32), 10).to(device)
        # A learning rate too small to do anything: the time must not depend on where training would lead.
        options = {"feedback": "nonlinear", **options}
        self.optimizer = OCNOpt(self.model.parameters(), 1e-5, model=self.model, **options)
        self.x = torch.randn(batch, 3, 32, 32, device=device)
        self.y = torch.randint(10, (batch,), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()


class Timing(NamedTuple):
    """Milliseconds a step: the first one, which sets up state, and then one number a round."""

    first: float
    rounds: list[float]


def interleave(arguments: argparse.Namespace) -> dict[str, Timing]:
    """Let the contenders take turns, `rounds` times or until the budget is spent."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    turns = Turns(arguments.rounds, arguments.inner, arguments.clock, arguments.budget)
    works = {name: Training(options, arguments.batch, device).step for name, options in CONTENDERS.items()}
    firsts = {name: timed(work, 1, device, CLOCKS[arguments.clock]) for name, work in works.items()}
    for work in works.values():
        timed(work, WARM_UP, device)
    return {name: Timing(firsts[name], rounds) for name, rounds in turns.take(works, device).items()}


def ratios(timings: dict[str, Timing]) -> dict[str, Spread]:
    """Of each contender to the accumulated state, over the rounds."""
    return {name: ratio(timing.rounds, timings[BASELINE].rounds) for name, timing in timings.items()}


def table(timings: dict[str, Timing]) -> str:
    rows = [
        [
            name,
            f"{statistics.median(timings[name].rounds):.1f}",
            f"{timings[name].first:.0f}",
            f"{middle:.3f} ({low:.3f} – {high:.3f})",
        ]
        for name, (low, middle, high) in ratios(timings).items()
    ]
    return markdown(["ResNet-18", "median ms", "first step ms", f"to {BASELINE} (quartiles)"], rows)


def verdict(timings: dict[str, Timing]) -> str:
    ratio = ratios(timings)["live"][1]
    return f"live / accumulated = {ratio:.3f}: the limit of {LIMIT} is {'kept' if ratio <= LIMIT else 'exceeded'}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=1, help="steps timed together in each turn")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="process: CPU time, on a busy machine")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no round after this")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    arguments = parser.parse_args(argv)
    if arguments.clock == "process" and arguments.device != "cpu":
        parser.error("--clock process measures the CPU alone: use it with --device cpu")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    timings, place = interleave(arguments), environment(torch.device(arguments.device))
    turns = f"{len(timings[BASELINE].rounds)} rounds of {arguments.inner}, {arguments.clock} time"
    print(f"batch {arguments.batch}, {turns}, {place}\n\n{table(timings)}\n\n{verdict(timings)}")
    if arguments.json:
        raw = {name: timing._asdict() for name, timing in timings.items()}
        arguments.json.write_text(
            json.dumps({"environment": place, "ratios": ratios(timings), "timings": raw}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
