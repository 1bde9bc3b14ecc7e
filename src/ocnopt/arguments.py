"""The hyper-parameters of :class:`ocnopt.OCNOpt`: what each may be, and which belong to the game as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from ocnopt.curvature import BY_NAME, Curvature
from ocnopt.games.alignment import rules_of

#: one value for all parameter groups: these describe the game, not a player
WHOLE_GAME = (
    "feedback",
    "rank",
    "gauss_newton",
    "bellman",
    "clamp",
    "maximize",
    "game",
    "alignment",
    "state",
    "accumulate",
    "graphed",
)


def _number(
    low: float, high: float = float("inf"), *, open_low: bool = False, open_high: bool = True
) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        above = value > low if open_low else value >= low
        return above and (value < high if open_high else value <= high)

    return check


_not_negative = _number(0.0)


def _is_lr(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return _not_negative(value)
    # looking at a number on another device would wait for it
    return value.numel() == 1 and (value.device.type != "cpu" or _not_negative(value.item()))


def _is_rank(value: Any) -> bool:
    return value == "full" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _flag_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bool)


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_is_lr, "a number ≥ 0 (Tensor lr must be 1-element)"),
    "curvature": (
        lambda v: isinstance(v, Curvature) or (isinstance(v, str) and v in BY_NAME),
        "one of 'identity', 'adaptive', 'kronecker' or a Curvature",
    ),
    "feedback": (_one_of("linear", "nonlinear", "off"), "'linear', 'nonlinear' or 'off'"),
    "rank": (_is_rank, "a whole number ≥ 1 or 'full'"),
    "gauss_newton": (_number(0.0, open_low=True), "a number > 0"),
    "bellman": (_one_of("consistent", "paper"), "'consistent' or 'paper'"),
    "game": (_one_of("cooperative", "noncooperative"), "'cooperative' or 'noncooperative'"),
    "alignment": (
        lambda v: rules_of(v) is not None,
        "'first', 'last', 'random', 'adaptive', a whole number ≥ 0, an Alignment, or a dict of these by module",
    ),
    "state": (_one_of("live", "accumulated"), "'live' or 'accumulated'"),
    "players": (_is_count, "a whole number ≥ 1"),
    "accumulate": (_is_count, "a whole number ≥ 1"),
    "clamp": (_flag, "True or False"),
    "momentum": (_number(0.0, 1.0), "a number in [0, 1)"),
    "ema": (_flag, "True or False"),
    "nesterov": (_flag, "True or False"),
    "weight_decay": (_number(0.0), "a number ≥ 0"),
    "decoupled_weight_decay": (_flag, "True or False"),
    "maximize": (_flag, "True or False"),
    "decay": (_number(0.0, 1.0), "a number in [0, 1)"),
    "eps": (_number(0.0), "a number ≥ 0"),
    "bias_correction": (_flag, "True or False"),
    "damping": (_number(0.0), "a number ≥ 0"),
    "factor_decay": (_number(0.0, 1.0), "a number in [0, 1)"),
    "factor_every": (_is_count, "a whole number ≥ 1"),
    "refresh_every": (_is_count, "a whole number ≥ 1"),
    "ekfac": (_flag, "True or False"),
    "fused": (_flag_or_none, "True, False or None"),
    "graphed": (_flag_or_none, "True, False or None"),
}

NAMES = tuple(_CHECKS)


def defaults_of(optimizer: type) -> dict[str, Any]:
    """What the arguments are where nobody says otherwise."""
    parameters = signature(optimizer.__init__).parameters  # type: ignore[misc]
    return {name: parameters[name].default for name in NAMES if name in parameters}


def check(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` that names the argument and shows the value."""
    for name in NAMES:
        _check_one(group, name)
    if group["nesterov"] and (group["ema"] or not group["momentum"]):
        raise ValueError(
            f"nesterov=True is heavy-ball momentum: it needs ema=False and momentum > 0, "
            f"got ema={group['ema']!r}, momentum={group['momentum']!r}"
        )


def check_lr(group: Mapping[str, Any]) -> None:
    """The one that changes at every step."""
    _check_one(group, "lr")


def _check_one(group: Mapping[str, Any], name: str) -> None:
    fits, wanted = _CHECKS[name]
    if not fits(group[name]):
        raise ValueError(f"{name} must be {wanted}, got {group[name]!r}")


def check_agreement(groups: Sequence[Mapping[str, Any]]) -> None:
    """The hyper-parameters of the whole game must be the same in all groups."""
    for name in WHOLE_GAME:
        for group in groups[1:]:
            if group[name] != groups[0][name]:
                raise ValueError(
                    f"{name} belongs to the whole game: all parameter groups need the same value, "
                    f"got {groups[0][name]!r} and {group[name]!r}"
                )


#: arguments without effect where no game is played, and their defaults
_OF_THE_GAME = {
    "rank": 1,
    "gauss_newton": 1.0,
    "bellman": "consistent",
    "clamp": True,
    "game": "cooperative",
    "alignment": "first",
}


def asks_for_a_game(given: Mapping[str, Any]) -> bool:
    """Was any argument given that only means something in a game?"""
    return any(given[name] != default for name, default in _OF_THE_GAME.items())


def alignment_matters(group: Mapping[str, Any]) -> bool:
    """Not where all layers get the same weight, which is what cooperation comes to when changes are predicted."""
    alike = group["feedback"] == "linear" and group["bellman"] == "consistent" and group["game"] == "cooperative"
    return group["feedback"] != "off" and not alike


def why_model(group: Mapping[str, Any]) -> str | None:
    """Which argument of a group cannot do without the model, or ``None``."""
    if (why := _why_calls(group)) is not None:
        return why
    if group["game"] == "noncooperative" and group["feedback"] != "off":
        return "game='noncooperative'"
    if rules_of(group["alignment"]) != rules_of("first") and alignment_matters(group):
        return f"alignment={group['alignment']!r}"
    return None


def why_together(group: Mapping[str, Any]) -> str | None:
    """Which argument of a group needs more than ``p.grad`` of processes that train one network, or ``None``."""
    return _why_calls(group) or why_drawn(group, "random", "adaptive")


def why_not_together(group: Mapping[str, Any]) -> str | None:
    """Which argument of a group processes that train one network cannot have, or ``None``."""
    curvature = _curvature(group)
    if curvature.needs_model and not curvature.adds_up:
        return f"curvature={curvature.name!r} does not add up what it reads over the processes"
    if (why := why_drawn(group, "adaptive")) is not None:
        return f"{why} would get another reward in each process"
    return None


def why_drawn(group: Mapping[str, Any], *rules: str) -> str | None:
    """Is the alignment drawn by chance?"""
    drawn = any(each.rule in rules for each in (rules_of(group["alignment"]) or {}).values())
    return f"alignment={group['alignment']!r}" if drawn and alignment_matters(group) else None


def _curvature(group: Mapping[str, Any]) -> Curvature:
    curvature = group["curvature"]
    return BY_NAME[curvature] if isinstance(curvature, str) else curvature


def _why_calls(group: Mapping[str, Any]) -> str | None:
    """Which argument of a group reads what layers and samples do, or ``None``."""
    curvature = _curvature(group)
    if curvature.needs_model:
        return f"curvature={curvature.name!r}"
    if group["feedback"] == "nonlinear":
        return "feedback='nonlinear'"
    if group["feedback"] != "off" and group["rank"] != 1:
        return f"rank={group['rank']!r}"
    return None
