"""Table I of the paper: every optimizer on every network and dataset, each with the best setting of its grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ocnopt.lab.optimizers import OPTIMIZERS
from ocnopt.lab.recipes import find_recipe, read_recipe
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.paper import COLUMNS, TABLE1, Row
from ocnopt.lab.runs import replace_file
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.sweep import Line, SweepOptions, run_sweep, summarise
from ocnopt.lab.sweep.board import Entry
from ocnopt.lab.toml import dumps

#: the rows of the quick scale; the others need a GPU
QUICK_ROWS = ("fcn-wine", "fcn-digits", "fcn-mnist", "fcn-fmnist", "cnn-mnist", "cnn-svhn", "cnn-cifar10")

# Values out of the paper's grids, as many for each of the ordinary optimizers. E-MSA and DDP have no learning rate to
# speak of, and a step of theirs costs as much as ten to a thousand of the others: they get two settings.
QUICK_GRIDS: dict[str, dict[str, list[float]]] = {
    "sgdm": {"lr": [1e-2, 3e-2, 1e-1, 3e-1]},
    "rmsprop": {"lr": [1e-3, 3e-3, 1e-2, 3e-2]},
    "adam": {"lr": [1e-3, 3e-3, 1e-2, 3e-2]},
    "ekfac": {"lr": [1e-2, 3e-2, 1e-1, 3e-1]},
    "emsa": {"rho": [1.0, 10.0]},
    "ddp": {"lr": [0.1, 0.3]},
    "ocnopt": {"lr": [3e-3, 1e-2, 3e-2, 1e-1]},
}


@dataclass(frozen=True)
class Quick:
    """The quick scale of one row. ``left_out``: optimizers that would take longer than all others together."""

    epochs: int
    batch_size: int
    train_limit: int | None = None
    test_limit: int | None = None
    network: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()


NARROW = (("channels", 8), ("hidden", 32))

QUICK: dict[str, Quick] = {
    "fcn-wine": Quick(20, 16),
    "fcn-digits": Quick(10, 32, left_out=("ddp",)),
    "fcn-mnist": Quick(3, 32, 6000, left_out=("ddp",)),
    "fcn-fmnist": Quick(3, 32, 6000, left_out=("emsa", "ddp")),
    "cnn-mnist": Quick(3, 32, 2500, 2000, NARROW, left_out=("emsa",)),
    "cnn-svhn": Quick(4, 32, 1500, 2000, NARROW, left_out=("emsa",)),
    "cnn-cifar10": Quick(4, 32, 1500, 2000, NARROW, left_out=("emsa",)),
}


def run(bench: Bench) -> Finding:
    """Search each grid with one seed, then run its best setting with the other seeds."""
    rows = [row for row in TABLE1 if bench.chosen(row.network, row.dataset)]
    if bench.quick:
        rows = [row for row in rows if row.name in QUICK_ROWS]
    if not rows:
        raise ConfigError(f"only must name rows of Table I: {', '.join(row.name for row in TABLE1)}")
    found = {row.name: _search(row, bench) for row in rows}
    figure = bench.folder / "table1.png"
    figures.draw_table(figure, rows, found)
    return Finding(
        title="Table I: test accuracy in percent",
        setting=_describe(rows, bench),
        data=[{"row": asdict(row), "found": [line.table() for line in found[row.name]]} for row in rows],
        headings=("row", "", *(OPTIMIZERS[column].title for column in COLUMNS)),
        rows=[cells for row in rows for cells in _cells(row, found[row.name])],
        remarks=[
            "Mean ± standard deviation over seeds. The setting of each cell is the one with the best accuracy on "
            "held-out training samples. Bold is the best of a line; – was not run at this scale or is empty in the "
            "paper.",
            _verdict(rows, found),
            *(_choices(row, found[row.name]) for row in rows),
        ],
        figures={figure.name: "Test accuracy of every optimizer, ours and the paper's"},
    )


def _search(row: Row, bench: Bench) -> list[Line]:
    folder = bench.folder / row.name
    recipe = str(find_recipe(row.recipe))
    if bench.quick:
        path = folder / "recipe.toml"
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, dumps(quick_recipe(row)).encode())
        recipe = str(path)
    source = read_recipe(recipe)
    seeds = bench.seeds(quick=3, full=4)
    options = SweepOptions(
        recipe=recipe,
        storage=str(folder / "sweep.db"),
        study=row.name,
        folder=folder / "runs",
        grids=tuple(key for key in COLUMNS if key in source.grids),
        seeds=seeds[:1],
        device=bench.device,
        data_dir=bench.data_dir,
        download=bench.download,
    )
    first = summarise(source, run_sweep(options, bench.workers, _Teller(row, bench)))
    best = tuple(line.best.key for line in first if line.best is not None)
    again = replace(options, seeds=seeds, settings=best)
    lines = summarise(source, run_sweep(again, bench.workers, _Teller(row, bench)))
    failed = {line.grid: line for line in first if line.best is None}
    return [*lines, *failed.values()]


def quick_recipe(row: Row) -> dict[str, Any]:
    """The recipe of a row at the quick scale."""
    quick = QUICK[row.name]
    limits = {"train_limit": quick.train_limit, "test_limit": quick.test_limit}
    limits = {key: limit for key, limit in limits.items() if limit is not None}
    grids: dict[str, dict[str, Any]] = {
        key: {**QUICK_GRIDS[key]} for key in COLUMNS if key in row.accuracy and key not in quick.left_out
    }
    return {
        "title": f"{row.dataset}, {row.network}, quick",
        "data": {"name": row.dataset, "batch_size": quick.batch_size, "validation": 0.2, **limits},
        "network": {"name": row.network, **dict(quick.network)},
        "optimizer": {"name": "ocnopt"},
        "training": {"epochs": quick.epochs},
        "grids": grids,
        "paper": {key: row.accuracy[key] for key in grids},
    }


class _Teller:
    """One line of progress for every run that has ended."""

    def __init__(self, row: Row, bench: Bench) -> None:
        self._row, self._bench, self._settled = row, bench, -1

    def __call__(self, entries: Sequence[Entry]) -> None:
        settled = sum(entry.standing.value in ("done", "failed") for entry in entries)
        if settled != self._settled:
            self._settled = settled
            self._bench.tell(f"{self._row.name}: {settled} of {len(entries)} runs")


def _cells(row: Row, lines: Sequence[Line]) -> list[list[str]]:
    by_key = {line.grid: line for line in lines}
    ours = {key: line.best.test for key, line in by_key.items() if line.best is not None}
    title = f"{row.dataset}, {row.network}"
    return [
        [title, "ours", *(_our_cell(by_key.get(column), ours) for column in COLUMNS)],
        ["", "paper", *(_paper_cell(row, column) for column in COLUMNS)],
    ]


def _our_cell(line: Line | None, ours: dict[str, float]) -> str:
    if line is None:
        return "–"
    if line.best is None:
        return "failed"
    text = f"{line.best.test:.2f}"
    text = f"**{text}**" if line.best.test == max(ours.values()) else text
    return text if line.best.test_deviation is None else f"{text} ± {line.best.test_deviation:.2f}"


def _paper_cell(row: Row, column: str) -> str:
    value = row.accuracy.get(column)
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value == max(row.accuracy.values()) else f"{value:.2f}"


def _describe(rows: Sequence[Row], bench: Bench) -> list[str]:
    if not bench.quick:
        return ["Scale: full. Data, networks, epochs and grids are those of the recipes `table1-*`."]
    sentences = [
        "Scale: quick. One seed for every setting of the grids below, three for the best setting of each optimizer; "
        "a fifth of the training samples is held out for that choice.",
        "Grids: " + "; ".join(f"{key} {_grid_text(grid)}" for key, grid in QUICK_GRIDS.items()) + ".",
        "OCNOpt has its default arguments (adaptive curvature, linear feedback, rank 1) in every row.",
    ]
    for row in rows:
        q = QUICK[row.name]
        size = "all training samples" if q.train_limit is None else f"the first {q.train_limit} training samples"
        tests = "" if q.test_limit is None else f", the first {q.test_limit} test samples"
        network = "".join(f", {key} = {value}" for key, value in q.network)
        sentences.append(f"{row.name}: {size}{tests}, {q.epochs} epochs, batch {q.batch_size}{network}.")
    return sentences


def _grid_text(grid: dict[str, list[float]]) -> str:
    return ", ".join(f"{option} ∈ {{{', '.join(f'{v:g}' for v in values)}}}" for option, values in grid.items())


def _verdict(rows: Sequence[Row], found: dict[str, list[Line]]) -> str:
    """Where OCNOpt wins and where it does not."""
    sorted_out: dict[str, list[str]] = {"first": [], "tied for first": [], "not first": []}
    for row in rows:
        ours = {line.grid: line.best.test for line in found[row.name] if line.best is not None}
        if "ocnopt" not in ours or len(ours) < 2:
            continue
        best = max((key for key in ours if key != "ocnopt"), key=lambda key: ours[key])
        gap = ours["ocnopt"] - ours[best]
        place = "first" if gap > 0 else "tied for first" if gap == 0 else "not first"
        sorted_out[place].append(f"{row.name} ({gap:+.2f} against {OPTIMIZERS[best].title})" if gap else row.name)
    texts = [f"{place} in {len(names)}: {', '.join(names)}" for place, names in sorted_out.items() if names]
    return f"OCNOpt is {'; '.join(texts)}." if texts else "OCNOpt was not compared."


def _choices(row: Row, lines: Sequence[Line]) -> str:
    """The setting of every cell of a row."""
    chosen = [(OPTIMIZERS[line.grid].title, line.best.options) for line in lines if line.best is not None]
    texts = [f"{title} {', '.join(f'{key}={value}' for key, value in options.items())}" for title, options in chosen]
    return f"Chosen for {row.name}: {'; '.join(texts)}."
