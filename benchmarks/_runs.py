"""The runs of a benchmark: which to do, the file that keeps their results, and the workers that do them.

A *run* is one training with one optimizer, learning rate and seed. Its result is one JSON line, appended and
flushed as soon as the run ends, so that a killed benchmark loses only what was in flight; started again, it
skips the runs that the file already holds.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training: everything that decides its result."""

    task: str  # what is trained: a model size, or a network with its data
    optimizer: str  # family: "ocnopt", "adamw", …
    variant: str  # row of the report: the family itself, or a name given with --variant
    lr: float
    seed: int
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    settings: dict[str, Any] = field(default_factory=dict)  # all else: steps, batch, warm-up, device, …

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        return f"{self.task} {self.variant} lr={self.lr:g} seed={self.seed}"


@dataclass(frozen=True)
class Family:
    """An optimizer as a benchmark starts it: its grid of learning rates and what it needs besides."""

    lrs: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A named row: a family with some options or settings changed."""

    name: str
    values: dict[str, Any]


def parse_variant(text: str) -> Variant:
    """`name:key=value,key=value`; a value is a Python literal, or a bare word, which is taken as a string."""
    name, colon, assignments = text.partition(":")
    if not (name and colon and assignments):
        raise argparse.ArgumentTypeError(f"a variant is written name:key=value,key=value, not {text!r}")
    try:
        # Python's own parser reads a list of keyword arguments, commas inside brackets and quotes included.
        call = ast.parse(f"variant({assignments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("only key=value pairs are allowed")
        values = {str(k.arg): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read variant {text!r}: {error}") from None
    return Variant(name, values)


def _literal(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(item) for item in text.split(",") if item)


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def parse_grid(text: str) -> tuple[str, tuple[float, ...]]:
    """`optimizer=lr,lr,…`"""
    name, equals, numbers = text.partition("=")
    if not (name and equals and numbers):
        raise argparse.ArgumentTypeError(f"a grid is written optimizer=lr,lr,… , not {text!r}")
    return name, parse_numbers(numbers)


def add_run_arguments(parser: argparse.ArgumentParser, seeds: str, out: str) -> None:
    """The command-line options of every benchmark that trains."""
    parser.add_argument("--seeds", type=parse_names, default=parse_names(seeds), help=f"default {seeds}")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"results, JSON lines (default {out})")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, all on the same device")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start no run after this time"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="run nothing; print the tables of FILE")


def add_optimizer_arguments(parser: argparse.ArgumentParser, optimizers: str) -> None:
    """The command-line options of a benchmark that compares optimizers of one's choice."""
    parser.add_argument(
        "--optimizers",
        type=parse_names,
        default=parse_names(optimizers),
        metavar="A,B",
        help=f"families to run at their grids (default {optimizers}; '' for variants only)",
    )
    parser.add_argument(
        "--variant",
        type=parse_variant,
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,…",
        help="one more row; keys are arguments of the optimizer, `optimizer` (default ocnopt), `lr` (number "
        "or tuple), or a setting such as `warmup`; may be repeated",
    )
    parser.add_argument(
        "--lr",
        type=parse_grid,
        action="append",
        default=[],
        metavar="NAME=LR,LR",
        help="learning rates of a family or variant, in place of its own; may be repeated",
    )


def wanted(arguments: argparse.Namespace) -> set[str]:
    """The optimizers that the command line asks for, by family."""
    return {*arguments.optimizers, *(v.values.get("optimizer", "ocnopt") for v in arguments.variant)}


def plan(
    arguments: argparse.Namespace,
    tasks: Iterable[str],
    families: Mapping[str, Family],
    settings: Mapping[str, Any],
) -> list[Run]:
    """Every run that the command line asks for, seed by seed: an early end leaves whole comparisons."""
    variants = [Variant(name, {"optimizer": name}) for name in arguments.optimizers] + arguments.variant
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise SystemExit(f"each variant needs a name of its own, got {', '.join(names)}")
    grids = dict(arguments.lr)
    if unknown := set(grids) - set(names):
        raise SystemExit(f"--lr names {', '.join(sorted(unknown))}, which is none of {', '.join(names)}")
    tasks = tuple(tasks)
    return [
        run
        for seed in map(int, arguments.seeds)
        for task in tasks
        for variant in variants
        for run in _expand(variant, task, seed, grids.get(variant.name), families, settings)
    ]


