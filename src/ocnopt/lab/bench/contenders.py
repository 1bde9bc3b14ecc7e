"""Who is timed: the optimizers of a benchmark, by names that can be typed.

``sgd``, ``adam``, ``adamw``, ``ekfac``, ``ekfac-captured``, ``muon``, ``soap``, ``shampoo``, and OCNOpt as
``CURVATURE-off``, ``CURVATURE-linear-RANK`` or ``CURVATURE-nonlinear-RANK``, where the rank is a number or ``full``.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ocnopt import OCNOpt
from ocnopt.baselines import EKFAC
from ocnopt.lab.optimizers import AnyOptimizer, MuonAdamW
from ocnopt.lab.schema import ConfigError

#: too small to do anything: the time must not depend on where training would lead
RATE = 1e-5
#: steps between two refreshes of whatever is costly and changes slowly
REFRESH = 100

CURVATURES = ("identity", "adaptive", "kronecker")
RANKS = ("1", "8", "full")

#: (model, is it going to be captured in a CUDA graph?)
Make = Callable[[nn.Module, bool], AnyOptimizer]


@dataclass(frozen=True)
class Contender:
    """An optimizer as a benchmark starts it.

    Attributes:
        name: as it is typed.
        title: as tables call it.
        make: builds it.
        interval: its option that says how many steps there are from one refresh to the next, if it has any.
        package: what it comes from, where that is not torch.
        why_eager: why no CUDA graph can make its steps, if that is so.
        captured: the contender whose steps are the same, and which a CUDA graph can make, if there is one.
        game: curvature, feedback and rank, of OCNOpt.
    """

    name: str
    title: str
    make: Make = field(repr=False)
    interval: str | None = None
    package: str | None = None
    game: tuple[str, str, str] | None = None
    why_eager: str | None = None
    captured: str | None = None

    @property
    def why_missing(self) -> str | None:
        """Why it cannot run here, or ``None``."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return (
            f"{self.title} is left out: it comes from the package {self.package.replace('_', '-')}, not installed here"
        )

    @property
    def rank(self) -> str | None:
        """A number or ``full``; ``None`` where there is no rank."""
        return None if self.game is None or self.game[1] == "off" else self.game[2]

    def with_rank(self, rank: int) -> Contender | None:
        """The same game at another rank, or ``None`` where there is no rank."""
        if self.game is None or self.rank is None:
            return None
        return _game(self.game[0], self.game[1], str(rank))

    def at(self, batch: int) -> Contender:
        """With a title that tells the rank it has there: none is larger than the batch."""
        if self.rank in (None, "full") or int(self.rank) <= batch:
            return self
        return replace(self, title=f"{self.title} ({batch} at batch {batch})")


def set_interval(optimizer: AnyOptimizer, option: str, steps: int) -> None:
    """Wherever the optimizer keeps it: in its groups, in the state of its parameters, or beside both."""
    for own in (*optimizer.param_groups, *getattr(optimizer, "state", {}).values()):
        if option in own:
            own[option] = steps
    if hasattr(optimizer, option):
        setattr(optimizer, option, steps)


def _sgd(model: nn.Module, captured: bool) -> AnyOptimizer:
    return torch.optim.SGD(model.parameters(), RATE, 0.9, fused=captured or None)


def _adam(model: nn.Module, captured: bool) -> AnyOptimizer:
    return torch.optim.Adam(model.parameters(), RATE, fused=True, capturable=captured)


def _adamw(model: nn.Module, captured: bool) -> AnyOptimizer:
    return torch.optim.AdamW(model.parameters(), RATE, capturable=captured)


def _ekfac(model: nn.Module, captured: bool) -> AnyOptimizer:
    return EKFAC(model.parameters(), RATE, model=model, momentum=0.9, refresh_every=REFRESH)


def _ekfac_captured(model: nn.Module, captured: bool) -> AnyOptimizer:
    """OCNOpt without feedback is EKFAC, up to momentum and norm layers, and graphs can make its steps."""
    options: dict[str, Any] = {"momentum": 0.9, "ema": False, "damping": 1e-2, "factor_decay": 0.95}
    return OCNOpt(
        model.parameters(), RATE, model=model, curvature="kronecker", feedback="off", refresh_every=REFRESH, **options
    )


def _muon(model: nn.Module, captured: bool) -> AnyOptimizer:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return MuonAdamW(model.parameters(), RATE, 0.95, 0.01, tables)


