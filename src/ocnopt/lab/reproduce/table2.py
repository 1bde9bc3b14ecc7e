"""Tables II and V of the paper: Neural ODEs for images, time series and densities, each with the best of its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ocnopt.lab.config import parse_run
from ocnopt.lab.data import find_entry
from ocnopt.lab.models import Flow, build
from ocnopt.lab.reproduce import continuous, ode_figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.continuous import METHODS, TITLES, Column, Found, Place
from ocnopt.lab.reproduce.tuning import spread
from ocnopt.lab.reproduce.verdict import deviation, exceeds
from ocnopt.lab.runs import RunFolder
from ocnopt.ode import SolverError

Findings = Mapping[Place, Found]


def run(bench: Bench) -> Finding:
    """Search each grid with one seed, then run its best setting with the other seeds."""
    columns = continuous.select(bench)
    seeds = bench.seeds(quick=3, full=3)
    found = continuous.search(bench, columns, seeds)
    figure = bench.folder / f"table2-{bench.solver}.png"
    ode_figures.draw_table(figure, columns, found, bench.solver)
    drawn = {figure.name: "Each optimizer on each dataset, ours and the paper's"}
    for column in columns:
        if column.by_loss and find_entry(column.dataset).input_shape == (2,):
            samples = bench.folder / f"samples-{column.key}-{bench.solver}.png"
            ode_figures.draw_samples(samples, _samples(column, found, bench))
            drawn[samples.name] = f"{column.dataset}: test samples, and samples of the flows of the first seed"
    number = "II" if bench.solver == "dopri5" else "V"
    return Finding(
        title=f"Table {number}: Neural ODEs, test accuracy in percent (flows: negative log-likelihood)",
        setting=continuous.describe(columns, bench, seeds),
        data=[_document(column, method, found, bench.solver) for column in columns for method in METHODS],
        headings=("", *(column.dataset for column in columns)),
        rows=[line for method in METHODS for line in _lines(method, columns, found, bench.solver)],
        verdict=_verdict(columns, found, bench.solver),
        remarks=[
            "Mean ± standard deviation over seeds. Bold is the best of a column. More is better, for flows less.",
            _choices(columns, found),
        ],
        figures=drawn,
    )


def _samples(column: Column, found: Findings, bench: Bench) -> dict[str, Tensor]:
    """Points of the plane by title: the data, and what the best setting of each optimizer makes of Gaussian noise."""
    here = {TITLES[method]: found[column.key, method].runs[0] for method in METHODS}
    panels = {"data": bench.load(parse_run(here["OCNOpt"].config()).data).test.x}
    for title, run in here.items():
        torch.manual_seed(0)
        try:
            panels[title] = trained_flow(run).sample(len(panels["data"]))
        except SolverError:  # a flow that has grown too steep to be followed back has no samples
            panels[title] = torch.empty(0, 2)
    return panels


def trained_flow(run: RunFolder) -> Flow:
    """The flow of a finished run."""
    config, state = parse_run(run.config()), run.load_checkpoint()
    assert state is not None
    entry = find_entry(config.data.name)
    options: dict[str, Any] = dict(config.network.options)
    flow = build(config.network.name, entry.input_shape, 0, dataset=entry.name, **options)
    assert isinstance(flow, Flow)
    flow.load_state_dict(state["network"])
    return flow.eval()


def _document(column: Column, method: str, found: Findings, solver: str) -> dict[str, Any]:
    here = found[column.key, method]
    return {
        "dataset": column.dataset,
        "method": TITLES[method],
        "options": dict(here.best.options),
        "tests": here.tests(),
        "paper": column.in_paper(solver).get(method),
        "grid": [
            {
                "lr": optimizer.lr,
                "held_out": continuous.held_out(each),
                "held_out_loss": continuous.held_out_loss(each),
                "test": continuous.test_value(each),
            }
            for optimizer, each in here.tried
        ],
    }


def _lines(method: str, columns: Sequence[Column], found: Findings, solver: str) -> list[list[str]]:
    ours, paper = [], []
    for column in columns:
        means = {each: mean(found[column.key, each].tests()) for each in METHODS}
        digits = 3 if column.by_loss else 2
        ours.append(_bold(spread(found[column.key, method].tests(), digits), means[method] == column.best(means)))
        printed = column.in_paper(solver)
        value = f"{printed[method]:.2f}" if printed else "–"
        paper.append(_bold(value, bool(printed) and printed[method] == column.best(printed)))
    return [[f"{TITLES[method]}, ours", *ours], [f"{TITLES[method]}, paper", *paper]]


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _verdict(columns: Sequence[Column], found: Findings, solver: str) -> str:
    """Where OCNOpt is at least as good as both, and where the paper says so."""
    first: list[str] = []
    behind: list[str] = []
    for column in columns:
        tests = {method: found[column.key, method].tests() for method in METHODS}
        means = {method: mean(values) for method, values in tests.items()}
        others = {method: value for method, value in means.items() if method != "ocnopt"}
        rival = next(method for method in others if others[method] == column.best(others))
        gap = means["ocnopt"] - means[rival]
        clear = exceeds(gap, deviation(tests["ocnopt"]), deviation(tests[rival]))
        note = f"{column.dataset} ({gap:+.2f} against {TITLES[rival]}{'' if clear else ', within the deviation'})"
        (first if gap == 0 or (gap < 0) == column.by_loss else behind).append(note)
    printed = [column.in_paper(solver) for column in columns]
    in_paper = sum(p["ocnopt"] == c.best(p) for c, p in zip(columns, printed, strict=True) if p)
    texts = [
        f"{text} in {len(notes)}: {', '.join(notes)}"
        for text, notes in (("at least as good as Adam and SGD", first), ("not as good as the better of them", behind))
        if notes
    ]
    return f"OCNOpt is {'; '.join(texts)}. In the paper it is first in {in_paper} of these {len(columns)}."


def _choices(columns: Sequence[Column], found: Findings) -> str:
    def show(column: Column, method: str) -> str:
        here = found[column.key, method]
        return f"{TITLES[method]} {here.best.lr:g}{' (an end of its grid)' if here.is_at_an_end else ''}"

    chosen = [f"{column.dataset}: {', '.join(show(column, method) for method in METHODS)}" for column in columns]
    return f"Chosen learning rates. {'; '.join(chosen)}."
