"""``ocnopt demo``: the first thing to try."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from ocnopt.lab import demo
from ocnopt.lab.cli import shared
from ocnopt.lab.cli.compare import finish
from ocnopt.lab.comparison import create_runs
from ocnopt.lab.live import train_and_show
from ocnopt.lab.pool import Setup, default_workers
from ocnopt.lab.world import find_device, refuse_torchrun


class Dataset(StrEnum):
    WINE = "WINE"
    DIGITS = "DIGITS"


HELP = shared.help_text(
    """Compare OCNOpt with what you use now, on two small datasets, in about two minutes.

    Trains the paper's networks on WINE and DIGITS with every optimizer and several seeds, at a good learning rate and
    at ten times that, prints test accuracies as mean ± standard deviation, and writes an HTML report. Which of the two
    rates counts is decided on samples held out of the training set. E-MSA and DDP, whose steps are slow, get one rate
    and fewer epochs. Nothing is downloaded.""",
    "ocnopt demo",
    "ocnopt demo --dataset WINE --seeds 10",
    "ocnopt demo --out runs/demo --json",
)


def register(app: typer.Typer) -> None:
    app.command("demo", help=HELP)(command)


def command(
    dataset: Annotated[
        list[Dataset] | None, typer.Option(help="One of the two only.", show_default="both", case_sensitive=False)
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs for each optimizer and learning rate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most so many.", show_default="as planned")] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; these networks are small: cpu is fast.")
    ] = "cpu",
    workers: shared.Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="a new one in runs/")] = None,
    json_output: shared.Json = False,
) -> None:
    start = perf_counter()
    with shared.plain_errors():
        refuse_torchrun("demo")
        place = find_device(device)
        names = [each.value for each in dataset or Dataset]
        configs = demo.configs(names, range(seed, seed + seeds), epochs)
        out = out or shared.default_folder("demo")
        folders = create_runs(out, configs)
        work = {folder.path: demo.expected_work(config) for folder, config in zip(folders, configs, strict=True)}
        console = None if json_output else shared.progress_console
        longest_first = sorted(folders, key=lambda folder: -work[folder.path])
        outcomes = train_and_show(longest_first, Setup(str(place)), workers or default_workers(place), console)
        order = [folder.path for folder in folders]
        finish(out, sorted(outcomes, key=lambda outcome: order.index(outcome.folder.path)), json_output)
    if not json_output:
        typer.echo(f"{perf_counter() - start:.0f} s in all.")
