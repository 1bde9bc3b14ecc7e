"""A whole benchmark: what was asked for, and the measurements in order."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ocnopt.lab.bench import environment, tables
from ocnopt.lab.bench.breakdown import Breakdown, break_down
from ocnopt.lab.bench.contenders import BASELINES, REFRESH, USUAL, Contender, choose, with_captured
from ocnopt.lab.bench.growth import WAYS, Growth, grow, sizes_of
from ocnopt.lab.bench.networks import find as find_network
from ocnopt.lab.bench.peak import peak_memory
from ocnopt.lab.bench.results import Refresh, Result, by_workload
from ocnopt.lab.bench.tables import Table
from ocnopt.lab.bench.timing import CLOCKS, Turns, be_alone, timed
from ocnopt.lab.bench.training import Setup, Training, silent
from ocnopt.lab.runs import finite
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.world import find_device

Tell = Callable[[str], None]
Clock = Callable[[], float]

OUT_OF_MEMORY = "out of memory"

#: of a figure that names none
BATCHES = {"cpu": (32, 64, 128, 256), "cuda": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        networks, batches, optimizers: every optimizer on every network at every batch size.
        device: auto, cpu or cuda.
        graphed: steps in CUDA graphs, beside eager steps of the baselines.
        rounds, inner: turns of each contender, and steps timed together in a turn (``None``: 1, on a GPU 20).
        clock: wall, or process, the CPU time.
        budget: seconds after which no round begins, for each network and batch size.
        threads: of the CPU; ``None`` leaves them as they are.
        precision: of float32 matrix products on a GPU: high (TF32) or highest.
        stream: default, or own, a CUDA stream of high priority that the loop runs on.
        memory: measure peak memory too.
        period: where something is refreshed now and then, time each of 100 steps one by one, instead of one that
            refreshes everything.
        phases: where the time goes.
        growth: how time grows with these, instead of times at one size.
    """

    networks: tuple[str, ...] = ("cnn",)
    batches: tuple[int, ...] = (128,)
    optimizers: tuple[str, ...] = USUAL
    device: str = "auto"
    graphed: bool = False
    rounds: int = 10
    inner: int | None = None
    clock: str = "wall"
    budget: float = math.inf
    threads: int | None = None
    precision: str = "high"
    stream: str = "default"
    memory: bool = True
    period: bool = False
    phases: bool = False
    growth: tuple[str, ...] = ()

    def check(self) -> None:
        """Whatever cannot be meant is said before anything is measured."""
        for name in self.networks:
            find_network(name)
        choose(self.optimizers)
        self._require(bool(self.networks), "network must be given at least once", "")
        self._require(min(self.batches, default=0) >= 2, "batch must be at least 2", self.batches)
        self._require(self.rounds >= 2, "rounds must be at least 2, since one has no spread", self.rounds)
        self._require(self.inner is None or self.inner >= 1, "inner must be at least 1", self.inner)
        self._require(self.threads is None or self.threads >= 1, "threads must be at least 1", self.threads)
        self._require(self.clock in CLOCKS, f"clock must be one of {', '.join(CLOCKS)}", self.clock)
        self._require(self.precision in ("high", "highest"), "precision must be high or highest", self.precision)
        self._require(self.stream in ("default", "own"), "stream must be default or own", self.stream)
        cpu = find_device(self.device).type == "cpu"
        self._require(cpu or self.clock == "wall", "clock: process measures the CPU alone, not a device", self.device)
        self._require(not cpu or self.stream == "default", "stream: own is a matter of CUDA", self.device)
        if self.growth:
            self._check_growth()

    def _check_growth(self) -> None:
        for way in self.growth:
            self._require(way in WAYS, f"growth must be one of {', '.join(WAYS)}", way)
            for name in self.networks:
                sizes_of(way, name, self.batches[0])
        ignored = [name for name in ("graphed", "period", "phases") if getattr(self, name)]
        self._require(not ignored, "growth is about eager, ordinary steps as a whole: leave out", ", ".join(ignored))
        self._require(len(set(self.batches)) == 1, "growth is measured at one batch size", self.batches)
        ranks = [c.rank for c in choose(self.optimizers)[0] if c.rank is not None]
        if "rank" in self.growth:
            rule = "growth: rank needs an optimizer that has one, such as identity-nonlinear-1"
            self._require(bool(ranks), rule, ", ".join(self.optimizers))
        if "batch" in self.growth:
            largest = max((rank for rank in ranks if rank != "full"), key=int, default="1")
            smallest = sizes_of("batch", self.networks[0], self.batches[0])[0]
            rule = f"growth: batch begins at {smallest}, and no rank is larger than the batch"
            self._require(int(largest) <= smallest, rule, f"rank {largest}")

    @staticmethod
    def _require(fine: bool, rule: str, value: object) -> None:
        if not fine:
            raise ConfigError(f"{rule}; got {value!r}")

    def turns(self, device: torch.device) -> Turns:
        inner = self.inner or (20 if device.type == "cuda" else 1)
        return Turns(self.rounds, inner, self.clock, self.budget)

    @contextmanager
    def in_force(self) -> Iterator[torch.device]:
        """Threads, precision and stream as they were asked for, and as they were afterwards."""
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        device = find_device(self.device)
        torch.set_num_threads(self.threads or threads)
        if device.type == "cuda":
            torch.set_float32_matmul_precision(self.precision)
        own = torch.cuda.Stream(device, priority=-1) if self.stream == "own" else None
        try:
            with torch.cuda.stream(own):
                yield device
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)


