"""Markdown tables from the records of runs: mean and deviation over seeds, distance to the best baseline."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from _runs import Record

OURS = "ocnopt"


@dataclass(frozen=True)
class Metric:
    """A number of a result: its name there, its title, and how two of them compare."""

    key: str
    title: str
    lower_is_better: bool = True
    relative: bool = True  # differences in per cent of the baseline, otherwise in units of the number itself
    digits: int = 3

    def gain(self, value: float, baseline: float) -> float:
        """Difference to the baseline as it is printed."""
        return 100 * (value - baseline) / baseline if self.relative else value - baseline

    def better(self, value: float, other: float) -> bool:
        return value < other if self.lower_is_better else value > other

    def signed(self, gain: float) -> str:
        return f"{gain:+.1f}{' %' if self.relative else ''}".replace("-", "−")


class Row(NamedTuple):
    task: str
    optimizer: str
    variant: str

    @property
    def place(self) -> tuple[int, str, bool, str]:
        """Where the row stands in a table: "5m" before "25m", and ours below the baselines."""
        return len(self.task), self.task, self.optimizer == OURS, self.variant


def row_of(record: Record) -> Row:
    return Row(record["task"], record["optimizer"], record["variant"])


class Cell(NamedTuple):
    """One learning rate of one row: the numbers by seed; None is a diverged run."""

    row: Row
    lr: float
    values: dict[int, float | None]

    @property
    def mean(self) -> float | None:
        values = list(self.values.values())
        return None if None in values else statistics.fmean(v for v in values if v is not None)


def cells(records: list[Record], metric: Metric) -> list[Cell]:
    """Group the records that have a result by row and learning rate, in the order of the file."""
    groups: dict[tuple[Row, float], Cell] = {}
    for record in records:
        if "result" not in record:
            continue
        row, lr, seed = row_of(record), record["lr"], record["seed"]
        cell = groups.setdefault((row, lr), Cell(row, lr, {}))
        if seed in cell.values:
            raise SystemExit(
                f"the file holds two different runs named {' '.join(row)}, lr {lr:g}, seed {seed}: "
                "give variants that differ in options or settings names of their own, or files of their own"
            )
        cell.values[seed] = record["result"][metric.key]
    return list(groups.values())


def best_baseline(table: list[Cell], metric: Metric, task: str) -> Cell | None:
    """The best cell, by its mean, of any optimizer but ours."""
    sign = 1 if metric.lower_is_better else -1
    candidates = [c for c in table if c.row.task == task and c.row.optimizer != OURS and c.mean is not None]
    return min(candidates, key=lambda c: sign * (c.mean or 0.0), default=None)


def differences(cell: Cell, baseline: Cell, metric: Metric) -> dict[int, float]:
    """Difference to the baseline, seed against the same seed; a diverged run has none."""
    return {
        seed: metric.gain(value, base)
        for seed, value in cell.values.items()
        if value is not None and (base := baseline.values.get(seed)) is not None
    }


def _text(cell: Cell, baseline: Cell | None, metric: Metric) -> str:
    values = [value for value in cell.values.values() if value is not None]
    if cell.mean is None:
        return f"diverged in {len(cell.values) - len(values)} of {len(cell.values)}"
    text = f"{cell.mean:.{metric.digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{metric.digits}f}"
    if cell == baseline:
        return f"**{text}**"
    if cell.row.optimizer == OURS and baseline is not None and baseline.mean is not None:
        text += f" ({metric.signed(metric.gain(cell.mean, baseline.mean))})"
    return text


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_by_lr(records: list[Record], metric: Metric) -> str:
    """Rows: task and variant; columns: learning rates. The best baseline is bold; ours show the distance."""
    table = cells(records, metric)
    lrs = sorted({cell.lr for cell in table})
    bests = {task: best_baseline(table, metric, task) for task in {cell.row.task for cell in table}}
    lookup = {(cell.row, cell.lr): cell for cell in table}
    times = _median_ms(records)
    rows = []
    for row in sorted({cell.row for cell in table}, key=lambda row: row.place):
        texts = [_text(lookup[row, lr], bests[row.task], metric) if (row, lr) in lookup else "" for lr in lrs]
        rows.append([row.task, row.variant, *texts, times.get(row, "")])
    return markdown(["task", "optimizer", *(f"{lr:g}" for lr in lrs), "ms/step"], rows)


def _median_ms(records: list[Record]) -> dict[Row, str]:
    times: dict[Row, list[float]] = defaultdict(list)
    for record in records:
        if (ms := record.get("result", {}).get("ms_per_step")) is not None:
            times[row_of(record)].append(ms)
    return {row: f"{statistics.median(values):.2f}" for row, values in times.items()}


def table_of_differences(records: list[Record], metric: Metric) -> str:
    """Every cell of ours against the best baseline of its task, seed by seed."""
    table = cells(records, metric)
    rows = []
    for cell in sorted((c for c in table if c.row.optimizer == OURS), key=lambda c: (c.row.place, c.lr)):
        baseline = best_baseline(table, metric, cell.row.task)
        if baseline is None or not (gains := differences(cell, baseline, metric)):
            continue
        worst = max(gains.values()) if metric.lower_is_better else min(gains.values())
        wins = sum(metric.better(gain, 0.0) for gain in gains.values())
        diverged = sum(value is None for value in cell.values.values())
        rows.append(
            [
                cell.row.task,
                cell.row.variant,
                f"{cell.lr:g}",
                f"{baseline.row.variant}, lr {baseline.lr:g}",
                metric.signed(statistics.fmean(gains.values())),
                metric.signed(worst),
                f"{wins} of {len(gains)}",
                str(diverged),
            ]
        )
    header = ["task", "optimizer", "lr", "against", "mean difference", "worst seed", "better in", "diverged"]
    return markdown(header, rows)


def failures(records: list[Record]) -> str:
    failed = [record for record in records if "error" in record]
    lines = [
        f"- {r['task']} {r['variant']} lr={r['lr']:g} seed={r['seed']}: {r['error'].strip().splitlines()[-1]}"
        for r in failed
    ]
    return "\n".join([f"{len(failed)} runs failed:", *lines]) if failed else ""


def report(records: list[Record], metrics: list[Metric], reference: Metric) -> str:
    """One table by learning rate for every metric, and the differences in the reference metric."""
    parts = [f"### {metric.title}\n\n{table_by_lr(records, metric)}" for metric in metrics]
    if any(record["optimizer"] == OURS for record in records):
        differing = table_of_differences(records, reference)
        parts.append(f"### Against the best baseline, {reference.title}\n\n{differing}")
    return "\n\n".join([*parts, failures(records)]).rstrip()
