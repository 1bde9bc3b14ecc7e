"""How far can the learning rate be wrong? SGD, RMSprop, Adam and OCNOpt on handwritten digits.

Trains the same small network (five layers, tanh, width 32) with every optimizer at every learning rate from
0.001 to 10, prints a table of test accuracies and saves a plot of accuracy against learning rate.

    python examples/digits.py
    python examples/digits.py --seeds 5 --epochs 20 --out digits.png
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ocnopt

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
BATCH_SIZE = 64
WIDTH = 32
DEPTH = 5
CHANCE = 0.1

Accuracies = dict[str, Tensor]
"""Test accuracy of each contender, ``[seeds, learning rates]``."""

Rates = Sequence[float]
"""Learning rates, ascending."""


class Digits(NamedTuple):
    """The 8×8 images as rows of 64 values in [0, 1], and their labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Contender(NamedTuple):
    """An optimizer and how to draw it. A baseline shares its colour with the OCNOpt of the same curvature."""

    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    colour: str
    line: str


# Colours of Okabe and Ito, which readers with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"

CONTENDERS: dict[str, Contender] = {
    "SGD": Contender(lambda net, lr: torch.optim.SGD(net.parameters(), lr=lr), BLUE, "--"),
    "RMSprop": Contender(lambda net, lr: torch.optim.RMSprop(net.parameters(), lr=lr), PURPLE, "--"),
    "Adam": Contender(lambda net, lr: torch.optim.Adam(net.parameters(), lr=lr), ORANGE, "--"),
    # The metric of SGD with all the feedback there is: one group per sample. No momentum, as SGD above.
    "OCNOpt identity": Contender(
        lambda net, lr: ocnopt.OCNOpt(
            net.parameters(),
            lr=lr,
            model=net,
            curvature="identity",
            rank="full",
            gauss_newton=0.3,
            momentum=0.0,
        ),
        BLUE,
        "-",
    ),
    # The metric of Adam; everything else is a default.
    "OCNOpt adaptive": Contender(lambda net, lr: ocnopt.OCNOpt(net.parameters(), lr=lr), ORANGE, "-"),
    "OCNOpt kronecker": Contender(
        lambda net, lr: ocnopt.OCNOpt(net.parameters(), lr=lr, model=net, curvature="kronecker"),
        GREEN,
        "-",
    ),
}


