"""Table I of the paper: every optimizer on every network and dataset, each with the best setting of its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ocnopt.lab.config import load_toml
from ocnopt.lab.optimizers import OPTIMIZERS
from ocnopt.lab.recipes import find_recipe, parse_recipe, read_recipe
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.paper import COLUMNS, TABLE1, Row
from ocnopt.lab.reproduce.verdict import exceeds
from ocnopt.lab.runs import replace_file
from ocnopt.lab.sweep import Line, SweepOptions, run_sweep, summarise
from ocnopt.lab.sweep.board import Entry
from ocnopt.lab.toml import dumps

#: the rows of the quick scale; the others take hours even on a GPU
QUICK_ROWS = ("fcn-wine", "fcn-digits", "fcn-mnist", "fcn-fmnist", "cnn-mnist", "cnn-svhn", "cnn-cifar10")

#: a fifth of their training samples is too few to tell settings apart with one seed: theirs are chosen with all seeds
SMALL = ("WINE", "DIGITS")

# As many settings for each of the ordinary optimizers, learning rates half a decade apart. Fully-connected: twelve,
# six rates times two values of what matters most besides. The paper takes OCNOpt's best curvature for each row, and so
# does this. E-MSA and DDP have no learning rate to speak of, and a step of theirs costs as much as ten to a thousand of
# the others: they get fewer.
FCN_GRIDS: dict[str, dict[str, Any]] = {
    "sgdm": {"lr": [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1], "weight_decay": [0.0, 1e-3]},
    "rmsprop": {"lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2], "weight_decay": [0.0, 1e-3]},
    "adam": {"lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2], "weight_decay": [0.0, 1e-3]},
    "ekfac": {"lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], "damping": [1e-3, 1e-2]},
    "emsa": {"rho": [0.1, 1.0, 10.0]},
    "ddp": {"lr": [0.1, 0.3]},
    "ocnopt": {
        "curvature": ["adaptive", "kronecker"],
        "feedback": "nonlinear",
        "lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
    },
}

# Convolutional: five rates. EKFAC has the damping of OCNOpt, OCNOpt the curvature that it has in the paper's row.
CNN_GRIDS: dict[str, dict[str, Any]] = {
    "sgdm": {"lr": [3e-3, 1e-2, 3e-2, 1e-1, 3e-1]},
    "rmsprop": {"lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]},
    "adam": {"lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]},
    "ekfac": {"lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], "damping": 1e-3},
    "ocnopt": {"feedback": "nonlinear", "lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]},
}


@dataclass(frozen=True)
class Quick:
    """The quick scale of one row.

    Attributes:
        iterations: of E-MSA's L-BFGS, fewer than its default where a step would take a second.
        left_out: optimizers that would take longer than all others together.
    """

    epochs: int
    batch_size: int
    train_limit: int | None = None
    iterations: int = 10
    left_out: tuple[str, ...] = ()


QUICK: dict[str, Quick] = {
    "fcn-wine": Quick(20, 16),
    "fcn-digits": Quick(10, 16),
    "fcn-mnist": Quick(5, 32, 15000, iterations=5, left_out=("ddp",)),
    "fcn-fmnist": Quick(5, 32, 15000, iterations=5, left_out=("ddp",)),
    "cnn-mnist": Quick(5, 128, 15000, left_out=("emsa",)),
    "cnn-svhn": Quick(10, 128, 10000, left_out=("emsa",)),
    "cnn-cifar10": Quick(10, 128, 10000, left_out=("emsa",)),
}


def run(bench: Bench) -> Finding:
    """Search each grid, then run its best setting with all seeds."""
    rows = bench.select([row for row in TABLE1 if not bench.quick or row.name in QUICK_ROWS])
    found = {row.name: _search(row, bench) for row in rows}
    figure = bench.folder / "table1.png"
    figures.draw_table(figure, rows, found)
    return Finding(
        title="Table I: test accuracy in percent",
        setting=_describe(rows, bench),
        data=[{"row": asdict(row), "found": [line.table() for line in found[row.name]]} for row in rows],
        headings=("row", "", *(OPTIMIZERS[column].title for column in COLUMNS)),
        rows=[cells for row in rows for cells in _cells(row, found[row.name])],
        verdict=_verdict(rows, found),
        remarks=[
            "Mean ± standard deviation over seeds. The setting of each cell is the one with the best accuracy on "
            "held-out training samples; of equal ones, the first of the grid. Bold is the best of a line; – was not "
            "run at this scale or is empty in the paper.",
            _at_an_end(rows, found, bench),
            *(_choices(row, found[row.name]) for row in rows),
        ],
        figures={figure.name: "Test accuracy of every optimizer, ours and the paper's"},
    )


def _search(row: Row, bench: Bench) -> list[Line]:
    folder = bench.folder / row.name
    recipe = folder / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(recipe, dumps(bench.resized(recipe_of(row, bench))).encode())
    source = read_recipe(recipe)
    seeds = bench.seeds(quick=3, full=4)
    options = SweepOptions(
        recipe=str(recipe),
        storage=str(folder / "sweep.db"),
        study=row.name,
        folder=folder / "runs",
        grids=tuple(key for key in COLUMNS if key in source.grids),
        seeds=seeds if row.dataset in SMALL else seeds[:1],
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


def recipe_of(row: Row, bench: Bench) -> dict[str, Any]:
    """The recipe of a row: the one that comes along or, at the quick scale, one with fewer samples and settings."""
    if not bench.quick:
        return load_toml(find_recipe(row.recipe))
    quick = QUICK[row.name]
    every = FCN_GRIDS if row.network == "fcn" else CNN_GRIDS
    grids = {key: dict(every[key]) for key in COLUMNS if key in row.accuracy and key not in quick.left_out}
    grids["ocnopt"].setdefault("curvature", row.curvature)
    limit = {} if quick.train_limit is None else {"train_limit": quick.train_limit}
    if "emsa" in grids:
        grids["emsa"]["max_iter"] = quick.iterations
    return {
        "title": f"{row.dataset}, {row.network}, quick",
        "data": {"name": row.dataset, "batch_size": quick.batch_size, "validation": 0.2, **limit},
        "network": {"name": row.network},
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
            self._bench.count(self._row.name, settled, len(entries))


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
    seeds = bench.seeds(quick=3, full=4)
    chosen = (
        f"Seeds {', '.join(map(str, seeds))}. Settings are chosen on held-out training samples with the first seed; on "
        f"{' and '.join(SMALL)}, where these are few, with all seeds."
    )
    sentences = [f"Scale: full. Networks, epochs and grids are those of the recipes `table1-*`. {chosen}"]
    if bench.quick:
        sentences = [
            f"Scale: quick. {chosen}",
            *(
                f"Grids, {title}: {'; '.join(f'{key} {_grid_text(grid)}' for key, grid in grids.items())}."
                for title, network, grids in (
                    ("fully-connected", "fcn", FCN_GRIDS),
                    ("convolutional", "cnn", CNN_GRIDS),
                )
                if any(row.network == network for row in rows)
            ),
        ]
    return [*sentences, *(_describe_row(row, bench) for row in rows)]


def _describe_row(row: Row, bench: Bench) -> str:
    recipe = parse_recipe(bench.resized(recipe_of(row, bench)))
    data, epochs = recipe.run.data, recipe.run.training.epochs
    iterations = recipe.grids["emsa"].choices.get("max_iter") if "emsa" in recipe.grids else None
    emsa = f", {iterations[0]} iterations in a step of E-MSA" if iterations else ""
    curvature = recipe.grids["ocnopt"].choices["curvature"]
    ocnopt = f", OCNOpt with {curvature[0]} curvature" if len(curvature) == 1 else ""
    return f"{row.name}: {bench.samples(data)}, {epochs} epochs, batch {data.batch_size}{emsa}{ocnopt}."


def _grid_text(grid: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{option} ∈ {{{', '.join(map(_value_text, values))}}}" if isinstance(values, list) else f"{option} = {values}"
        for option, values in grid.items()
    )


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _at_an_end(rows: Sequence[Row], found: Mapping[str, Sequence[Line]], bench: Bench) -> str:
    """Which of the chosen learning rates have no neighbour on one side: a wider grid might do better."""
    ends = []
    for row in rows:
        grids = parse_recipe(recipe_of(row, bench)).grids
        for line in found[row.name]:
            rates = grids[line.grid].choices.get("lr", ())
            if line.best is not None and len(rates) > 2 and line.best.options["lr"] in (min(rates), max(rates)):
                ends.append(f"{OPTIMIZERS[line.grid].title} on {row.name} ({line.best.options['lr']:g})")
    return f"Chosen learning rates at an end of their grid: {', '.join(ends) or 'none'}."


def _verdict(rows: Sequence[Row], found: Mapping[str, Sequence[Line]]) -> str:
    """Where OCNOpt wins, where it does not, and where the paper has it first."""
    sorted_out: dict[str, list[str]] = {"first": [], "tied for first": [], "not first": []}
    in_paper = []
    for row in rows:
        ours = {line.grid: line.best for line in found[row.name] if line.best is not None}
        if "ocnopt" not in ours or len(ours) < 2:
            continue
        best = max((key for key in ours if key != "ocnopt"), key=lambda key: ours[key].test)
        gap = ours["ocnopt"].test - ours[best].test
        place = "first" if gap > 0 else "tied for first" if gap == 0 else "not first"
        clear = exceeds(gap, ours["ocnopt"].test_deviation, ours[best].test_deviation)
        note = f"{gap:+.2f} against {OPTIMIZERS[best].title}{'' if clear else ', within the deviation'}"
        sorted_out[place].append(f"{row.name} ({note})" if gap else row.name)
        in_paper += [row.name] if row.accuracy["ocnopt"] == max(row.accuracy.values()) else []
    texts = [f"{place} in {len(names)}: {', '.join(names)}" for place, names in sorted_out.items() if names]
    if not texts:
        return "OCNOpt was not compared."
    compared = sum(map(len, sorted_out.values()))
    return f"OCNOpt is {'; '.join(texts)}. In the paper it is first in {len(in_paper)} of these {compared}."


def _choices(row: Row, lines: Sequence[Line]) -> str:
    """The setting of every cell of a row."""
    chosen = [(OPTIMIZERS[line.grid].title, line.best.options) for line in lines if line.best is not None]
    texts = [
        f"{title} {', '.join(f'{key}={_value_text(value)}' for key, value in options.items())}"
        for title, options in chosen
    ]
    return f"Chosen for {row.name}: {'; '.join(texts)}."
