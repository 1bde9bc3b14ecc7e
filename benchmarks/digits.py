"""DIGITS with a five-layer tanh network: what feedback does for stability and the choice of learning rate.

    python benchmarks/digits.py --jobs 2 --out digits.jsonl
    python benchmarks/digits.py --part stability
    python benchmarks/digits.py --report digits.jsonl

stability: batch 16, 10 epochs, learning rate 1, no momentum, where SGD diverges.
range: the widest range of learning rates within 1 % of the best test accuracy, for all three curvatures; the
optimizers of one curvature differ in the feedback alone, so what they differ by is the feedback's doing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _networks import fcn
from _report import failures, markdown
from _runs import Record, Run, add_run_arguments, execute, load, parse_names
from _training import StepClock, build_optimizer, environment, ocnopt_defaults
from sklearn.datasets import load_digits
from torch import Tensor, nn

LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
TOLERANCE = 1.0  # per cent of accuracy
PARTS = ("stability", "range")


class Row(NamedTuple):
    """One optimizer of a comparison. In OCNOpt's options the baseline K-FAC is `feedback="off"`."""

    part: str  # "stability", or "range" and the curvature
    name: str
    optimizer: str
    options: dict[str, Any]


class Digits(NamedTuple):
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@lru_cache(maxsize=1)
def digits() -> Digits:
    """Pixels in [0, 1]; four fifths for training, drawn once and for all."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order.tensor_split([len(x) * 4 // 5])
    return Digits(x[train], y[train], x[test], y[test])


def stability_rows() -> list[Row]:
    ours = {"curvature": "identity", "rank": "full", "gauss_newton": 0.3, "momentum": 0.0}
    rows = [
        Row("stability", f"OCNOpt, {kind}", "ocnopt", {**ours, "feedback": kind}) for kind in ("linear", "nonlinear")
    ]
    return [Row("stability", "SGD", "sgd", {}), *rows]


def range_rows(momentum: float) -> list[Row]:
    """For each curvature its baseline and three kinds of feedback, all with the same momentum."""
    adam = ("Adam", "adam", {"betas": (momentum, 0.99)})
    rmsprop = ("RMSprop", "rmsprop", {"alpha": 0.99})
    kfac = {"curvature": "kronecker", "feedback": "off", "momentum": momentum}
    baselines = {
        "identity": ("SGD", "sgd", {"momentum": momentum}),
        "adaptive": adam if momentum else rmsprop,
        "kronecker": ("K-FAC", "ocnopt", kfac),
    }
    # With these, OCNOpt without feedback is the baseline: torch's SGD is heavy ball, its RMSprop uncorrected.
    matching: dict[str, dict[str, Any]] = {
        "identity": {"ema": False},
        "adaptive": {"decay": 0.99, "bias_correction": momentum > 0},
        "kronecker": {},
    }
    feedbacks: dict[str, dict[str, Any]] = {
        "linear, r = 1, β = 1": {"feedback": "linear", "rank": 1},
        "linear, r = B, β = 0.3": {"feedback": "linear", "rank": "full", "gauss_newton": 0.3},
        "nonlinear, r = B, β = 0.3": {"feedback": "nonlinear", "rank": "full", "gauss_newton": 0.3},
    }
    rows = []
    for curvature, baseline in baselines.items():
        common = {"curvature": curvature, "momentum": momentum, **matching[curvature]}
        rows.append(Row(f"range {curvature}", *baseline))
        rows += [
            Row(f"range {curvature}", f"OCNOpt, {name}", "ocnopt", {**common, **kind})
            for name, kind in feedbacks.items()
        ]
    return rows


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in per cent."""
    logits = model(x)
    return F.cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).double().mean().item()


