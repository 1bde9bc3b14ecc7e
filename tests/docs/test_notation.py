"""docs/notation.md names things that exist: every name in a row is in one of the row's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ocnopt"
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def rows() -> list[tuple[list[str], list[Path]]]:
    """Names and files of each table row that ends with, or speaks of, a Python file."""
    found = []
    for line in (ROOT / "docs" / "notation.md").read_text(encoding="utf-8").splitlines():
        quoted = CODE.findall(line) if line.startswith("|") else []
        files = [SOURCE / text for text in quoted if text.endswith(".py")]
        names = [text for text in quoted if not text.endswith(".py") and NAME.fullmatch(text)]
        if files:
            found.append((names, files))
    return found


def defined(name: str, sources: list[str]) -> bool:
    """``Class.member`` needs a file with that class and that member; a plain name needs to occur as a word."""
    owner, _, member = name.rpartition(".")
    wanted = [rf"\b{member}\b"] + ([rf"^class {owner}\b"] if owner else [])
    return any(all(re.search(pattern, text, flags=re.MULTILINE) for pattern in wanted) for text in sources)


@pytest.mark.parametrize(("names", "files"), rows(), ids=lambda items: Path(items[0]).name if items else "-")
def test_names_exist(names: list[str], files: list[Path]) -> None:
    missing = [str(file) for file in files if not file.is_file()]
    assert not missing
    sources = [file.read_text(encoding="utf-8") for file in files]
    shapes = {"p.shape", "r", "S", "B", "blocks"}
    unknown = [name for name in names if name not in shapes and not defined(name, sources)]
    assert not unknown


def test_the_tables_were_found() -> None:
    assert len(rows()) > 30
    assert sum(len(names) for names, _ in rows()) > 40


def test_a_wrong_name_is_noticed() -> None:
    source = "class Policy:\n    def weights(self): ...\n"
    assert defined("Policy.weights", [source])
    assert defined("weights", [source])
    assert not defined("Policy.weight", [source])
    assert not defined("Other.weights", [source])
