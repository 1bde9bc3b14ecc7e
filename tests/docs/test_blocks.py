"""The Python in the README and in docs/ runs.

The blocks of one page are executed in order in one namespace, as a reader would paste them. A block that
opens with ```` ```python no-run ```` is shown to the reader and not executed.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^ *(?P<ticks>```+)(?P<info>.*)$")


class Block(NamedTuple):
    line: int  # of the first line of code, counted from 1
    code: str


def python_blocks(text: str) -> list[Block]:
    """The blocks of a page that are to be executed."""
    blocks: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opening = FENCE.match(line)
        if not opening:
            continue
        body: list[str] = []
        for _, inner in lines:
            closing = FENCE.match(inner)
            if closing and not closing["info"] and len(closing["ticks"]) >= len(opening["ticks"]):
                break
            body.append(inner)
        else:
            raise ValueError(f"the block that opens at line {number} is never closed")
        if opening["info"].split() == ["python"]:
            blocks.append(Block(number + 1, textwrap.dedent("\n".join(body))))
    return blocks


def run_page(page: Path) -> dict[str, object]:
    """Execute the blocks of a page and return their namespace."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front make a traceback show the line number of the page.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(page), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(page)


def test_readme_has_blocks() -> None:
    assert len(python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))) >= 3


def test_only_python_blocks_are_taken_and_no_run_is_skipped() -> None:
    page = textwrap.dedent(
        """\
        ```python
        a = 1
        ```
        ```python no-run
        a = undefined
        ```
        ```sh
        make test
        ```
        ````
        ```python
        shown = inside_another_block
        ```
        ````
        - in a list:
          ```python
          if a:
              a += 1
          ```
        """
    )
    assert python_blocks(page) == [Block(2, "a = 1"), Block(17, "if a:\n    a += 1")]


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2 is never closed"):
        python_blocks("text\n```python\na = 1\n")


def test_blocks_share_one_namespace_and_errors_name_the_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\ntext\n```python\nb = a + 1\n```\n", encoding="utf-8")
    assert run_page(page)["b"] == 2

    page.write_text("text\n```python\na = 1\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page)
    assert error.traceback[-1].lineno + 1 == 4
    assert str(error.traceback[-1].path) == str(page)