@dataclass
class Findings:
    """Everything that was measured."""

    settings: Settings
    environment: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    breakdowns: dict[tuple[str, int], list[Breakdown]] = field(default_factory=dict)
    growth: list[list[Growth]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For machines, with the number of every round."""
        return {
            "environment": self.environment,
            "settings": asdict(self.settings),
            "results": [row for each in by_workload(self.results).values() for row in each.document()],
            "phases": [
                {"network": network, "batch": batch, **each.document()}
                for (network, batch), theirs in self.breakdowns.items()
                for each in theirs
            ],
            "growth": [each.document() for family in self.growth for each in family],
            "missing": self.missing,
        }

    def tables(self) -> list[Table]:
        found = [table for each in by_workload(self.results).values() for table in tables.of_comparison(each)]
        for (network, batch), theirs in self.breakdowns.items():
            found.append(tables.of_breakdowns(f"{network}, batch {batch}", theirs))
        return found + [tables.of_growth(family) for family in self.growth]


def measure(settings: Settings, tell: Tell = lambda line: None) -> Findings:
    """Everything that the settings ask for; ``tell`` is given a line of progress now and then."""
    settings.check()
    contenders, missing = choose(settings.optimizers)
    findings = Findings(settings, missing=missing)
    with settings.in_force() as device, silent():
        findings.environment = environment.describe(device)
        for name in settings.networks:
            for way in settings.growth:
                setup, turns = Setup(find_network(name), settings.batches[0], device), settings.turns(device)
                sizes = sizes_of(way, name, setup.batch)
                fitting = [contender.at(setup.batch) for contender in contenders] if way != "batch" else contenders
                findings.growth.append(grow(way, name, fitting, setup, turns, tell, sizes))
            for batch in () if settings.growth else settings.batches:
                setup = Setup(find_network(name), batch, device)
                fitting = [contender.at(batch) for contender in contenders]
                findings.results += compare(name, fitting, setup, settings, tell)
                if settings.phases:
                    clock = CLOCKS[settings.clock]
                    findings.breakdowns[name, batch] = break_down(fitting, setup, settings.rounds, clock)
                    tell(f"{name}, batch {batch}: phases")
    return findings


@dataclass
class Entry:
    """A contender that gets ready."""

    contender: Contender
    graphed: bool
    peak_bytes: int | None = None
    first_ms: float = math.nan
    refresh: Refresh | None = None
    training: Training | None = None  #: ready to be timed
    error: str | None = None

    @property
    def in_graph(self) -> bool:
        return self.graphed and self.contender.why_eager is None

    def prepare(self, setup: Setup, settings: Settings) -> None:
        clock = CLOCKS[settings.clock]
        try:
            self.peak_bytes = peak_memory(self.contender, setup, self.graphed) if settings.memory else None
            training = setup.build(self.contender, self.graphed)
            self.first_ms = timed(training.step, 1, setup.device, clock)
            training.take(training.warm_up)
            if self.contender.interval is not None and (settings.period or settings.graphed):
                self.refresh = period_of(training, clock)
        except torch.OutOfMemoryError:
            self.error = OUT_OF_MEMORY
            return
        training.pause_refreshes()
        if self.contender.interval is not None:  # with other options than before
            training.take(training.warm_up)
        self.training = training

    def finish(self, settings: Settings) -> None:
        """After the rounds: a refresh of everything at once, unless a whole period was timed before them."""
        if self.training is None or self.contender.interval is None or self.refresh is not None:
            return
        try:
            self.refresh = refresh_at_once(self.training, CLOCKS[settings.clock])
        except torch.OutOfMemoryError:
            self.error = OUT_OF_MEMORY

    def result(self, network: str, batch: int, rounds_ms: list[float]) -> Result:
        result = Result(
            network,
            batch,
            self.contender.name,
            self.contender.title,
            self.in_graph,
            rounds_ms,
            self.first_ms,
            self.peak_bytes,
            error=self.error,
        )
        if self.training is None or self.error is not None:
            return result
        graph = self.training.graph
        captures = 0 if graph is None else graph.captures
        return replace(result, refresh=self.refresh, captures=captures, reason=self.training.reason)


def compare(network: str, contenders: list[Contender], setup: Setup, settings: Settings, tell: Tell) -> list[Result]:
    """All contenders on one batch of one network, in turns."""
    contenders = with_captured(contenders) if settings.graphed else contenders
    entries = [Entry(c, graphed) for c in contenders for graphed in _kinds(c, settings.graphed)]
    for entry in entries:
        entry.prepare(setup, settings)
        how = ", graphed" if entry.in_graph else ""
        tell(f"{network}, batch {setup.batch}: {entry.contender.title}{how}: {entry.error or 'ready'}")
    works = {i: entry.training.step for i, entry in enumerate(entries) if entry.training is not None}
    rounds = settings.turns(setup.device).take(works, setup.device)
    for i, entry in enumerate(entries):
        if i in rounds:
            entry.finish(settings)
        else:
            entry.error = OUT_OF_MEMORY
    tell(f"{network}, batch {setup.batch}: timed")
    return [entry.result(network, setup.batch, rounds.get(i, [])) for i, entry in enumerate(entries)]


def _kinds(contender: Contender, graphed: bool) -> tuple[bool, ...]:
    """Graphs are of interest beside the eager steps of the baselines."""
    return (False, True) if graphed and contender.name in BASELINES else (graphed,)


def period_of(training: Training, clock: Clock) -> Refresh:
    """A whole period, step by step. Refreshes have their turns as long as they are not paused: whatever is put off
    comes all at once afterwards, and together ever after. One period goes before, in which graphs are captured.
    """
    training.take(REFRESH)
    be_alone(training.device)
    single = [timed(training.step, 1, training.device, clock) for _ in range(REFRESH)]
    return Refresh(max(single), single)


def refresh_at_once(training: Training, clock: Clock) -> Refresh:
    times = []
    for _ in range(3):
        times.append(timed(training.refresh, 1, training.device, clock))
        training.step()
    return Refresh(statistics.median(times))


def require_writable(path: Path, option: str) -> None:
    """Before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error


def save(findings: Findings, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(findings.document()), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