@cache
def load() -> Digits:
    """Read the data that comes with scikit-learn and keep a fifth of it for testing."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images / 16.0, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(
        torch.tensor(train_x, dtype=torch.float32),
        torch.tensor(train_y),
        torch.tensor(test_x, dtype=torch.float32),
        torch.tensor(test_y),
    )


def make_network() -> nn.Sequential:
    sizes = [64] + [WIDTH] * (DEPTH - 1) + [10]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(name: str, lr: float, epochs: int, seed: int) -> float:
    """Train one network and return its test accuracy. The seed fixes the initial weights and the batches."""
    data = load()
    torch.manual_seed(seed)
    net = make_network()
    optimizer = CONTENDERS[name].make(net, lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train_x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = cross_entropy(net(data.train_x[rows]), data.train_y[rows])
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        predicted = net(data.test_x).argmax(dim=1)
    return float((predicted == data.test_y).double().mean())


def compare(rates: Rates, epochs: int, seeds: int) -> Accuracies:
    """Train every contender at every learning rate, with a line of progress for each contender."""
    accuracies: Accuracies = {}
    runs = list(product(range(seeds), rates))
    # The network is too small to gain from threads, so each process gets one and trains networks of its own.
    with ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, 8),
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        pending = {name: [pool.submit(train, name, lr, epochs, seed) for seed, lr in runs] for name in CONTENDERS}
        for name, futures in pending.items():
            results = torch.tensor([future.result() for future in futures], dtype=torch.float64)
            accuracies[name] = results.view(seeds, len(rates))
            print(f"{name}: {len(runs)} networks trained", flush=True)
    return accuracies


def table(rates: Rates, accuracies: Accuracies) -> str:
    """Mean test accuracy in percent, one row a contender; ``*`` marks the best learning rate of the row."""
    heading = "learning rate"
    lines = [f"{heading:<18}" + "".join(f"{lr:>8g} " for lr in rates)]
    for name, values in accuracies.items():
        percent = 100 * values.mean(dim=0)
        best = int(percent.argmax())
        cells = (f"{value:8.1f}" + ("*" if i == best else " ") for i, value in enumerate(percent.tolist()))
        lines.append(f"{name:<18}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def spread(heights: list[float], gap: float, top: float) -> list[float]:
    """Move label heights apart until neighbours are ``gap`` from each other and none is above ``top``."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    ceiling = top
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def plot(rates: Rates, accuracies: Accuracies, path: Path, subtitle: str) -> None:
    """Draw mean accuracy against learning rate, with a band from the worst to the best seed."""
    figure, axes = plt.subplots(figsize=(9.0, 5.2), layout="constrained")
    for name, values in accuracies.items():
        _, colour, line = CONTENDERS[name]
        percent = 100 * values
        lowest, highest = percent.amin(dim=0).tolist(), percent.amax(dim=0).tolist()
        axes.plot(rates, percent.mean(dim=0).tolist(), line, color=colour, marker="o", ms=4, lw=2)
        axes.fill_between(rates, lowest, highest, color=colour, alpha=0.12, lw=0)
    label_lines(axes, rates[-1], accuracies)
    axes.plot(rates, [100 * CHANCE] * len(rates), ":", color="0.6", lw=1, zorder=0)
    axes.text(rates[0], 100 * CHANCE + 1, "chance", color="0.4", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] * 0.8, rates[-1] * 12)
    ticks = [lr for lr in rates if math.log10(lr).is_integer()] or rates
    axes.set_xticks(ticks, [f"{lr:g}" for lr in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    axes.set_xlabel("learning rate", loc="left")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"Digits: test accuracy, mean and range over seeds\n{subtitle}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def label_lines(axes: Axes, right: float, accuracies: Accuracies) -> None:
    """Name each line at its right end, so that no legend has to be matched by colour."""
    ends = [100 * values.mean(dim=0)[-1].item() for values in accuracies.values()]
    for name, end, height in zip(accuracies, ends, spread(ends, gap=5.0, top=99.0), strict=True):
        colour = CONTENDERS[name].colour
        axes.plot([right, right * 1.3], [end, height], color=colour, lw=0.8, clip_on=False)
        axes.text(right * 1.4, height, name, color=colour, va="center", fontsize=10)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare optimizers on handwritten digits over a range of learning rates."
    )
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="where to save the plot")
    parser.add_argument("--seeds", type=int, default=2, help="runs for each optimizer and learning rate")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help="learning rates to try")
    arguments = parser.parse_args()
    arguments.rates = sorted(set(arguments.rates))
    if arguments.rates[0] <= 0:
        parser.error(f"--rates must be positive, not {arguments.rates[0]:g}")
    for name in ("seeds", "epochs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    mpl.use("Agg")  # draws to a file; needs no display
    start = time.perf_counter()
    accuracies = compare(arguments.rates, arguments.epochs, arguments.seeds)
    subtitle = (
        f"{DEPTH}-layer tanh network of width {WIDTH}, batch {BATCH_SIZE}, "
        f"epochs: {arguments.epochs}, seeds: {arguments.seeds}"
    )
    plot(arguments.rates, accuracies, arguments.out, subtitle)
    print(f"\nMean test accuracy in percent; * best of the row\n{subtitle}\n\n{table(arguments.rates, accuracies)}\n")
    print(f"{time.perf_counter() - start:.0f} s in all. Plot: {arguments.out.resolve()}")


if __name__ == "__main__":
    main()
