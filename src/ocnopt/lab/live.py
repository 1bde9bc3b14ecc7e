"""Train many runs and watch: a live table on a terminal, a line per finished run elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ocnopt.lab.config import RunConfig, read_run
from ocnopt.lab.pool import Outcome, Setup, train_all
from ocnopt.lab.runs import Record, RunFolder
from ocnopt.lab.tables import Key, draw, make_row, with_validation
from ocnopt.lab.tasks import show_score


def train_and_show(folders: Sequence[RunFolder], setup: Setup, workers: int, console: Console | None) -> list[Outcome]:
    """Train what is not finished, and show it on the console, if there is one."""
    configs = {folder: read_run(folder.config_path) for folder in folders}
    if console is None:
        return train_all(folders, setup, workers)
    board = Board(configs)
    with Live(console=console, transient=True, refresh_per_second=4, auto_refresh=console.is_terminal) as live:

        def listen(folder: RunFolder, record: Record) -> None:
            news = board.note(folder, record)
            if news and (record["kind"] != "final" or not console.is_terminal):  # the live table shows the others
                console.print(news, markup=False, highlight=False, soft_wrap=True)
            if console.is_terminal:
                live.update(board.render())

        return train_all(folders, setup, workers, listen)


class Board:
    """How many runs have got how far."""

    def __init__(self, configs: Mapping[RunFolder, RunConfig]) -> None:
        self._configs = configs
        self._keys = {folder: Key.of(config.table()) for folder, config in configs.items()}
        self._runs = Counter(self._keys.values())
        self._finals: dict[Key, list[Record]] = {key: [] for key in self._runs}
        self._epochs: dict[RunFolder, Record] = {}  # the last of each
        self._under_way: dict[RunFolder, tuple[int, int]] = {}
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(40), TaskProgressColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task("", total=len(configs))
        self._ended = 0

    def note(self, folder: RunFolder, record: Record) -> str | None:
        """Take in a record; returns what is worth a line of its own."""
        kind = record["kind"]
        if kind == "begin":
            self._under_way[folder] = record["step"], record["steps"]
        elif kind == "step":
            self._under_way[folder] = record["step"], self._under_way[folder][1]
        elif kind == "epoch":
            self._epochs[folder] = record
        elif kind in ("final", "error"):
            self._under_way.pop(folder, None)
            self._ended += 1
        if kind == "final":
            last = self._epochs.get(folder) or next(iter(folder.metrics("epoch")[-1:]), {})  # it may have ended before
            self._finals[self._keys[folder]].append(with_validation(record, last))
            return f"{self._name(folder)}: {show_score(record)}"
        return f"{self._name(folder)}: {record['message']}" if kind in ("error", "warning") else None

    def _name(self, folder: RunFolder) -> str:
        config = self._configs[folder]
        rate, seed = config.optimizer.lr, config.training.seed
        return f"{config.data.name}, {config.network.name}, {config.label}, lr {rate:g}, seed {seed}"

    def render(self) -> RenderableType:
        parts = sum(step / max(steps, 1) for step, steps in self._under_way.values())
        text = f"{self._ended} of {len(self._configs)} runs"
        self._bar.update(self._task, completed=self._ended + parts, description=text)
        rows = [make_row(key, runs, self._finals[key]) for key, runs in self._runs.items()]
        return Group(draw(rows), self._bar)