def _elsewhere(package: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module, captured: bool) -> AnyOptimizer:
        made: AnyOptimizer = getattr(import_module(package), name)(model.parameters(), lr=RATE, **options)
        return made

    return make


def _game(curvature: str, feedback: str, rank: str) -> Contender:
    options: dict[str, Any] = {"curvature": curvature, "feedback": feedback}
    if feedback != "off":
        options["rank"] = rank if rank == "full" else int(rank)

    def make(model: nn.Module, captured: bool) -> AnyOptimizer:
        return OCNOpt(model.parameters(), RATE, model=model, refresh_every=REFRESH, **options)

    name, title = f"{curvature}-{feedback}", f"OCNOpt {curvature}, {feedback}"
    if feedback != "off":
        name, title = f"{name}-{rank}", f"{title} r={rank}"
    interval = "refresh_every" if curvature == "kronecker" else None
    return Contender(name, title, make, interval, game=(curvature, feedback, rank))


_COUNTS = "it counts its steps in Python, to know when a refresh is due"

_OTHERS = (
    Contender("sgd", "SGD", _sgd),
    Contender("sgd-again", "SGD again", _sgd),  # shows the noise
    Contender("adam", "Adam (fused)", _adam),
    Contender("adamw", "AdamW", _adamw),
    Contender("muon", "Muon + AdamW", _muon, why_eager="it is two optimizers, and a graph is about one"),
    Contender("ekfac", "EKFAC", _ekfac, "refresh_every", why_eager=_COUNTS, captured="ekfac-captured"),
    Contender("ekfac-captured", "EKFAC (OCNOpt kronecker, off)", _ekfac_captured, "refresh_every"),
    Contender(
        "soap",
        "SOAP",
        _elsewhere("pytorch_optimizer", "SOAP", precondition_frequency=REFRESH),
        "precondition_frequency",
        "pytorch_optimizer",
        why_eager=_COUNTS,
    ),
    Contender(
        "shampoo",
        "Shampoo",
        _elsewhere("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=REFRESH),
        "preconditioning_compute_steps",
        "pytorch_optimizer",
        why_eager=_COUNTS,
    ),
)
_GAMES = [
    _game(curvature, feedback, rank)
    for curvature in CURVATURES
    for feedback in ("off", "linear", "nonlinear")
    for rank in (RANKS if feedback != "off" else RANKS[:1])
]
CONTENDERS = {contender.name: contender for contender in (*_OTHERS, *_GAMES)}

#: what ratios are to
BASELINES = ("sgd", "adam")
#: those of a benchmark that names none
USUAL = (
    *BASELINES,
    "identity-linear-1",
    "identity-nonlinear-1",
    "identity-nonlinear-8",
    "adaptive-linear-1",
    "adaptive-nonlinear-1",
    "muon",
    "ekfac",
    "kronecker-nonlinear-1",
)

_PLAYED = re.compile(rf"({'|'.join(CURVATURES)})-(linear|nonlinear)-([1-9]\d*)")


def find(pattern: str) -> list[Contender]:
    """The contenders of a name, of a pattern such as ``identity-*``, or ``all`` of them."""
    if (played := _PLAYED.fullmatch(pattern)) is not None:  # any rank will do
        return [_game(*played.groups())]
    found = [c for name, c in CONTENDERS.items() if fnmatchcase(name, "*" if pattern == "all" else pattern)]
    if not found:
        close = difflib.get_close_matches(pattern, CONTENDERS, 1)
        raise ConfigError(
            f"optimizer must be all, a pattern, or one of {', '.join(CONTENDERS)} (any number in the place of 8); "
            f"got {pattern!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        )
    return found


def with_captured(contenders: Iterable[Contender]) -> list[Contender]:
    """Beside each that no graph can make steps of, the one that takes its place in graphs."""
    found = {}
    for contender in contenders:
        found[contender.name] = contender
        if contender.captured is not None:
            found[contender.captured] = CONTENDERS[contender.captured]
    return list(found.values())


def choose(patterns: Iterable[str]) -> tuple[list[Contender], list[str]]:
    """The contenders that run, baselines first since ratios are to them; and a sentence for each that cannot."""
    asked = [*map(CONTENDERS.__getitem__, BASELINES), *(c for pattern in patterns for c in find(pattern))]
    every = {contender.name: contender for contender in asked}.values()
    reasons = [why for contender in every if (why := contender.why_missing) is not None]
    return [contender for contender in every if contender.why_missing is None], reasons
