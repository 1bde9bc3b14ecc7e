"""What the experiments share: where they run, how they train many networks, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ocnopt.lab.comparison import run_name
from ocnopt.lab.config import DataConfig, RunConfig, parse_run
from ocnopt.lab.data import Dataset
from ocnopt.lab.pool import Setup, train_all
from ocnopt.lab.runs import Record, RunError, RunFolder, finite, replace_file
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.tasks import show_score
from ocnopt.lab.training import load_data

Scale = Literal["quick", "full"]
Tell = Callable[[str], None]
Count = Callable[[str, float, int], None]


class Part(Protocol):
    """What an experiment consists of: ``--only`` names some."""

    @property
    def network(self) -> str: ...

    @property
    def dataset(self) -> str: ...


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Bench:
    """Where an experiment runs.

    Attributes:
        folder: for everything it writes; runs that are in it already are not repeated.
        scale: ``quick`` is minutes: subsets, few epochs, where it helps small networks. ``full`` is the paper's.
        workers: processes.
        device: where networks are trained.
        data_dir, download: as in :func:`ocnopt.lab.data.load`.
        seed: the first of the seeds.
        epochs, train_limit: instead of those of the scale.
        solver: of Neural ODEs.
        only: names of the parts to run (datasets, or ``network-dataset``); all of them when empty.
        tell: is given a line of progress now and then.
        count: is told what is being done, how much of it is done, and of how much.
    """

    folder: Path
    scale: Scale = "quick"
    workers: int = 1
    device: str = "cpu"
    data_dir: str | None = None
    download: bool = False
    seed: int = 0
    epochs: int | None = None
    train_limit: int | None = None
    solver: str = "dopri5"
    only: tuple[str, ...] = ()
    tell: Tell = field(default=lambda line: None)
    count: Count = field(default=lambda what, done, total: None)

    @property
    def quick(self) -> bool:
        return self.scale == "quick"

    def seeds(self, quick: int, full: int) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + (quick if self.quick else full)))

    def select(self, parts: Sequence[P]) -> list[P]:
        """Those that were asked for. A name that is none of theirs is refused: nobody asks for nothing."""
        known = {name for part in parts for name in _names(part.network, part.dataset)}
        for name in self.only:
            if name.lower() not in known:
                all_parts = ", ".join(f"{part.network}-{part.dataset}".lower() for part in parts)
                raise ConfigError(f"only must name parts of this experiment at this scale ({all_parts}), got {name!r}")
        wanted = {name.lower() for name in self.only}
        return [part for part in parts if not wanted or wanted & _names(part.network, part.dataset)]

    def load(self, config: DataConfig) -> Dataset:
        return load_data(config, self.data_dir, self.download)

    def samples(self, config: DataConfig) -> str:
        """How many samples a run has, and whether these are all there are: for the page."""
        dataset = self.load(config)
        held_out = "" if dataset.validation is None else f", {len(dataset.validation)} held out"
        part = ", a part of the dataset" if dataset.subset else ""
        return f"{len(dataset.train)} training samples{held_out}, {len(dataset.test)} test samples{part}"

    def resized(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The table of a run or a recipe with the epochs and the samples that were asked for."""
        changes = {"training": {"epochs": self.epochs}, "data": {"train_limit": self.train_limit}}
        return {
            key: {**value, **{k: v for k, v in changes.get(key, {}).items() if v is not None}}
            if isinstance(value, Mapping)
            else value
            for key, value in table.items()
        }

    def train(self, configs: Sequence[RunConfig]) -> list[RunFolder]:
        """Train all of them, or what is left of it, and return their folders in the same order."""
        folders = [self._folder(config) for config in configs]
        shares = dict.fromkeys((folder.path for folder in folders), 0.0)  # how much of each run is done
        epochs = {folder.path: config.training.epochs for folder, config in zip(folders, configs, strict=True)}

        def listen(folder: RunFolder, record: Record) -> None:
            if record["kind"] in ("epoch", "final", "error"):
                shares[folder.path] = record["epoch"] / epochs[folder.path] if record["kind"] == "epoch" else 1.0
                self.count("runs", sum(shares.values()), len(shares))
            if record["kind"] == "final":
                self.tell(f"{folder.name}: {show_score(record)}")

        setup = Setup(self.device, self.data_dir, self.download)
        for outcome in train_all(folders, setup, self.workers, listen):
            if outcome.error is not None:
                raise RunError(f"{outcome.folder.path}: {outcome.error}")
        return folders

    def _folder(self, config: RunConfig) -> RunFolder:
        folder = RunFolder(self.folder / "runs" / run_name(config))
        if not folder.exists():
            return RunFolder.create(folder.path, config.table())
        if parse_run(folder.config()) != config:
            raise RunError(f"{folder.path} holds a run with other settings: name another folder with --out")
        return folder


def _names(network: str, dataset: str) -> set[str]:
    return {dataset.lower(), network.lower(), f"{network}-{dataset}".lower()}


@dataclass(frozen=True)
class Finding:
    """What an experiment found.

    Attributes:
        title: its name in words.
        setting: at what scale it ran: sizes, epochs, seeds; one sentence each.
        data: everything, for machines.
        headings, rows: the table, for people.
        verdict: what it shows and whether that agrees with the paper; a sentence or a few.
        remarks: further paragraphs below the table.
        figures: file names in the folder, with what they show.
    """

    title: str
    setting: Sequence[str]
    data: Any
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str = ""
    remarks: Sequence[str] = ()
    figures: dict[str, str] = field(default_factory=dict)

    def write(self, bench: Bench, name: str) -> None:
        bench.folder.mkdir(parents=True, exist_ok=True)
        document = {"scale": bench.scale, **self.document()}
        text = json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False)
        replace_file(bench.folder / f"{name}.json", (text + "\n").encode())
        replace_file(bench.folder / f"{name}.md", self.markdown().encode())

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {"title": self.title, "setting": list(self.setting), "verdict": self.verdict, "data": self.data}

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", *(f"- {sentence}" for sentence in self.setting), ""]
        lines += markdown_table(self.headings, self.rows)
        if self.verdict:
            lines += ["", f"**Verdict.** {self.verdict}"]
        for remark in self.remarks:
            lines += ["", remark]
        for file, caption in self.figures.items():
            lines += ["", f"![{caption}]({file})"]
        return "\n".join(lines) + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]
