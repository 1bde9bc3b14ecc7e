"""The time of one training step, as a ratio to SGD or Adam measured in the same minutes.

    python benchmarks/step_time.py --device cpu --threads 2
    python benchmarks/step_time.py --device cuda --inner 20 --json step_time.json
    python benchmarks/step_time.py --profile "identity, nonlinear r=8"

The paper's CNN on MNIST shapes. The contenders take turns (A B C A B C …), each with its own network, so that
a machine that slows down slows all of them; a ratio is the median over the rounds of the ratio within each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _networks import cnn
from _report import markdown
from _training import build_optimizer, environment
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


class Contender(NamedTuple):
    optimizer: str
    options: dict[str, Any]
    baseline: str


def contenders() -> dict[str, Contender]:
    """Each against the optimizer that it would replace; SGD also against itself, which shows the noise."""
    known = {
        "sgd": Contender("sgd", {"momentum": 0.9}, "sgd"),
        "sgd again": Contender("sgd", {"momentum": 0.9}, "sgd"),
        "adam": Contender("adam", {}, "adam"),
    }
    for curvature, baseline in (("identity", "sgd"), ("adaptive", "adam"), ("kronecker", "adam")):
        for feedback, rank in (("off", 1), ("linear", 1), ("nonlinear", 1), ("nonlinear", 8)):
            options = {"curvature": curvature, "feedback": feedback, "rank": rank}
            known[f"{curvature}, {feedback} r={rank}"] = Contender("ocnopt", options, baseline)
    return known


class Training:
    """A network with its optimizer, ready to take steps."""

    def __init__(self, contender: Contender, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = cnn(1, 28).to(device)
        # A learning rate too small to do anything: the time must not depend on where training would lead.
        self.optimizer = build_optimizer(contender.optimizer, self.model, 1e-5, contender.options)
        self.x = torch.randn(batch, 1, 28, 28, device=device)
        self.y = torch.randint(10, (batch,), device=device)

    def gradient(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()

    def step(self) -> None:
        self.gradient()
        self.optimizer.step()


def timed(
    work: Callable[[], None], times: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds for one of `times` calls, with all work of the device inside."""
    _wait(device)
    start = clock()
    for _ in range(times):
        work()
    _wait(device)
    return 1e3 * (clock() - start) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timing(NamedTuple):
    """Milliseconds a step: the first one, which sets up state and factors, and then one number a round."""

    first: float
    rounds: list[float]


def interleave(names: list[str], arguments: argparse.Namespace) -> dict[str, Timing]:
    """Let the contenders take turns, `rounds` times or until the budget is spent."""
    known, device, clock = contenders(), torch.device(arguments.device), CLOCKS[arguments.clock]
    trainings = {name: Training(known[name], arguments.batch, device) for name in names}
    timings = {name: Timing(timed(t.step, 1, device, clock), []) for name, t in trainings.items()}
    for training in trainings.values():
        timed(training.step, WARM_UP, device)
    deadline = time.monotonic() + arguments.budget
    for turn in range(arguments.rounds):
        if turn >= 2 and time.monotonic() > deadline:  # two rounds at least: one has no spread
            break
        shift = turn % len(names)  # nobody always follows the same neighbour's cache
        for name in names[shift:] + names[:shift]:
            timings[name].rounds.append(timed(trainings[name].step, arguments.inner, device, clock))
    return timings


def summary(timings: dict[str, Timing]) -> list[dict[str, Any]]:
    """One row a contender: median and mean time, and the ratio to its baseline with its quartiles."""
    rows = []
    for name, timing in timings.items():
        baseline = contenders()[name].baseline
        ratios = [a / b for a, b in zip(timing.rounds, timings[baseline].rounds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows.append(
            {
                "name": name,
                "median_ms": statistics.median(timing.rounds),
                "mean_ms": statistics.fmean(timing.rounds),
                "first_ms": timing.first,
                "baseline": baseline,
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    texts = [
        [
            r["name"],
            f"{r['median_ms']:.2f}",
            f"{r['mean_ms']:.2f}",
            f"{r['first_ms']:.1f}",
            r["baseline"],
            f"{r['ratio']:.2f} ({r['ratio_low']:.2f} – {r['ratio_high']:.2f})",
        ]
        for r in rows
    ]
    header = ["optimizer", "median ms", "mean ms", "first step ms", "against", "ratio (quartiles)"]
    return markdown(header, texts)


def profile_step(name: str, batch: int, device: torch.device, steps: int = 10, top: int = 25) -> str:
    """The operators that cost most inside `optimizer.step()` alone."""
    training = Training(contenders()[name], batch, device)
    timed(training.step, WARM_UP, device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for _ in range(steps):
        training.gradient()
        _wait(device)
        with profile(activities=activities) as recorded:
            training.optimizer.step()
            _wait(device)
        for event in recorded.key_averages():
            for slot, amount in enumerate((event.self_cpu_time_total, event.self_device_time_total, event.count)):
                totals[event.key][slot] += amount / steps
    costliest = sorted(totals.items(), key=lambda item: -max(item[1][:2]))[:top]
    rows = [[key, f"{cpu / 1e3:.3f}", f"{gpu / 1e3:.3f}", f"{count:g}"] for key, (cpu, gpu, count) in costliest]
    return markdown(["operator", "self CPU ms", "self GPU ms", "calls a step"], rows)


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every benchmark that times steps."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=1, help="steps timed together in each turn")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="process: CPU time, for a machine that is busy"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start no round after this time"
    )
    parser.add_argument("--json", type=Path, help="write every number to this file")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", action="append", choices=list(contenders()), help="may be repeated; default all")
    add_timing_arguments(parser)
    parser.add_argument("--profile", choices=list(contenders()), metavar="NAME", help="instead: what costs in its step")
    arguments = parser.parse_args(argv)
    if arguments.clock == "process" and arguments.device != "cpu":
        parser.error("--clock process measures the CPU alone: use it with --device cpu")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    if arguments.profile:
        print(profile_step(arguments.profile, arguments.batch, device))
        return 0
    asked = arguments.optimizer or list(contenders())
    # A ratio needs its baseline in the same rounds.
    names = list(dict.fromkeys([*(contenders()[name].baseline for name in asked), *asked]))
    timings = interleave(names, arguments)
    rows, place = summary(timings), environment(device)
    turns = f"{len(timings[names[0]].rounds)} rounds of {arguments.inner}, {arguments.clock} time"
    print(f"batch {arguments.batch}, {turns}, {place}\n\n{table(rows)}")
    if arguments.json:
        raw = {name: timing._asdict() for name, timing in timings.items()}
        arguments.json.write_text(json.dumps({"environment": place, "summary": rows, "timings": raw}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
