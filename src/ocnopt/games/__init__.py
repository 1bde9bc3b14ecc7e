"""Networks that are not chains, as dynamic games between their layers.

The optimizer finds the game by itself (``optimizer.game``). Here are the parts that a user or a researcher handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ocnopt.games.alignment import Alignment
    from ocnopt.games.bandit import EXP3, UCB1, Bandit, EXP3PlusPlus
    from ocnopt.games.game import Game, Stage

__all__ = ["EXP3", "UCB1", "Alignment", "Bandit", "EXP3PlusPlus", "Game", "Stage"]

_HOME = {"Alignment": "alignment", "Game": "game", "Stage": "game"}


def __getattr__(name: str) -> Any:
    # the tape of the engine needs the data flow, and the game needs the tape: nothing is imported before it is wanted
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'bandit')}"), name)
