"""``ocnopt report``: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ocnopt.lab.cli import shared
from ocnopt.lab.tables import draw, summarise

HELP = shared.help_text(
    """Show runs in one self-contained HTML file and in a table.

    Folders are searched for runs, also below. Runs that are not finished may be among them.""",
    "ocnopt report runs/",
    "ocnopt report runs/20250101-120000-compare-WINE --out wine.html",
    "ocnopt report runs/ --json",
)


def register(app: typer.Typer) -> None:
    app.command("report", help=HELP)(command)


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    json_output: shared.Json = False,
) -> None:
    from ocnopt.lab.report import write_report

    with shared.plain_errors():
        folders = shared.require_runs(runs)
        rows = summarise(shared.track(folders, "reading", quiet=json_output))
        write_report(folders, out, watch=lambda found: shared.track(found, "drawing", quiet=json_output))
    if json_output:
        paths = [str(folder.path) for folder in folders]
        shared.print_json({"rows": [row.as_json() for row in rows], "runs": paths, "report": str(out)})
    else:
        shared.results_console().print(draw(rows))
        typer.echo(f"Report: {out}")
