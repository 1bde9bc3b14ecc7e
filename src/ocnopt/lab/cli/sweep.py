"""``ocnopt sweep``: the grids of a recipe, on any number of workers and machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy.exc import OperationalError

from ocnopt.lab.cli import shared
from ocnopt.lab.recipes import find_recipe, read_recipe
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.sweep import Line, Standing, SweepError, SweepOptions, run_sweep, summarise
from ocnopt.lab.sweep.board import Entry
from ocnopt.lab.sweep.storage import storage_url
from ocnopt.lab.training import load_data
from ocnopt.lab.world import find_device, is_torchrun

HELP = shared.help_text(
    """Search the grids of a recipe: every setting of every optimizer, once.

    The state is kept in a SQLite file beside the runs, or in a PostgreSQL database that any number of machines share:
    start the same command on each of them. It can be stopped at any point, or killed; start it again and it goes on.
    Runs that fail are kept with their error. The best setting is chosen on validation samples, not on the test set.""",
    "ocnopt sweep table1-fcn-digits --workers 2",
    "ocnopt sweep table1-fcn-digits --grid ocnopt --grid adam --seeds 3",
    "ocnopt sweep my-recipe.toml --storage postgresql://user@host/sweeps --data-dir /data",
    "torchrun --nproc-per-node 8 -m ocnopt.lab sweep table1-cnn-cifar10   (a worker per GPU)",
)


def register(app: typer.Typer) -> None:
    app.command("sweep", help=HELP)(command)


def command(
    recipe: Annotated[str, typer.Argument(help="A recipe: its file, or the name of one that comes along.")],
    grid: Annotated[
        list[str] | None, typer.Option(help="Only this grid; may be repeated.", show_default="all of the recipe")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs for each setting.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    storage: Annotated[
        str | None,
        typer.Option(help="SQLite file, or URL of a PostgreSQL database.", show_default="sweep.db in the folder"),
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="Name of the sweep in the storage.", show_default="that of the recipe")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="runs/sweep-RECIPE")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what has failed so far.")] = False,
    device: shared.Device = "auto",
    data_dir: shared.DataDir = None,
    download: shared.Download = True,
    json_output: shared.Json = False,
) -> None:
    with shared.plain_errors():
        name = study or find_recipe(recipe).stem
        folder = out or Path("runs") / f"sweep-{name}"
        place = str(find_device(device))
        if workers > 1 and is_torchrun():
            raise ConfigError("--workers is for a sweep without torchrun: under it every process is a worker")
        options = SweepOptions(
            recipe=recipe,
            storage=_checked(storage or str(folder / "sweep.db")),
            study=name,
            folder=folder,
            grids=tuple(grid or ()),
            seeds=tuple(range(seed, seed + seeds)),
            device=place,
            data_dir=None if data_dir is None else str(data_dir),
            download=download,
        )
        points = options.points()  # what is wrong with the recipe is said before anything is written
        load_data(points[0].config.data, options.data_dir, download)  # and what is to be downloaded comes once
        entries = _run(options, workers, retry_failed, quiet=json_output or not _speaks())
        lines = summarise(read_recipe(recipe), entries)
    if _speaks():
        _show(lines, options, json_output)
    if any(line.failed for line in lines):
        raise typer.Exit(1)


def _speaks() -> bool:
    """One of the processes of ``torchrun`` is enough."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def _checked(storage: str) -> str:
    try:
        storage_url(storage)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    return storage


def _run(options: SweepOptions, workers: int, retry_failed: bool, *, quiet: bool) -> list[Entry]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=shared.progress_console, disable=quiet) as progress:
        bar = progress.add_task(options.study, total=None)

        def watch(entries: Sequence[Entry]) -> None:
            standings = [entry.standing for entry in entries]
            done = standings.count(Standing.DONE) + (failed := standings.count(Standing.FAILED))
            note = f"{options.study}, {failed} failed" if failed else options.study
            progress.update(bar, total=len(entries), completed=done, description=note)

        try:
            if retry_failed:
                options.board().forget_errors()
            return run_sweep(options, workers, watch)
        except OperationalError as error:
            raise ConfigError(f"--storage: the database does not answer: {error.orig}") from None
        except SweepError as error:
            raise ConfigError(str(error)) from None


def _show(lines: Sequence[Line], options: SweepOptions, json_output: bool) -> None:
    if json_output:
        storage = storage_url(options.storage).render_as_string(hide_password=True)
        shared.print_json({"lines": [asdict(line) for line in lines], "runs": str(options.folder), "storage": storage})
        return
    unit = "loss" if any(line.best is not None and line.best.by_loss for line in lines) else "%"
    table = Table(
        "optimizer", "best setting", *(f"{part} {unit}" for part in ("validation", "test", "paper")), "done", "failed"
    )
    for line in lines:
        found: tuple[str, ...] = ("–", "–", "–")
        if (best := line.best) is not None:
            setting = ", ".join(f"{name}={value}" for name, value in best.options.items())
            spread = "" if best.test_deviation is None else f" ± {best.test_deviation:.2f}"
            found = (setting, f"{best.validation:.2f}", f"{best.test:.2f}{spread}")
        paper = "–" if line.paper is None else f"{line.paper:.2f}"
        table.add_row(line.label, *found, paper, f"{line.done} of {line.points}", str(line.failed))
    shared.results_console().print(table)
    for line in lines:
        for error in line.errors:
            shared.progress_console.print(f"{line.label}: {error}", markup=False, soft_wrap=True)
    typer.echo(f"The runs are in {options.folder}")
