"""ResNet-18 as a game: a step over the live edges against one with the accumulated state, in the same minutes.

    python benchmarks/games.py --device cpu --threads 2
    python benchmarks/games.py --device cuda --inner 5 --json games.json

Adaptive curvature, nonlinear feedback of rank 1. The contenders take turns (A B C A B C …), each with its own network;
a ratio is the median over the rounds of the ratio within each. The live state is meant to cost at most 15 % more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from _report import markdown
from _training import environment
from step_time import CLOCKS, WARM_UP, Timing, add_timing_arguments, timed

from ocnopt import OCNOpt
from ocnopt.lab import models

LIMIT = 1.15
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


def interleave(arguments: argparse.Namespace) -> dict[str, Timing]:
    """Let the contenders take turns, `rounds` times or until the budget is spent."""
    torch.manual_seed(0)
    device, clock = torch.device(arguments.device), CLOCKS[arguments.clock]
    trainings = {name: Training(options, arguments.batch, device) for name, options in CONTENDERS.items()}
    timings = {name: Timing(timed(training.step, 1, device, clock), []) for name, training in trainings.items()}
    for training in trainings.values():
        timed(training.step, WARM_UP, device)
    deadline, names = time.monotonic() + arguments.budget, list(trainings)
    for turn in range(arguments.rounds):
        if turn >= 2 and time.monotonic() > deadline:  # two rounds at least: one has no spread
            break
        shift = turn % len(names)  # nobody always follows the same neighbour's cache
        for name in names[shift:] + names[:shift]:
            timings[name].rounds.append(timed(trainings[name].step, arguments.inner, device, clock))
    return timings


def ratios(timings: dict[str, Timing]) -> dict[str, tuple[float, float, float]]:
    """Of each contender to the accumulated state: lower quartile, median, upper quartile over the rounds."""
    base = timings[BASELINE].rounds
    found = {}
    for name, timing in timings.items():
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(timing.rounds, base, strict=True)], n=4, method="inclusive"
        )
        found[name] = low, middle, high
    return found


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
    add_timing_arguments(parser)
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
