"""``ocnopt bench``: time and memory of a step, of OCNOpt and of others."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from ocnopt.lab.bench import Settings, measure
from ocnopt.lab.bench.benchmark import BATCHES, require_writable, save
from ocnopt.lab.bench.inside import look_inside
from ocnopt.lab.bench.plot import draw, require_drawable
from ocnopt.lab.bench.tables import Table
from ocnopt.lab.cli import shared
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.world import find_device, refuse_torchrun

DEFAULTS = Settings()


class Clock(StrEnum):
    WALL = "wall"
    PROCESS = "process"


class Precision(StrEnum):
    HIGH = "high"
    HIGHEST = "highest"


class Stream(StrEnum):
    DEFAULT = "default"
    OWN = "own"


HELP = shared.help_text(
    """Time and memory of a training step, of OCNOpt and of what you use now.

    Every optimizer gets a network of its own, and they take turns, so that a machine that slows down slows all of them.
    Ratios are to SGD and to fused Adam, which are always in the run: the median over the rounds of the ratio within
    each. Whoever refreshes something every 100 steps (Kronecker curvature, EKFAC, SOAP, Shampoo) gets a second table:
    what a step costs with its share of that, and how long the longest is. Peak memory is that of network, batch,
    optimizer and steps; on a CPU each optimizer gets a fresh process for it.

    Optimizers are sgd, adam, adamw, muon (with AdamW), ekfac, soap and shampoo (where pytorch-optimizer is installed),
    and OCNOpt by curvature, feedback and rank: identity-off, adaptive-linear-1, kronecker-nonlinear-full, and so on.
    Patterns such as 'adaptive-*' name several, all names all of them. The longer runs want fewer rounds or a GPU.

    Without typer, rich and matplotlib: python -m ocnopt.lab.bench, which has all options but --plot.""",
    "ocnopt bench",
    "ocnopt bench --network resnet18 --optimizer identity-nonlinear-1",
    "ocnopt bench --optimizer 'adaptive-*' --batch 32 --batch 128 --phases",
    "ocnopt bench --device cuda --graphed --network cnn --json bench.json",
    "ocnopt bench --growth rank --optimizer 'identity-*-1' --network fcn",
    "ocnopt bench --plot complexity.png",
)


def register(app: typer.Typer) -> None:
    app.command("bench", help=HELP)(command)


def command(
    network: Annotated[
        list[str] | None, typer.Option(help="cnn, resnet18, transformer or fcn; may be repeated.", show_default="cnn")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be repeated.", show_default="128")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Name, pattern or all; may be repeated.", show_default="ten of them")
    ] = None,
    device: shared.Device = DEFAULTS.device,
    graphed: Annotated[bool, typer.Option("--graphed", help="Whole steps in CUDA graphs.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each optimizer.")] = DEFAULTS.rounds,
    inner: Annotated[int | None, typer.Option(help="Steps timed in one.", show_default="1; on a GPU, 20")] = None,
    threads: Annotated[int | None, typer.Option(help="Of the CPU.", show_default="torch's own setting")] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds after which no round begins.", show_default="as many as it takes")
    ] = DEFAULTS.budget,
    clock: Annotated[Clock, typer.Option(help="process: CPU time, on a busy machine.")] = Clock.WALL,
    precision: Annotated[Precision, typer.Option(help="Of matrix products on a GPU.")] = Precision.HIGH,
    stream: Annotated[Stream, typer.Option(help="own: one of high priority, on a GPU.")] = Stream.DEFAULT,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Peak memory too.")] = True,
    period: Annotated[
        bool, typer.Option("--period", help="Time 100 steps one by one, from refresh to refresh.")
    ] = False,
    phases: Annotated[bool, typer.Option("--phases", help="Where the time goes.")] = False,
    growth: Annotated[
        list[str] | None, typer.Option(help="Instead: how time grows with depth, width, batch or rank.")
    ] = None,
    kernels: Annotated[str | None, typer.Option(help="Instead: what this one runs on the GPU.", metavar="NAME")] = None,
    profile: Annotated[str | None, typer.Option(help="Instead: operators in its step.", metavar="NAME")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and memory against batch size (or growth) into this file.")
    ] = None,
) -> None:
    with shared.plain_errors():
        refuse_torchrun("bench")
        settings = Settings(
            networks=tuple(network or DEFAULTS.networks),
            batches=tuple(batch or DEFAULTS.batches),
            optimizers=tuple(optimizer or DEFAULTS.optimizers),
            device=device,
            graphed=graphed,
            rounds=rounds,
            inner=inner,
            clock=clock.value,
            budget=budget,
            threads=threads,
            precision=precision.value,
            stream=stream.value,
            memory=memory,
            period=period,
            phases=phases,
            growth=tuple(growth or ()),
        )
        if kernels or profile:
            _print([look_inside(settings, kernels=kernels, profile=profile)])
            return
        if plot is not None and not growth:
            settings = _for_a_figure(settings, batch)
        _check_files(json_file, plot)
        findings = measure(settings, _tell)
        _print(findings.tables())
        for line in (*findings.missing, ", ".join(f"{key} {value}" for key, value in findings.environment.items())):
            typer.echo(line)
        if json_file is not None:
            save(findings, json_file)
        if plot is not None:
            draw(findings, plot)


def _for_a_figure(settings: Settings, batches: list[int] | None) -> Settings:
    """A curve has several points."""
    if batches is None:
        return replace(settings, batches=BATCHES[find_device(settings.device).type])
    if len(set(batches)) < 2:
        raise ConfigError("plot: a curve against the batch size has several points; give --batch more than once")
    return settings


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None:
        require_writable(json_file, "json")
    if plot is not None:
        require_drawable(plot)
        require_writable(plot, "plot")


def _tell(line: str) -> None:
    shared.progress_console.print(line, markup=False, highlight=False)


def _print(tables: list[Table]) -> None:
    for table in tables:
        shared.results_console().print(_drawn(table), *map(Text, table.notes), sep="\n")


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(title=escape(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, heading in enumerate(table.headings):
        drawn.add_column(escape(heading), justify="right" if i else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    return drawn
