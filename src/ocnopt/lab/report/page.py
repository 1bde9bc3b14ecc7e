"""The page: what comes in which order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

import ocnopt
from ocnopt.lab.report.chart import Ids
from ocnopt.lab.report.figures import figures
from ocnopt.lab.report.grouping import Task, group_runs
from ocnopt.lab.report.layers import layer_section
from ocnopt.lab.report.markup import Markup, element
from ocnopt.lab.report.palette import classes, variables
from ocnopt.lab.report.provenance import provenance
from ocnopt.lab.report.reading import Run
from ocnopt.lab.report.summary import NAMES, rates_table, summary_table
from ocnopt.lab.report.text import count

#: The page needs nothing from anywhere, and a browser holds it to that.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run], title: str) -> str:
    """The whole document."""
    tasks = group_runs(runs)
    ids = Ids()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("title", title),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("link", rel="icon", href="data:,"),  # otherwise a browser asks the server for one
        element("style", Markup(style())),
    )
    feedback = _feedback(tasks)
    body = element(
        "body",
        _header(runs, tasks, title, with_feedback=feedback is not None),
        element(
            "main", _summary(tasks), [_task(task, i, ids) for i, task in enumerate(tasks)], feedback, provenance(runs)
        ),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def style() -> str:
    """The style sheet, with the colours of the palette. Print is always light."""
    sheet = files(__package__).joinpath("style.css").read_text("utf-8")
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{variables('dark')}}}}}"
    return f":root{{{variables('light')}}}{dark}{classes()}\n{sheet}"


def _header(runs: Sequence[Run], tasks: Sequence[Task], title: str, *, with_feedback: bool) -> Markup:
    methods = len({entry.method for task in tasks for entry in task.entries})
    today = datetime.now(UTC).date().isoformat()
    facts = (count(len(runs), "run"), count(len(tasks), "task"), count(methods, "optimizer"))
    links = [(f"#task{i}", task.label) for i, task in enumerate(tasks)]
    links = [
        ("#summary", "Summary"),
        *links,
        *([("#feedback", "Feedback")] if with_feedback else []),
        ("#how", "How it was run"),
    ]
    return element(
        "header",
        element("h1", title),
        element("p", f"{', '.join(facts)}. Written on {today} by ocnopt {ocnopt.__version__}.", class_="facts"),
        element("nav", [element("a", text, href=target) for target, text in links], aria_label="Contents"),
    )


def _summary(tasks: Sequence[Task]) -> Markup:
    return element(
        "section",
        element("h2", "Summary", id="summary"),
        summary_table(tasks),
        element("p", _how_to_read(tasks), class_="note"),
    )


def _how_to_read(tasks: Sequence[Task]) -> str:
    criteria = " or ".join(dict.fromkeys(f"mean {NAMES[task.criterion]}" for task in tasks))
    return (
        f"Each optimizer at the learning rate with the best {criteria}; the best result in bold.{_caution(tasks)} "
        "The deviation is the sample deviation over seeds. Runs that diverged count with the accuracy they ended with, "
        "0 where they have none; unfinished runs do not count. Time per step is a median, evaluations left out."
    )


def _caution(tasks: Sequence[Task]) -> str:
    """By what a learning rate was chosen, where there was a choice."""
    searched = [task for task in tasks if any(len(entry.cells) > 1 for entry in task.entries)]
    if any(task.criterion == task.measure for task in searched):
        return " That is the very result which is shown: whoever tried more settings has an advantage."
    return " The choice was made on samples held out of the training set, and not by what is shown." if searched else ""


def _task(task: Task, number: int, ids: Ids) -> Markup:
    drawn = figures(task, ids)
    numbers = element("details", element("summary", "Numbers for each learning rate"), rates_table(task))
    about = (
        "Lines are means over seeds, bands reach from the worst to the best seed, a cross marks a run that diverged. "
        "Training losses are running means over an eighth of the run: that of a single batch is mostly noise. "
        "Curves are those of the learning rate in the table."
    )
    return element(
        "section",
        element("h2", task.label, id=f"task{number}"),
        element("p", f"{task.samples} samples. {' '.join(task.notes)}", class_="note") if task.samples else None,
        element("p", about if drawn else "These runs have recorded nothing yet.", class_="note"),
        element("div", drawn, class_="charts"),
        numbers if len(task.rates) > 1 else None,
        class_="task-page",
    )


def _feedback(tasks: Sequence[Task]) -> Markup | None:
    """Diagnostics of the methods that have any, by task."""
    parts = []
    for task in tasks:
        sections = [section for section in map(layer_section, task.entries) if section is not None]
        if sections:
            parts.append(element("section", element("h3", task.label), sections))
    heading = element("h2", "Feedback, layer by layer", id="feedback")
    return element("section", heading, parts, class_="feedback") if parts else None
