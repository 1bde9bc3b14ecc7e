"""One HTML file that shows what runs did. It needs no network and no scripts, and it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ocnopt.lab.report.page import page
from ocnopt.lab.report.reading import load
from ocnopt.lab.runs import RunFolder, replace_file

__all__ = ["write_report"]


def write_report(
    runs: Sequence[Path | RunFolder],
    out: Path,
    *,
    title: str = "OCNOpt: comparison of runs",
    watch: Callable[[list[RunFolder]], Iterable[RunFolder]] = iter,
) -> Path:
    """Compare runs in one self-contained page.

    Args:
        runs: run folders; unfinished ones may be among them, and a folder that is named twice counts once.
        out: the file to write; folders on the way to it are made.
        title: heading of the page.
        watch: hands on the folders while they are read, one by one: a place for a progress bar.

    Returns:
        ``out``.

    Raises:
        ValueError: there is no run.
        RunError: a folder holds no run.
    """
    folders = {folder.path.resolve(): folder for folder in map(_folder, runs)}
    if not folders:
        raise ValueError("runs must name at least one run folder")
    content = page([load(folder) for folder in watch(list(folders.values()))], title)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content.encode("utf-8"))
    return out


def _folder(run: Path | RunFolder) -> RunFolder:
    return run if isinstance(run, RunFolder) else RunFolder(run)
