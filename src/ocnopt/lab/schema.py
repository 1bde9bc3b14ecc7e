"""Types for what a TOML file says. Every error is one sentence that begins with the key."""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

Scalar = str | int | float | bool


class ConfigError(ValueError):
    """A configuration says something that cannot be meant; the message names the key."""


@contextmanager
def naming_key(prefix: str) -> Iterator[None]:
    """What code that knows nothing of configurations has to say against a value, with the key in front."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None


@dataclass(frozen=True)
class Interval:
    """Where a number must lie. Without an upper end, it is only bounded below."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = True

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'>' if self.open_low else '≥'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


Positive = Annotated[float, Interval(0, open_low=True)]
NonNegative = Annotated[float, Interval(0)]
Fraction = Annotated[float, Interval(0, 1)]
Percentage = Annotated[float, Interval(0, 100, open_high=False)]
Count = Annotated[int, Interval(1)]
Natural = Annotated[int, Interval(0)]


@dataclass(frozen=True)
class Option:
    """A keyword argument of a function: its type and its default (``MISSING`` where it must be given)."""

    hint: Any
    default: Any = MISSING


def options_of(function: Callable[..., Any], skip: Iterable[str] = ()) -> dict[str, Option]:
    """The keyword arguments that a configuration may set, in the order of the signature."""
    target = function.__init__ if inspect.isclass(function) else function
    wanted = {name: p for name, p in inspect.signature(function).parameters.items() if name not in skip}
    # of the others the types need not even be known here
    annotations = types.SimpleNamespace(__annotations__={name: target.__annotations__[name] for name in wanted})
    hints = get_type_hints(annotations, target.__globals__, include_extras=True)
    return {name: Option(hints[name], MISSING if p.default is p.empty else p.default) for name, p in wanted.items()}


def read_options(options: Mapping[str, Option], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a table says about these options; only what it says."""
    refuse_unknown(options, table, where)
    return {key: convert(options[key].hint, value, f"{where}.{key}") for key, value in table.items()}


def read_table(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Make a dataclass of a table."""
    hints = get_type_hints(kind, include_extras=True)
    known = {f.name: Option(hints[f.name], f.default) for f in fields(kind)}
    for key, option in known.items():
        if option.default is MISSING and key not in table:
            raise ConfigError(f"{where}.{key} is missing: it must be {describe(option.hint)}")
    return kind(**read_options(known, table, where))


def sub_table(table: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    """The table under a key, empty where there is none."""
    inner = table.get(key, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{where}{key} must be a table, got {inner!r}")
    return inner


def refuse_unknown(known: Iterable[str], table: Mapping[str, Any], where: str) -> None:
    names = list(known)
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
            raise ConfigError(f"{f'{where}.' if where else ''}{key} is not known: {hint}")


def convert(hint: Any, value: Any, where: str) -> Any:
    """The value in the type of the hint (whole numbers do for floats), or an error that names ``where``."""
    for candidate in _candidates(hint):
        fits, converted = _fit(candidate, value)
        if fits:
            return converted
    raise ConfigError(f"{where} must be {describe(hint)}, got {value!r}")


def describe(hint: Any) -> str:
    """What a type asks for, in words."""
    return " or ".join(words for candidate in _candidates(hint) if (words := _words(candidate)))


def _candidates(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [inner for each in get_args(hint) for inner in _candidates(each)]
    return [hint]


def _fit(hint: Any, value: Any) -> tuple[bool, Any]:
    if get_origin(hint) is Annotated:
        base, interval = get_args(hint)
        fits, converted = _fit(base, value)
        return fits and converted in interval, converted
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint)), value
    if hint is float and type(value) is int:
        return True, float(value)
    return hint in (bool, int, float, str) and type(value) is hint, value  # True is no number here


def _words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, interval = get_args(hint)
        return f"{_words(base)} {interval}"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(hint, "")