def train(run: Run) -> Record:
    data = digits()
    torch.manual_seed(run.seed)
    model = fcn([64, 32, 32, 32, 32, 10], nn.Tanh)
    optimizer = build_optimizer(run.optimizer, model, run.lr, run.options)
    order = torch.Generator().manual_seed(run.seed)
    clock = StepClock(torch.device("cpu"))
    for _ in range(run.settings["epochs"]):
        for rows in torch.randperm(len(data.train_x), generator=order).split(run.settings["batch"]):
            F.cross_entropy(model(data.train_x[rows]), data.train_y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
    return {
        "train_loss": evaluate(model, data.train_x, data.train_y)[0],
        "test_accuracy": evaluate(model, data.test_x, data.test_y)[1],
        "ms_per_step": clock.median_ms(),
        **environment(torch.device("cpu")),
    }


def options_of(row: Row) -> dict[str, Any]:
    return {**ocnopt_defaults(), **row.options} if row.optimizer == "ocnopt" else row.options


def planned(arguments: argparse.Namespace) -> list[Run]:
    settings = {"epochs": arguments.epochs, "batch": 16}
    runs = []
    for seed in map(int, arguments.seeds):
        if "stability" in arguments.part:
            runs += [Run(r.part, r.optimizer, r.name, 1.0, seed, options_of(r), settings) for r in stability_rows()]
        if "range" in arguments.part and seed < arguments.range_seeds:
            wider = {**settings, "batch": arguments.batch, "momentum": arguments.momentum}
            runs += [
                Run(row.part, row.optimizer, row.name, lr, seed, options_of(row), wider)
                for row in range_rows(arguments.momentum)
                for lr in LEARNING_RATES
            ]
    return runs


def by_row(records: list[Record], part: str) -> dict[str, list[Record]]:
    """The finished records of a part by their row, in the order of the file."""
    rows: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["task"] == part and "result" in record:
            rows[record["variant"]].append(record["result"] | {"lr": record["lr"]})
    return rows


def median(results: list[Record], key: str) -> float:
    """A diverged loss (null in the file) is infinite, so that the median stands where most runs stand."""
    return statistics.median(float("inf") if r[key] is None else r[key] for r in results)


def stability_table(records: list[Record]) -> str:
    rows = [
        [
            name,
            f"{median(results, 'train_loss'):.3f}",
            f"{median(results, 'test_accuracy'):.1f}",
            " ".join("–" if r["train_loss"] is None else f"{r['train_loss']:.3f}" for r in results),
            f"{median(results, 'ms_per_step'):.2f}",
        ]
        for name, results in by_row(records, "stability").items()
    ]
    header = [
        "optimizer",
        "median train loss",
        "median test accuracy, %",
        "train loss of each seed",
        "ms/step",
    ]
    return markdown(header, rows)


def widest(good: list[bool]) -> tuple[int, int]:
    """First and last index of the longest stretch of true values; the first such stretch, (0, -1) if none."""
    best, start = (0, -1), 0
    for index, value in enumerate(good):
        if not value:
            start = index + 1
        elif index - start > best[1] - best[0]:
            best = (start, index)
    return best


def mean_accuracies(results: list[Record]) -> dict[float, float]:
    """Mean over the seeds at every learning rate that has been run."""
    groups: dict[float, list[float]] = defaultdict(list)
    for result in results:
        groups[result["lr"]].append(result["test_accuracy"])
    return {lr: statistics.fmean(values) for lr, values in groups.items()}


def span(accuracy: dict[float, float], level: float) -> str:
    """The widest range of neighbouring learning rates that reach the level, and how many they are."""
    first, last = widest([accuracy.get(lr, 0.0) >= level for lr in LEARNING_RATES])
    return f"{LEARNING_RATES[first]:g} – {LEARNING_RATES[last]:g} ({last - first + 1})" if last >= first else "none"


def range_row(accuracy: dict[float, float], best: float) -> list[str]:
    """The accuracies, and the range near the row's own best as well as near the best of its curvature.

    The first says how much the learning rate matters to this optimizer; the second does not reward one that is
    equally bad everywhere.
    """
    own = max(accuracy.values())
    texts = [f"{accuracy[lr]:.1f}" if lr in accuracy else "" for lr in LEARNING_RATES]
    return [*texts, span(accuracy, own - TOLERANCE), span(accuracy, best - TOLERANCE)]


def range_table(records: list[Record]) -> str:
    """Mean accuracy at every learning rate, and the ranges of rates that come near the best."""
    rows = []
    for part in sorted({r["task"] for r in records if r["task"].startswith("range ")}):
        accuracies = {name: mean_accuracies(results) for name, results in by_row(records, part).items()}
        best = max((a for row in accuracies.values() for a in row.values()), default=0.0)
        for name in sorted(accuracies, key=lambda name: (name.startswith("OCNOpt"), name)):
            rows.append([part.removeprefix("range "), name, *range_row(accuracies[name], best)])
    lrs = [f"{lr:g}" for lr in LEARNING_RATES]
    return markdown(["curvature", "optimizer", *lrs, "within 1 % of its own best", "of the curvature's best"], rows)


def unfinished_cells(records: list[Record]) -> str:
    """A warning where the cells of the range do not all hold the same number of seeds."""
    cells = ((r["task"], r["variant"], r["lr"]) for r in records if "result" in r and r["task"] != "stability")
    counts = set(Counter(cells).values())
    return f"Not finished: a cell holds {min(counts)} to {max(counts)} seeds." if len(counts) > 1 else ""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=parse_names, default=PARTS, help=f"of {', '.join(PARTS)}")
    add_run_arguments(parser, "0,1,2,3,4", "digits.jsonl")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of the range; the stability check has 16")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the range; the stability check has none")
    parser.add_argument("--range-seeds", type=int, default=3, help="the range uses the seeds below this number")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.part) - set(PARTS):
        parser.error(f"--part knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    unfinished = 0
    if not arguments.report:
        unfinished = execute(planned(arguments), train, arguments.out, arguments.jobs, arguments.budget)
    records = load(arguments.report or arguments.out)
    print(f"### Learning rate 1, batch 16, no momentum\n\n{stability_table(records)}\n")
    print(f"### Test accuracy by learning rate, %\n\n{range_table(records)}")
    print(*filter(None, (unfinished_cells(records), failures(records))), sep="\n\n")
    return int(unfinished > 0)


if __name__ == "__main__":
    sys.exit(main())
