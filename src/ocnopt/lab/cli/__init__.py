"""The command ``ocnopt``.

Every entry of ``COMMANDS`` is a module with a function ``register(app)`` that adds its command or group of commands. A
new command is a new module and a line here.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = (
    "ocnopt.lab.cli.demo",
    "ocnopt.lab.cli.train",
    "ocnopt.lab.cli.compare",
    "ocnopt.lab.cli.sweep",
    "ocnopt.lab.cli.reproduce",
    "ocnopt.lab.cli.bench",
    "ocnopt.lab.cli.report",
    "ocnopt.lab.cli.data",
)


def make_app() -> typer.Typer:
    import typer

    app = typer.Typer(
        name="ocnopt",
        help="Train networks with OCNOpt and with what you use now, and see how they compare.",
        epilog="Start with: ocnopt demo",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in COMMANDS:
        import_module(command).register(app)
    return app


def main() -> None:
    try:
        app = make_app()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ocnopt"):
            raise
        sys.exit(f"ocnopt: the module {error.name} is missing; the command needs the lab: pip install 'ocnopt[lab]'")
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C: whoever started processes ends them, and runs can be continued."""
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt
