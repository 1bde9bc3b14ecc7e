"""Tables: the comparison, the same for every learning rate, and the list of runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ocnopt.lab.report.grouping import HIGHER_IS_BETTER, Cell, Entry, Measure, Task
from ocnopt.lab.report.markup import Child, Markup, element
from ocnopt.lab.report.palette import dash, hue
from ocnopt.lab.report.reading import Run
from ocnopt.lab.report.scales import Scale
from ocnopt.lab.report.text import MISSING, duration, milliseconds, percent, rate, significant, spread

NAMES: dict[Measure, str] = {
    "accuracy": "test accuracy",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "validation_accuracy": "validation accuracy",
    "validation_loss": "validation loss",
}

#: No share of samples lies outside, however large the deviation.
BOUNDS: dict[Measure, tuple[float, float]] = dict.fromkeys(HIGHER_IS_BETTER, (0.0, 1.0))


def value_text(value: float, measure: Measure) -> str:
    return percent(value) if measure in HIGHER_IS_BETTER else significant(value)


def score_text(cell: Cell) -> str:
    return spread(cell.score.mean, cell.score.deviation, fraction=cell.measure in HIGHER_IS_BETTER)


def scrolling(table: Markup, label: str) -> Markup:
    """A table that is too wide for the page moves within its own frame, also by keyboard."""
    return element("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)


def summary_table(tasks: Sequence[Task]) -> Markup:
    """One row for each method on each task, at its best learning rate; best row first.

    On a phone the rows become cards, which some browsers no longer call a table: hence the roles.
    """
    measures = {task.measure for task in tasks}
    result = NAMES[next(iter(measures))].capitalize() if len(measures) == 1 else "Result"
    searched = ["of so many tried"] if any(len(entry.cells) > 1 for task in tasks for entry in task.entries) else []
    head = element(
        "tr",
        column("Optimizer"),
        column(result, "mean ± deviation", colspan=2),
        column("Learning rate", *searched, class_="number"),
        column("Seeds", class_="number"),
        column("Diverged", "all learning rates", class_="number"),
        column("Time per step", "milliseconds", class_="number"),
        role="row",
    )
    table = element(
        "table",
        element("thead", head, role="rowgroup"),
        [_body(task) for task in tasks],
        class_="summary cards",
        role="table",
    )
    return scrolling(table, "Summary")


def column(title: str, *notes: str, colspan: int | None = None, class_: str | None = None) -> Markup:
    small = [element("small", note) for note in notes]
    return element("th", title, small, scope="col", role="columnheader", colspan=colspan, class_=class_)


def fact(label: str, *children: Child, class_: str = "number") -> Markup:
    """A cell that carries the head of its column along."""
    return element("td", *children, data_label=label, role="cell", class_=class_)


def _body(task: Task) -> Markup:
    direction = "" if task.measure in HIGHER_IS_BETTER else f" ({NAMES[task.measure]}, lower is better)"
    data = element("small", f"{task.samples} samples") if task.samples else None
    notes = [element("small", note, class_="lost") for note in task.notes]
    title = element("th", task.label, direction, data, notes, colspan=7, scope="rowgroup", role="rowheader")
    best = max((entry.merit() for entry in task.entries), default=-math.inf)
    rows = [_row(entry, task, leads=entry.merit() == best > -math.inf) for entry in task.entries]
    return element("tbody", element("tr", title, class_="task", role="row"), rows, role="rowgroup")


def _row(entry: Entry, task: Task, *, leads: bool) -> Markup:
    cell = entry.best
    shown = score_text(cell) if cell.score.values else MISSING
    choice = element("small", entry.choice) if entry.choice else None
    shorter = element("small", f"{_epochs(entry)} instead of {task.epochs}") if entry.epochs != task.epochs else None
    tried = (
        element("small", f" of {len(entry.cells)}", class_="inline")
        if any(len(e.cells) > 1 for e in task.entries)
        else None
    )
    waiting = element("small", f"{cell.unfinished} unfinished") if cell.unfinished else None
    lost = f"{entry.diverged} of {entry.total}"
    return element(
        "tr",
        method_head(entry, choice, shorter),
        element("td", element("strong", shown) if leads else shown, class_="score", role="cell"),
        element("td", _whisker(entry, task), class_="whisker", aria_hidden="true"),
        fact("rate", rate(cell.lr), tried),
        fact("seeds", str(cell.seeds), waiting),
        fact("diverged", lost, class_="number lost" if entry.diverged else "number"),
        fact("ms/step", milliseconds(cell.seconds_per_step)),
        role="row",
    )


def _epochs(entry: Entry) -> str:
    return f"{entry.epochs} epoch{'' if entry.epochs == '1' else 's'}"


def method_head(entry: Entry, *notes: Child) -> Markup:
    """The name of a method behind a piece of its line: the table is the legend of the charts."""
    index = entry.method.index
    line = element("path", d="M0 5h24", stroke_dasharray=dash(index))
    swatch = element("svg", line, viewBox="0 0 24 10", class_=f"swatch {hue(index)}", aria_hidden="true")
    # On a phone "curvature=kronecker" is two lines, not "curvature=krone" and "cker".
    name = [(part, element("wbr")) for part in re.split("(?<==)", entry.method.label)]
    return element("th", swatch, name, notes, scope="row", role="rowheader", class_="method")


def _whisker(entry: Entry, task: Task) -> Markup | None:
    """Mean and deviation as a dot on a line, on a scale that the rows of a task share."""
    ends = [end for other in task.entries for end in _interval(other.best)]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    if not _interval(entry.best) or low == high:
        return None
    scale = Scale(low, high, 4, 96)
    left, right = (scale(end) for end in _interval(entry.best))
    middle = scale(entry.best.score.mean)
    return element(
        "svg",
        element("path", d="M0 8h100", class_="grid"),
        element("path", d=f"M{left:.1f} 8H{right:.1f}", class_="range"),
        element("circle", cx=middle, cy=8, r=3.5),
        viewBox="0 0 100 16",
        class_=hue(entry.method.index),
    )


def _interval(cell: Cell) -> tuple[float, ...]:
    mean, deviation = cell.score.mean, cell.score.deviation
    if not math.isfinite(mean):
        return ()
    reach = deviation if math.isfinite(deviation) else 0.0
    low, high = BOUNDS.get(cell.measure, (-math.inf, math.inf))
    return max(mean - reach, low), min(mean + reach, high)


def rates_table(task: Task) -> Markup:
    """Mean and deviation for every learning rate: the numbers behind the chart."""
    rates = task.rates
    head = element("tr", element("th", "Optimizer", scope="col"), [_rate_head(lr) for lr in rates])
    rows = [_rates_row(entry, rates) for entry in task.entries]
    label = f"{NAMES[task.measure].capitalize()} for each learning rate, {task.label}"
    return scrolling(element("table", element("thead", head), element("tbody", rows)), label)


def _rate_head(lr: float) -> Markup:
    return element("th", rate(lr), scope="col", class_="number")


def _rates_row(entry: Entry, rates: Sequence[float]) -> Markup:
    cells = [element("td", _rate_cell(entry.by_rate.get(lr), entry.best), class_="number") for lr in rates]
    return element("tr", method_head(entry), cells)


def _rate_cell(cell: Cell | None, best: Cell) -> Child:
    if cell is None or not cell.score.values:
        return MISSING
    shown = element("strong", score_text(cell)) if cell is best else score_text(cell)
    lost = element("small", f"{cell.diverged} of {len(cell.runs)} diverged", class_="lost") if cell.diverged else None
    return [shown, lost]


def runs_table(runs: Sequence[Run]) -> Markup:
    columns = ("Run", "Dataset", "Network", "Optimizer", "Learning rate", "Seed", "Status")
    numbers = ("Test accuracy", "Training loss", "Steps", "Time")
    head = [element("th", c, scope="col") for c in columns] + [
        element("th", c, scope="col", class_="number") for c in numbers
    ]
    table = element(
        "table", element("thead", element("tr", head)), element("tbody", map(_run_row, runs)), class_="runs"
    )
    return scrolling(table, "All runs")


def _run_row(run: Run) -> Markup:
    words = (run.dataset, run.network, run.label, rate(run.lr), run.seed, run.status)
    numbers = (percent(run.accuracy), significant(run.train_loss), str(run.steps), duration(run.seconds))
    return element(
        "tr",
        element("th", run.name, scope="row"),
        [element("td", word) for word in words],
        [element("td", value, class_="number") for value in numbers],
    )
