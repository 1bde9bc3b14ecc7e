"""What the commands share: options, errors in one sentence, progress on stderr and results on stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track as track_items

from ocnopt.lab.comparison import slug
from ocnopt.lab.data import DataError
from ocnopt.lab.runs import RunError, RunFolder, find_runs, finite
from ocnopt.lab.schema import ConfigError

T = TypeVar("T")

Seed = Annotated[int, typer.Option(min=0, help="Seed of the initial weights and of the order of the samples.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the datasets; without it $OCNOPT_DATA, then the cache of downloads.")
]
Download = Annotated[
    bool, typer.Option("--download/--no-download", help="Fetch the dataset, once, if it is not there.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Networks trained at the same time.", show_default="one per core; on a GPU, one"),
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too, in the run's folder.")]

#: progress goes here, results to stdout: a pipe gets results only
progress_console = Console(stderr=True)

#: characters of a line in a file or a pipe, which do not say how wide they are
_WIDE = 160


def results_console() -> Console:
    """For tables on stdout. ``COLUMNS`` says how wide they may be; otherwise the terminal does, if there is one, also
    where they go through a pipe.
    """
    console = Console()
    if not os.environ.get("COLUMNS", "").isdigit() and not any(map(_is_terminal, range(3))):
        console.width = _WIDE
    return console


def _is_terminal(stream: int) -> bool:
    """As rich looks for one: stdin, stdout, stderr."""
    with suppress(OSError):
        os.get_terminal_size(stream)
        return True
    return False


def help_text(text: str, *examples: str) -> str:
    """Paragraphs, and example commands with their line feeds kept (which is what ``\\b`` asks for)."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    block = "\b\n" + "\n".join(f"  {line}" for line in examples)
    return "\n\n".join((*paragraphs, "[bold]Examples[/bold]", block))


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can put right is said in one sentence, without a traceback."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), code=2)
    except (DataError, RunError) as error:
        fail(str(error), code=1)
    except KeyboardInterrupt:
        fail("stopped", code=130)


def track(items: Sequence[T], what: str, *, quiet: bool = False) -> Iterable[T]:
    """Hand them on one by one, with a progress bar where there is a terminal to show it."""
    hidden = quiet or not progress_console.is_terminal
    return track_items(items, what, console=progress_console, transient=True, disable=hidden)


def fail(message: str, code: int) -> None:
    progress_console.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def print_json(document: Any) -> None:
    """One document on stdout, without colours or wrapping."""
    typer.echo(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def require_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The runs in these folders and below them; there must be one."""
    folders = find_runs(paths)
    if not folders:
        raise RunError(f"there is no run in {', '.join(map(str, paths))}")
    return folders


def default_folder(*parts: str) -> Path:
    """A folder under ``runs/`` that says when and what, and does not exist yet."""
    stem = "-".join((datetime.now().strftime("%Y%m%d-%H%M%S"), *map(slug, parts)))
    return next(path for path in _numbered(Path("runs") / stem) if not path.exists())


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1