def _expand(
    variant: Variant,
    task: str,
    seed: int,
    lrs: tuple[float, ...] | None,
    families: Mapping[str, Family],
    settings: Mapping[str, Any],
) -> Iterator[Run]:
    values = dict(variant.values)
    name = values.pop("optimizer", "ocnopt")
    if name not in families:
        raise SystemExit(f"optimizer {name!r} is none of {', '.join(families)}")
    family = families[name]
    own = values.pop("lr", family.lrs)
    known = {**settings, **family.settings}
    chosen = {key: values.pop(key, default) for key, default in known.items()}
    for lr in lrs or (own if isinstance(own, (tuple, list)) else (own,)):
        yield Run(task, name, variant.name, float(lr), seed, {**family.options, **values}, chosen)


def load(path: Path) -> list[Record]:
    """The records of a file, one per run: the last one where a run was repeated after an error."""
    records: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line of a killed process: its run is simply done again
        records[record["key"]] = record
    return list(records.values())


class Journal:
    """Appends records to a file, each one whole and on the disk before the next."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a")
        if torn:
            self._file.write("\n")  # ends the half line of a killed process

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """JSON knows no NaN: a diverged number is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def attempt(train: Callable[[Run], Record], run: Run) -> Record:
    """Train once; an error becomes part of the record, so that one bad run does not end the others."""
    record: Record = {"key": run.key, **asdict(run)}
    started = time.monotonic()
    try:
        record["result"] = train(run)
    except Exception:
        record["error"] = traceback.format_exc()
    record["seconds"] = round(time.monotonic() - started, 2)
    return record


def _initialise_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def execute(
    runs: list[Run], train: Callable[[Run], Record], path: Path, jobs: int = 1, budget: float = math.inf
) -> int:
    """Do every run that `path` does not hold yet; return how many failed or were left for the next time."""
    done = {record["key"] for record in load(path) if "result" in record}
    todo = [run for run in runs if run.key not in done]
    in_time = _until(time.monotonic() + budget, todo)
    journal, failed, finished = Journal(path), 0, 0
    print(f"{len(runs)} runs, {len(runs) - len(todo)} already in {path}", file=sys.stderr, flush=True)
    for record in _sequential(in_time, train) if jobs == 1 else _parallel(in_time, train, jobs):
        journal.write(record)
        finished += 1
        failed += "error" in record
        print(f"[{finished}/{len(todo)}] {_headline(record)}", file=sys.stderr, flush=True)
    journal.close()
    if left := len(todo) - finished:
        print(f"{left} runs left, the time budget is spent; start again to do them", file=sys.stderr)
    return failed + left


def _until(deadline: float, runs: list[Run]) -> Iterator[Run]:
    return itertools.takewhile(lambda _: time.monotonic() < deadline, runs)


def _sequential(runs: Iterator[Run], train: Callable[[Run], Record]) -> Iterator[Record]:
    return (attempt(train, run) for run in runs)


def _parallel(runs: Iterator[Run], train: Callable[[Run], Record], jobs: int) -> Iterator[Record]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # "spawn" because CUDA does not survive a fork.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _initialise_worker, (threads,)) as pool:
        pending: set[Future[Record]] = set()
        while True:
            while len(pending) < jobs and (run := next(runs, None)) is not None:
                pending.add(pool.submit(attempt, train, run))
            if not pending:
                return
            ready, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ready)


def _headline(record: Record) -> str:
    run = f"{record['task']} {record['variant']} lr={record['lr']:g} seed={record['seed']}"
    if "error" in record:
        return f"{run}: FAILED, {record['error'].strip().splitlines()[-1]}"
    numbers = [f"{key} {value:.4g}" for key, value in record["result"].items() if isinstance(value, float)]
    return f"{run}: {', '.join(numbers)}, {record['seconds']:.0f} s"
