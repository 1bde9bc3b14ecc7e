"""Feedback on and off: what the policies change for each baseline, everything else being equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.optimizers import read_optimizer
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import ConfigError


@dataclass(frozen=True)
class Baseline:
    """An optimizer as OCNOpt with the feedback off: the two are equal step for step."""

    options: dict[str, Any]
    quick_rates: tuple[float, ...]
    rates: tuple[float, ...]


_SGD_RATES = (3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2, 1e-1, 3e-1, 5e-1)
_ADAM_RATES = (5e-4, 7e-4, 1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2)

BASELINES = {
    "SGD": Baseline({"curvature": "identity", "momentum": 0.0}, (0.03, 0.1, 0.3), _SGD_RATES),
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

_SMALL = (("channels", 8), ("hidden", 32))
# network, dataset, batch size, options of the network, epochs
Row = tuple[str, str, int, tuple[tuple[str, int], ...], int]
QUICK_ROWS: tuple[Row, ...] = (
    ("fcn", "WINE", 16, (), 10),
    ("fcn", "DIGITS", 32, (), 5),
    ("residual", "DIGITS", 32, (("channels", 8),), 3),
    ("inception", "DIGITS", 32, _SMALL, 5),
)
FULL_ROWS: tuple[Row, ...] = tuple(
    (network, dataset, 128, (), 20)
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
    rows = [row for row in (QUICK_ROWS if bench.quick else FULL_ROWS) if bench.chosen(row[0], row[1])]
    if not rows:
        raise ConfigError("only must name some of the rows of this experiment")
    seeds = bench.seeds(quick=3, full=4)
    cells = _compare(rows, seeds, bench)
    figure = bench.folder / "ablation.png"
    names = [_name(row) for row in rows]
    figures.draw_heat_map(figure, names, list(BASELINES), {key: cell["difference"] for key, cell in cells.items()})
    return Finding(
        title="Feedback on and off",
        setting=[
            f"Scale: {bench.scale}. Seeds {', '.join(map(str, seeds))}; the learning rate of each baseline is the one "
            "with the best accuracy on held-out training samples, with the feedback off and the first seed.",
            "With the feedback on: nonlinear rollout, rank 1, β = 1, the same learning rate and everything else.",
            *(_describe(row, bench) for row in rows),
        ],
        data=[{"row": name, "baseline": baseline, **cell} for (name, baseline), cell in cells.items()],
        headings=("change of test accuracy, %", *BASELINES),
        rows=[[name, *(_cell(cells[name, baseline]) for baseline in BASELINES)] for name in names],
        remarks=[
            "Feedback on minus feedback off, mean ± standard deviation over seeds. The paper shows a heat map without "
            "numbers in its text: there the feedback helps or is neutral."
        ],
        figures={figure.name: "Change of the test accuracy when the feedback is switched on"},
    )


def _name(row: Row) -> str:
    return f"{row[1]}, {row[0]}"


def _describe(row: Row, bench: Bench) -> str:
    config = _config(Cell(row, "SGD", 1.0, bench.seed, "off"), bench)
    limit = f", {config.data.train_limit} training samples" if config.data.train_limit else ""
    options = "".join(f", {key} = {value}" for key, value in row[3])
    return f"{_name(row)}: batch {config.data.batch_size}, {config.training.epochs} epochs{limit}{options}."


class Cell(NamedTuple):
    """One run."""

    row: Row
    baseline: str
    lr: float
    seed: int
    feedback: str


def _compare(rows: Sequence[Row], seeds: Sequence[int], bench: Bench) -> dict[tuple[str, str], dict[str, Any]]:
    """All learning rates with the feedback off and the first seed; then the best, off and on, with all seeds."""
    tried = [
        Cell(row, baseline, lr, seeds[0], "off")
        for row in rows
        for baseline in BASELINES
        for lr in (BASELINES[baseline].quick_rates if bench.quick else BASELINES[baseline].rates)
    ]
    best: dict[tuple[str, str], tuple[float, Cell]] = {}
    for cell, run in zip(tried, _train(tried, bench), strict=True):
        place = (_name(cell.row), cell.baseline)
        best[place] = max(best.get(place, (-1.0, cell)), (_validation(run), cell), key=lambda pair: pair[0])
    sides = [
        cell._replace(seed=seed, feedback=feedback)
        for _, cell in best.values()
        for feedback in ("off", "nonlinear")
        for seed in seeds
    ]
    accuracy = dict(zip(sides, map(_accuracy, _train(sides, bench)), strict=True))
    found = {}
    for place, (_, cell) in best.items():
        off, on = (
            [accuracy[cell._replace(seed=seed, feedback=feedback)] for seed in seeds]
            for feedback in ("off", "nonlinear")
        )
        differences = [b - a for a, b in zip(off, on, strict=True)]
        spread = stdev(differences) if len(differences) > 1 else None
        found[place] = {"lr": cell.lr, "off": off, "on": on, "difference": mean(differences), "deviation": spread}
    return found


def _train(cells: Sequence[Cell], bench: Bench) -> list[RunFolder]:
    return bench.train([_config(cell, bench) for cell in cells])


def _config(cell: Cell, bench: Bench) -> RunConfig:
    network, dataset, batch_size, options, epochs = cell.row
    baseline = BASELINES[cell.baseline].options
    optimizer = read_optimizer({"name": "ocnopt", **baseline, "lr": cell.lr, "feedback": cell.feedback})
    table = {
        "data": {"name": dataset, "batch_size": batch_size, "validation": 0.2},
        "network": {"name": network, **dict(options)},
        "optimizer": optimizer.table(),
        "training": {"epochs": epochs, "seed": cell.seed},
    }
    return replace(parse_run(bench.resized(table)), label=f"{cell.baseline}, feedback {cell.feedback}")


def _validation(run: RunFolder) -> float:
    return float(run.metrics("epoch")[-1]["validation_accuracy"])


def _accuracy(run: RunFolder) -> float:
    final = run.final()
    assert final is not None
    return 100 * float(final["test_accuracy"])


def _cell(cell: dict[str, Any]) -> str:
    spread = "" if cell["deviation"] is None else f" ± {cell['deviation']:.2f}"
    return f"{cell['difference']:+.2f}{spread} (off {mean(cell['off']):.2f}, lr {cell['lr']:g})"
