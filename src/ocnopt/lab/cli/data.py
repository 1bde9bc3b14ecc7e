"""``ocnopt data``: what is there, what can be fetched, what is broken."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ocnopt.lab import data
from ocnopt.lab.cli import shared

Names = Annotated[list[str] | None, typer.Argument(help="Datasets; all of them if none is named.", show_default=False)]

LIST_HELP = shared.help_text(
    "List the datasets of the paper, and which of them are at hand.",
    "ocnopt data list",
    "ocnopt data list --data-dir /data --json",
)
FETCH_HELP = shared.help_text(
    """Download datasets, check them, and keep them in the cache or in --data-dir.

    What is there already is not fetched again; a transfer that broke off goes on where it was.""",
    "ocnopt data fetch MNIST FMNIST",
    "ocnopt data fetch CIFAR10 --data-dir /data",
)
CHECK_HELP = shared.help_text(
    """Read datasets from beginning to end and say what is missing, partial or broken.

    The exit code is 1 if one is broken or, when it was named, missing.""",
    "ocnopt data check",
    "ocnopt data check MNIST --data-dir /data --json",
)


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="List, fetch and check datasets.")
    group.command("list", help=LIST_HELP)(list_command)
    group.command("fetch", help=FETCH_HELP)(fetch_command)
    group.command("check", help=CHECK_HELP)(check_command)
    app.add_typer(group, name="data")


def list_command(data_dir: shared.DataDir = None, json_output: shared.Json = False) -> None:
    rows = data.list_datasets(data_dir)
    if json_output:
        shared.print_json([asdict(row) for row in rows])
        return
    table = _table("dataset", "published", "shape", "classes", "status", "download")
    for row in rows:
        status = row.status if row.official or row.status == "missing" else f"{row.status} *"
        size = "–" if row.status == "built in" else _size(row.download_bytes)
        shape = "×".join(map(str, row.input_shape))
        table.add_row(row.name, _parts(row), shape, str(row.classes or "–"), status, size)
    shared.results_console().print(table)
    for row in rows:
        if row.where:
            _print(f"{row.name}: {row.where}{'' if row.official else ' *'}")
    if not all(row.official for row in rows if row.where):
        _print("* These are not the official files, and may hold fewer samples: `ocnopt data check` counts them.")


def fetch_command(
    names: Annotated[list[str], typer.Argument(help="Datasets to fetch.")],
    data_dir: shared.DataDir = None,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch the official files even if others are there, e.g. a part of them.")
    ] = False,
    json_output: shared.Json = False,
) -> None:
    with shared.plain_errors():
        _refuse_unknown(names)
        rows = [row for name in names for row in data.fetch(name, data_dir, force=force, progress=not json_output)]
    if json_output:
        shared.print_json([asdict(row) for row in rows])
        return
    table = _table("dataset", "status", "size", "checked")
    for row in rows:
        table.add_row(row.name, row.status, _size(row.bytes), row.checked)
    shared.results_console().print(table)
    for row in rows:
        if row.path:
            _print(row.path)


def check_command(names: Names = None, data_dir: shared.DataDir = None, json_output: shared.Json = False) -> None:
    with shared.plain_errors():
        _refuse_unknown(names or [])
        wanted = names or list(data.NAMES)
        rows = [data.check(name, data_dir) for name in shared.track(wanted, "checking", quiet=json_output)]
    if json_output:
        shared.print_json([asdict(row) for row in rows])
    else:
        table = _table("dataset", "status", "samples")
        for row in rows:
            table.add_row(row.name, row.status, _parts(row) or "–")
        shared.results_console().print(table)
        for row in rows:
            where = f" ({row.where})" if row.where else ""
            _print(row.message if row.status == "missing" else f"{row.name}{where}: {row.message or 'All is there.'}")
    if any(row.status == "broken" or (row.status == "missing" and names) for row in rows):
        raise typer.Exit(1)


def _table(*headings: str) -> Table:
    """Without what may be long: names are not broken in 80 columns, and paths and sentences follow below."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in ("published", "samples"))
    return table


def _print(line: str) -> None:
    """Paths can be copied: a line is as long as it is."""
    shared.results_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _parts(row: data.DatasetRow | data.CheckRow) -> str:
    return " + ".join(f"{count}" for count in (row.train, row.validation, row.test) if count)


def _refuse_unknown(names: list[str]) -> None:
    for name in names:
        try:
            data.find_entry(name)
        except ValueError as error:
            shared.fail(str(error), code=2)


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e6:.1f} MB" if count else "–"
