"""How it was run: commands, versions, machine, settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ocnopt.lab.report.markup import Markup, element
from ocnopt.lab.report.reading import Run
from ocnopt.lab.report.settings import distinct
from ocnopt.lab.report.summary import runs_table, scrolling
from ocnopt.lab.report.text import count

#: Values of one setting that are written out; of more only the number and the ends.
WRITTEN_OUT = 8


def provenance(runs: Sequence[Run]) -> Markup:
    commands = list(dict.fromkeys(_command(run) for run in runs if run.environment.get("command")))
    environments = [{k: v for k, v in run.environment.items() if k not in ("command", "data")} for run in runs]
    missing = sum(not run.environment for run in runs)
    settings = _table([run.config for run in runs], "Settings")
    return element(
        "section",
        element("h2", "How it was run", id="how"),
        _commands(commands) if commands else None,
        element("h3", "Environment"),
        element("p", f"{count(missing, 'run')} without a record of it.") if missing else None,
        _table(environments, "Environment"),
        element("details", element("summary", "Settings: every value that occurs"), settings),
        element("details", element("summary", f"All runs ({len(runs)})"), runs_table(runs)),
    )


def _command(run: Run) -> str:
    command = run.environment["command"]
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command)


def _commands(commands: Sequence[str]) -> list[Markup]:
    shown = [element("pre", element("code", command)) for command in commands[:WRITTEN_OUT]]
    more = len(commands) - len(shown)
    rest = [element("p", f"and {count(more, 'command')} more")] if more else []
    return [element("h3", "Command" if len(commands) == 1 else "Commands"), *shown, *rest]


def _table(tables: Sequence[Mapping[str, Any]], label: str) -> Markup:
    rows = [
        element("tr", element("th", key, scope="row"), element("td", _values(values)))
        for key, values in distinct(tables).items()
    ]
    head = element("tr", element("th", "Key", scope="col"), element("th", "Value", scope="col"))
    return scrolling(element("table", element("thead", head), element("tbody", rows), class_="settings"), label)


def _values(values: Sequence[str]) -> str:
    ordered = sorted(values, key=_natural)
    if len(ordered) > WRITTEN_OUT:
        return f"{ordered[0]} … {ordered[-1]} ({len(ordered)} values)"
    return ", ".join(ordered)


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers by their size, before words."""
    try:
        return False, float(text.replace("−", "-")), text
    except ValueError:
        return True, 0.0, text
