"""The time of a training step in one CUDA graph (`ocnopt.graphed_step`), beside the same step made eagerly.

    python benchmarks/graphed.py --network cnn --json graphed.json
    python benchmarks/graphed.py --network resnet18 --rounds 10 --optimizer "sgd, graphed"
    python benchmarks/graphed.py --kernels "identity, nonlinear r=1, graphed"

The paper's CNN on MNIST shapes, and ResNet18 with 100 classes on 32×32 pixels. The contenders take turns
(A B C A B C …), each with its own network. Times are those of whole steps: gradient and update. The mean is over all
of them, so that it has its share of the eigendecompositions of Kronecker curvature.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _networks import cnn
from _report import markdown
from _training import build_optimizer, environment
from step_time import timed
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ocnopt

WARM_UP = 6  # a graph is captured by then


class Contender(NamedTuple):
    optimizer: str
    options: dict[str, Any]
    graphed: bool


def contenders() -> dict[str, Contender]:
    known = {
        "sgd, eager": Contender("sgd", {"momentum": 0.9}, False),
        "sgd, graphed": Contender("sgd", {"momentum": 0.9, "fused": True}, True),
        "adam, eager": Contender("adam", {"fused": True}, False),
        "adam, graphed": Contender("adam", {"fused": True, "capturable": True}, True),
    }
    games = [("identity", "linear", 1), ("identity", "nonlinear", 1), ("identity", "nonlinear", 8)]
    games += [("adaptive", "linear", 1), ("kronecker", "off", 1), ("kronecker", "nonlinear", 1)]
    for curvature, feedback, rank in games:
        options = {"curvature": curvature, "feedback": feedback, "rank": rank, "refresh_every": 100}
        for graphed, how in ((False, "eager"), (True, "graphed")):
            known[f"{curvature}, {feedback} r={rank}, {how}"] = Contender("ocnopt", options, graphed)
    return known


def network(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """With the shape of a sample and the number of classes."""
    if name == "cnn":
        return cnn(1, 28), (1, 28, 28), 10
    from ocnopt.lab.models import resnet18

    return resnet18((3, 32, 32), 100), (3, 32, 32), 100


class Training:
    """A network with its optimizer, after some steps; and how much memory they needed at most."""

    def __init__(self, contender: Contender, arguments: argparse.Namespace) -> None:
        device = torch.device(arguments.device)
        before = _memory(device, reset=True)
        torch.manual_seed(0)
        model, shape, classes = network(arguments.network)
        model = model.to(device)
        # A learning rate too small to do anything: the time must not depend on where training would lead.
        optimizer = build_optimizer(contender.optimizer, model, 1e-5, contender.options)
        x = torch.randn(arguments.batch, *shape, device=device)
        y = torch.randint(classes, (arguments.batch,), device=device)
        self.graph: ocnopt.GraphedStep | None = None
        if contender.graphed:
            self.graph = ocnopt.graphed_step(model, F.cross_entropy, optimizer, (x, y))
        self.model, self.optimizer, self.batch = model, optimizer, (x, y)
        timed(self.step, WARM_UP, device)
        self.peak = _memory(device) - before

    def step(self) -> None:
        x, y = self.batch
        if self.graph is not None:
            self.graph(x, y)
            return
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


def _memory(device: torch.device, reset: bool = False) -> int:
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def measure(names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device, known = torch.device(arguments.device), contenders()
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)  # the libraries' own memory is nobody's
    trainings = {name: Training(known[name], arguments) for name in names}
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        shift = turn % len(names)  # nobody always follows the same neighbour
        for name in names[shift:] + names[:shift]:
            rounds[name].append(timed(trainings[name].step, arguments.inner, device))
    return [
        {
            "name": name,
            "median_ms": statistics.median(rounds[name]),
            "mean_ms": statistics.fmean(rounds[name]),
            "peak_mib": trainings[name].peak / 2**20,
            "captures": 0 if (graph := trainings[name].graph) is None else graph.captures,
            "reason": None if graph is None else graph.reason,
            "rounds_ms": rounds[name],
        }
        for name in names
    ]


def kernels(name: str, arguments: argparse.Namespace, steps: int = 3, top: int = 15) -> str:
    """What runs on the device in one step."""
    training = Training(contenders()[name], arguments)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            training.step()
        torch.cuda.synchronize()
    found = [event for event in recorded.key_averages() if event.self_device_time_total]
    found.sort(key=lambda event: -event.self_device_time_total)
    total, count = (
        sum(column) / steps for column in zip(*((e.self_device_time_total, e.count) for e in found), strict=True)
    )
    rows = [[e.key[:100], f"{e.self_device_time_total / 1e3 / steps:.3f}", f"{e.count / steps:g}"] for e in found[:top]]
    return f"{name}: {total / 1e3:.2f} ms in {count:g} kernels\n\n{markdown(['kernel', 'ms', 'times'], rows)}"


def table(rows: list[dict[str, Any]]) -> str:
    median = {row["name"]: row["median_ms"] for row in rows}
    base = [name for name in ("sgd, eager", "sgd, graphed") if name in median]
    texts = []
    for row in rows:
        ratios = [f"{row['median_ms'] / median[name]:.2f}" for name in base]
        times = [f"{row['median_ms']:.2f}", f"{row['mean_ms']:.2f}"]
        texts.append([row["name"], *times, *ratios, f"{row['peak_mib']:.0f}", row["reason"] or ""])
    header = ["step", "median ms", "mean ms", *(f"to {name}" for name in base), "peak MiB", "not captured because"]
    return markdown(header, texts)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", action="append", choices=list(contenders()), help="may be repeated; default all")
    parser.add_argument("--network", choices=["cnn", "resnet18"], default="cnn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=20, help="steps timed together in each turn")
    parser.add_argument("--precision", choices=["highest", "high"], default="high", help="of float32 matrix products")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--kernels", choices=list(contenders()), metavar="NAME", help="instead: what runs in its step")
    arguments = parser.parse_args(argv)
    if arguments.kernels and torch.device(arguments.device).type != "cuda":
        parser.error("--kernels is about those of a CUDA device")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(arguments.precision)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why there is no graph is in the table
            if arguments.kernels:
                print(kernels(arguments.kernels, arguments))
                return 0
            rows = measure(arguments.optimizer or list(contenders()), arguments)
    finally:
        torch.set_float32_matmul_precision(before)
    place = environment(torch.device(arguments.device))
    what = f"{arguments.network}, batch {arguments.batch}, {arguments.rounds} rounds of {arguments.inner}"
    print(f"{what}, {place}\n\n{table(rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": place, "what": what, "steps": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
