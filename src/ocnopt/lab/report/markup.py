"""HTML and SVG elements. Whatever is not :class:`Markup` already is escaped, so no text can become a tag."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

VOID = frozenset({"link", "meta", "wbr"})
# Control characters and halves of surrogate pairs (a file name that is no valid UTF-8) have no place in a page.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"
Attribute: TypeAlias = str | int | float | bool | None


def escape(text: str) -> Markup:
    return Markup(html.escape(UNPRINTABLE.sub("\ufffd", text), quote=True))


def number(value: float) -> str:
    """A coordinate: a hundredth of a pixel is enough."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _flat(children: Iterable[Child]) -> Iterator[str]:
    for child in children:
        match child:
            case None:
                continue
            case Markup():
                yield child
            case str():
                yield escape(child)
            case int() | float():
                yield number(child)
            case _:
                yield from _flat(child)


def _attribute(name: str, value: Attribute) -> str:
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{number(value) if isinstance(value, (int, float)) else escape(value)}"'


def element(tag: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """``element("td", "a < b", class_="x", data_label="y")``: underscores in attribute names become hyphens."""
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    if tag in VOID:
        return Markup(opening)
    return Markup(f"{opening}{''.join(_flat(children))}</{tag}>")
