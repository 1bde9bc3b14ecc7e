"""Feedback on and off: what the policies change for each baseline, everything else being equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.optimizers import read_optimizer
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.tuning import held_out_accuracy, spread, test_accuracy
from ocnopt.lab.reproduce.verdict import deviation, exceeds, guess_rate, has_learned
from ocnopt.lab.runs import RunFolder


@dataclass(frozen=True)
class Baseline:
    """An optimizer as OCNOpt with the feedback off: the two are equal step for step."""

    options: dict[str, Any]
    quick_rates: tuple[float, ...]
    rates: tuple[float, ...]


_SGD_RATES = (3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2, 1e-1, 3e-1, 5e-1)
_ADAM_RATES = (5e-4, 7e-4, 1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2)

BASELINES = {
    "SGD": Baseline({"curvature": "identity", "momentum": 0.0}, (0.1, 0.3, 0.5), _SGD_RATES),
    "RMSprop": Baseline(
        {"curvature": "adaptive", "momentum": 0.0, "decay": 0.99, "bias_correction": False},
        (1e-3, 3e-3, 1e-2),
        _ADAM_RATES,
    ),
    "Adam": Baseline({"curvature": "adaptive", "momentum": 0.9, "decay": 0.999}, (1e-3, 3e-3, 1e-2), _ADAM_RATES),
    "EKFAC": Baseline(
        {"curvature": "kronecker", "momentum": 0.0, "damping": 1e-2, "refresh_every": 20},
        (0.01, 0.03, 0.1),
        _SGD_RATES[:-1],
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of the heat map."""

    network: str
    dataset: str
    batch_size: int
    epochs: int
    options: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.dataset}, {self.network}"


#: seeds with which the learning rates are chosen
CHOOSING = 2

# Long enough for every baseline to learn, at one of its rates at least.
QUICK_ROWS: tuple[Row, ...] = (
    Row("fcn", "DIGITS", 32, 20),
    Row("residual", "DIGITS", 32, 20, (("channels", 8),)),
    Row("inception", "DIGITS", 32, 20, (("channels", 8), ("hidden", 32))),
)
FULL_ROWS: tuple[Row, ...] = tuple(
    Row(network, dataset, 128, 20)
    for network, dataset in (
        ("residual", "MNIST"),
        ("residual", "SVHN"),
        ("resnet18", "CIFAR10"),
        ("resnet18", "CIFAR100"),
        ("inception", "MNIST"),
        ("inception", "SVHN"),
        ("inception", "CIFAR10"),
    )
)


def run(bench: Bench) -> Finding:
    """Tune each baseline with the feedback off, then switch it on at the same settings."""
    rows = bench.select(QUICK_ROWS if bench.quick else FULL_ROWS)
    seeds = bench.seeds(quick=3, full=4)
    cells = _compare(rows, seeds, bench)
    figure = bench.folder / "ablation.png"
    marked = {key for key, cell in cells.items() if cell["doubt"] is not None}
    changes = {key: cell["difference"] for key, cell in cells.items()}
    figures.draw_heat_map(figure, [row.name for row in rows], list(BASELINES), changes, marked)
    return Finding(
        title="Feedback on and off",
        setting=[
            f"Scale: {bench.scale}. Seeds {', '.join(map(str, seeds))}; the learning rate of each baseline is the one "
            f"with the best accuracy on held-out training samples, with the feedback off and the first {CHOOSING} "
            "seeds.",
            "With the feedback on: nonlinear rollout, rank 1, β = 1, the same learning rate and everything else.",
            *(_describe(row, bench) for row in rows),
        ],
        data=[{"row": name, "baseline": baseline, **cell} for (name, baseline), cell in cells.items()],
        headings=("change of test accuracy, %", *BASELINES),
        rows=[[row.name, *(_cell(cells[row.name, baseline]) for baseline in BASELINES)] for row in rows],
        verdict=_verdict(cells),
        remarks=[
            "Feedback on minus feedback off at the same seeds, mean ± standard deviation. In brackets, and hatched in "
            "the figure: cells that tell nothing, where neither side has learned (the accuracy is less than ten points "
            "above that of guessing) or the change is no larger than its deviation. The paper shows a heat map without "
            "numbers in its text: there the feedback helps or is neutral."
        ],
        figures={
            figure.name: "Change of the test accuracy when the feedback is switched on; hatched cells tell nothing"
        },
    )


def _describe(row: Row, bench: Bench) -> str:
    config = _config(Cell(row, "SGD", 1.0, bench.seed, "off"), bench)
    options = "".join(f", {key} = {value}" for key, value in row.options)
    epochs, batch = config.training.epochs, config.data.batch_size
    return f"{row.name}{options}: {bench.samples(config.data)}, {epochs} epochs, batch {batch}."


