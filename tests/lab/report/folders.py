"""Run folders as the trainer leaves them, and the report that is made of them, as a tree."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ocnopt.lab.report import write_report
from ocnopt.lab.runs import MetricsWriter, Record, RunFolder

LAYERS = ("encoder.0", "encoder.2", "head")
NAN = float("nan")


def write_run(
    path: Path,
    *,
    label: str = "Adam",
    optimizer: str | None = None,
    lr: float = 0.1,
    seed: int = 0,
    epochs: int = 20,
    accuracy: float | None = 0.9,
    options: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    losses: Sequence[float] = (2.0, 1.0, 0.5, 0.25),
    step_seconds: float = 0.002,
    diverged: bool = False,
    finished: bool = True,
    validation: float | None = None,
    layers: bool = False,
    environment: Mapping[str, Any] | None = None,
) -> Path:
    """Ten steps between two losses, an epoch after every two of them."""
    config = {
        "label": label,
        "data": {"name": "DIGITS", "batch_size": 32, **(data or {})},
        "network": {"name": "fcn", "width": 32},
        "optimizer": {"name": optimizer or label.lower(), "lr": lr, **(options or {})},
        "training": {"epochs": epochs, "seed": seed},
    }
    folder = RunFolder.create(path, config)
    folder.write_environment(environment or {"torch": "2.13.0", "command": ["ocnopt", "train", "a b.toml"]})
    writer = MetricsWriter(folder.metrics_path)
    for record in _records(losses, step_seconds, accuracy, validation, layers):
        writer.write(record)
    if finished:
        end = {"test_accuracy": accuracy, "train_loss": losses[-1], "seconds": 10 * step_seconds * len(losses)}
        writer.write({"kind": "final", **end, "diverged": diverged})
    writer.close()
    return path


def _records(
    losses: Sequence[float], step_seconds: float, accuracy: float | None, validation: float | None, layers: bool
) -> Iterable[Record]:
    for i, loss in enumerate(losses, start=1):
        seconds = 10 * i * step_seconds
        yield {"kind": "step", "step": 10 * i, "epoch": (i - 1) // 2, "loss": loss, "lr": 0.1, "seconds": seconds}
        if i % 2:
            continue
        reached = None if accuracy is None else accuracy * i / len(losses)
        epoch = {"kind": "epoch", "epoch": i // 2, "step": 10 * i, "train_loss": loss, "test_loss": 1.1 * loss}
        held_out = {} if validation is None else {"validation_loss": loss, "validation_accuracy": validation}
        yield {**epoch, "test_accuracy": reached, "seconds": seconds, **held_out}
        if layers:
            yield {"kind": "layers", "step": 10 * i, "layers": [_layer(k, i) for k in range(len(LAYERS))]}


def _layer(k: int, i: int) -> Record:
    weights = {"w_min": 0.2 + 0.1 * k, "w_max": 0.5 + 0.1 * k + 0.4 / i}
    return {
        "name": LAYERS[k],
        "trace": 10.0 ** (k - i % 6),
        **weights,
        "s": -0.1 * k * math.cos(i),
        "clamped": k * i,
        "projections": 0,
    }


class Tree(HTMLParser):
    """A page as an ElementTree. A tag that is not closed where it should be is an error."""

    VOID = ("meta", "link", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self._builder = ET.TreeBuilder()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open
        self.root: ET.Element = self._builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._builder.start(tag, {key: value or "" for key, value in attrs})
        if tag in self.VOID:
            self._builder.end(tag)
        else:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._builder.end(tag)

    def handle_data(self, data: str) -> None:
        if self._open:
            self._builder.data(data)


def report(folder: Path, **options: Any) -> ET.Element:
    """The report of all runs in a folder."""
    page = write_report(sorted(folder.iterdir()), folder.parent / "report.html", **options)
    return Tree(page.read_text("utf-8")).root


def text(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def summary(root: ET.Element) -> dict[str, list[str]]:
    """The cells of each row of the summary, by what its first cell says; the picture is left out."""
    (table,) = of_class(root, "summary")
    rows = {}
    for row in table.iter("tr"):
        first, *cells = [cell for cell in row if cell.get("class") != "whisker"]
        rows[text(first)] = [text(cell) for cell in cells]
    return rows