class Cell(NamedTuple):
    """One run."""

    row: Row
    baseline: str
    lr: float
    seed: int
    feedback: str


Place = tuple[str, str]


def _compare(rows: Sequence[Row], seeds: Sequence[int], bench: Bench) -> dict[Place, dict[str, Any]]:
    """The best learning rate with the feedback off; then at that rate, off and on, with all seeds."""
    best = _best(rows, seeds[:CHOOSING], bench)
    sides = [
        cell._replace(seed=seed, feedback=feedback)
        for cell in best
        for feedback in ("off", "nonlinear")
        for seed in seeds
    ]
    accuracy = dict(zip(sides, map(test_accuracy, _train(sides, bench)), strict=True))
    found = {}
    for cell in best:
        off, on = (
            [accuracy[cell._replace(seed=seed, feedback=feedback)] for seed in seeds]
            for feedback in ("off", "nonlinear")
        )
        guess = guess_rate(bench.load(_config(cell, bench).data))
        found[cell.row.name, cell.baseline] = {"lr": cell.lr, **_measure(off, on, guess)}
    return found


def _best(rows: Sequence[Row], seeds: Sequence[int], bench: Bench) -> list[Cell]:
    """For each row and baseline, a cell with the learning rate that the held-out samples prefer."""
    tried = [
        Cell(row, baseline, lr, seed, "off")
        for row in rows
        for baseline in BASELINES
        for lr in (BASELINES[baseline].quick_rates if bench.quick else BASELINES[baseline].rates)
        for seed in seeds
    ]
    scores: dict[tuple[Row, str], dict[float, list[float]]] = {}
    for cell, run in zip(tried, _train(tried, bench), strict=True):
        theirs = scores.setdefault((cell.row, cell.baseline), {})
        theirs.setdefault(cell.lr, []).append(held_out_accuracy(run))
    return [
        Cell(row, baseline, max(theirs, key=lambda lr: mean(theirs[lr])), seeds[0], "off")
        for (row, baseline), theirs in scores.items()
    ]


def _measure(off: Sequence[float], on: Sequence[float], guess: float) -> dict[str, Any]:
    """The change, and what makes it doubtful."""
    differences = [b - a for a, b in zip(off, on, strict=True)]
    change, spread_of_change = mean(differences), deviation(differences)
    doubt = None
    if not has_learned(off, guess) and not has_learned(on, guess):
        doubt = "neither side has learned"
    elif not exceeds(change, spread_of_change):
        doubt = "the change is no larger than its deviation"
    return {"off": off, "on": on, "difference": change, "deviation": spread_of_change, "doubt": doubt}


def _verdict(cells: Mapping[Place, dict[str, Any]]) -> str:
    clear = {place: cell["difference"] for place, cell in cells.items() if cell["doubt"] is None}
    better, worse = (
        [f"{name}, {baseline} ({change:+.2f})" for (name, baseline), change in clear.items() if (change > 0) is wanted]
        for wanted in (True, False)
    )
    agrees = "which does not agree with the paper" if worse else "as in the paper"
    return (
        f"Cells that tell something: {len(clear)} of {len(cells)}. The feedback helps in {len(better)}"
        f"{': ' + ', '.join(better) if better else ''}; it costs accuracy in {len(worse)}"
        f"{': ' + ', '.join(worse) if worse else ''}, {agrees}."
    )


def _train(cells: Sequence[Cell], bench: Bench) -> list[RunFolder]:
    return bench.train([_config(cell, bench) for cell in cells])


def _config(cell: Cell, bench: Bench) -> RunConfig:
    row = cell.row
    baseline = BASELINES[cell.baseline].options
    optimizer = read_optimizer({"name": "ocnopt", **baseline, "lr": cell.lr, "feedback": cell.feedback})
    table = {
        "data": {"name": row.dataset, "batch_size": row.batch_size, "validation": 0.2},
        "network": {"name": row.network, **dict(row.options)},
        "optimizer": optimizer.table(),
        "training": {"epochs": row.epochs, "seed": cell.seed},
    }
    return replace(parse_run(bench.resized(table)), label=f"{cell.baseline}, feedback {cell.feedback}")


def _cell(cell: dict[str, Any]) -> str:
    differences = [b - a for a, b in zip(cell["off"], cell["on"], strict=True)]
    change = spread(differences, sign="+")
    change = change if cell["doubt"] is None else f"[{change}]"
    return f"{change}, off {mean(cell['off']):.2f}, lr {cell['lr']:g}"
