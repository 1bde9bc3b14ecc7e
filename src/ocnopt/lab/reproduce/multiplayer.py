"""Fictitious players: training and accuracy against their number N, and beside it a learning rate N times larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.tuning import best_rates, losses, spread, test_accuracy
from ocnopt.lab.reproduce.verdict import deviation, exceeds
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import ConfigError

PLAYERS = (1, 2, 4, 6)
# In the recursion as printed the kernels of natural gradients are so large that, at β = 1, the projection stops all
# layers but the last ones: hence a smaller β there.
CURVATURES: dict[str, dict[str, Any]] = {
    "identity": {"curvature": "identity", "gauss_newton": 1.0},
    "Gauss–Newton": {"curvature": "kronecker", "factor_every": 10, "gauss_newton": 0.1},
}
RATES = {"identity": (0.03, 0.1, 0.3), "Gauss–Newton": (3e-4, 1e-3, 3e-3)}


class Point(NamedTuple):
    """One setting: N players at a learning rate, or one player at N times that rate."""

    curvature: str
    N: int
    as_rate: bool = False

    @property
    def label(self) -> str:
        return f"{self.curvature}, {'lr times' if self.as_rate else 'players'} {self.N}"


Found = Mapping[Point, Sequence[RunFolder]]


def run(bench: Bench) -> Finding:
    """Tune the learning rate of one player; keep it for all others."""
    if bench.only:
        raise ConfigError("only means nothing here: this experiment has one part")
    seeds = bench.seeds(quick=2, full=3)
    alone = {name: Point(name, 1) for name in CURVATURES}
    rates = best_rates(
        bench, {name: [_config(point, lr, seeds[0], bench) for lr in RATES[name]] for name, point in alone.items()}
    )
    points = [Point(name, N, as_rate) for name in CURVATURES for as_rate in (False, True) for N in PLAYERS]
    points = [point for point in points if not (point.as_rate and point.N == 1)]
    runs = iter(bench.train([_config(p, rates[p.curvature], seed, bench) for p in points for seed in seeds]))
    found = {point: [next(runs) for _ in seeds] for point in points}
    figure = bench.folder / "multiplayer.png"
    _draw(figure, found)
    return Finding(
        title="Fictitious players",
        setting=_describe(bench, seeds, rates),
        data=[
            {**point._asdict(), "lr": rates[point.curvature], "finals": [run.final() for run in runs]}
            for point, runs in found.items()
        ],
        headings=("", "", *(f"N = {N}" for N in PLAYERS)),
        rows=[cells for name in CURVATURES for cells in _cells(name, found)],
        verdict=" ".join(_verdict(name, found) for name in CURVATURES),
        remarks=[
            "Mean ± standard deviation over seeds. In the paper, which shows curves and no numbers, more players train "
            "faster, and the accuracy rises up to some N and falls after it; N = 2 is recommended.",
            'With `bellman="consistent"` and without momentum and weight decay the two lines of a curvature would be '
            "the same, step for step: N players are a learning rate N times larger. Only with the recursion as the "
            'paper prints it, `bellman="paper"`, are they something else, and it is this one that is shown.',
        ],
        figures={figure.name: "Training loss against steps, and test accuracy against N"},
    )


def _config(point: Point, lr: float, seed: int, bench: Bench) -> RunConfig:
    game = {"bellman": "paper", "feedback": "nonlinear", "momentum": 0.0}
    optimizer: dict[str, Any] = {"name": "ocnopt", **CURVATURES[point.curvature], **game}
    optimizer |= {"lr": lr * point.N} if point.as_rate else {"lr": lr, "players": point.N}
    quick, full = ("DIGITS", 32, "fcn", 4), ("MNIST", 128, "cnn", 5)
    dataset, batch_size, network, epochs = quick if bench.quick else full
    table = {
        "label": point.label,
        "data": {"name": dataset, "batch_size": batch_size, "validation": 0.1},
        "network": {"name": network},
        "optimizer": optimizer,
        "training": {"epochs": epochs, "seed": seed, "log_every": 1},
    }
    return parse_run(bench.resized(table))


def _verdict(name: str, found: Found) -> str:
    """The paper's recommendation, against one player, and against one player at twice the rate."""
    claims = []
    for point, what in ((Point(name, 1), "one player"), (Point(name, 2, as_rate=True), "twice the learning rate")):
        pairs = zip(map(test_accuracy, found[Point(name, 2)]), map(test_accuracy, found[point]), strict=True)
        gap = [ours - theirs for ours, theirs in pairs]
        word = (
            ("better than" if mean(gap) > 0 else "worse than") if exceeds(mean(gap), deviation(gap)) else "level with"
        )
        claims.append(f"{word} {what} ({spread(gap, sign='+')} points)")
    return f"{name}: two players are {' and '.join(claims)}."


def _cells(name: str, found: Found) -> list[list[str]]:
    """Two lines: N players, and one player at N times the rate."""
    lines = []
    for as_rate in (False, True):
        runs = [found.get(Point(name, N, as_rate), found[Point(name, 1)]) for N in PLAYERS]
        cells = [spread([*map(test_accuracy, theirs)]) + f", loss {_last_loss(theirs)}" for theirs in runs]
        lines.append(["" if as_rate else name, "one player, lr × N" if as_rate else "N players", *cells])
    return lines


def _last_loss(runs: Sequence[RunFolder]) -> str:
    """The mean training loss of the last epoch."""
    values = [final["train_loss"] for run in runs if (final := run.final()) is not None]
    return "not finite" if None in values else f"{mean(values):.3f}"


def _draw(path: Path, found: Found) -> None:
    """A row per curvature: smoothed training loss on the left, accuracy against N on the right."""
    with figures.figure(path, len(CURVATURES), 2, 4.2, 3.0) as axes:
        for (left, right), name in zip(axes, CURVATURES, strict=True):
            _draw_losses(left, name, found)
            _draw_accuracies(right, name, found)
        for ax in axes[0]:
            ax.legend(fontsize=8)


def _draw_losses(ax: Any, name: str, found: Found) -> None:
    import numpy as np

    for N, color in zip(PLAYERS, ("#4477aa", "#228833", "#ee6677", "#aa3377"), strict=False):
        curve = [mean(step) for step in zip(*map(losses, found[Point(name, N)]), strict=False)]
        window = max(1, len(curve) // 25)
        smooth = np.convolve(curve, np.ones(window) / window, "valid")
        ax.plot(np.arange(window, len(curve) + 1), smooth, color=color, label=f"N = {N}")
    ax.set(yscale="log", ylabel=f"{name}\ntraining loss (smoothed)", xlabel="step")
    ax.grid(alpha=0.3)


def _draw_accuracies(ax: Any, name: str, found: Found) -> None:
    for as_rate, style, label in ((False, "o-", "N players"), (True, "s--", "one player, lr × N")):
        values = [[*map(test_accuracy, found.get(Point(name, N, as_rate), found[Point(name, 1)]))] for N in PLAYERS]
        ax.errorbar(PLAYERS, [*map(mean, values)], [*map(pstdev, values)], fmt=style, capsize=3, label=label)
    ax.set(ylabel="test accuracy %", xlabel="N", xticks=PLAYERS)
    ax.grid(alpha=0.3)


def _describe(bench: Bench, seeds: Sequence[int], rates: Mapping[str, float]) -> list[str]:
    config = _config(Point("identity", 1), 1.0, seeds[0], bench)
    chosen = "; ".join(f"{name}: {lr:g} of {', '.join(f'{r:g}' for r in RATES[name])}" for name, lr in rates.items())
    betas = ", ".join(f"{name}: β = {options['gauss_newton']:g}" for name, options in CURVATURES.items())
    return [
        f"Scale: {bench.scale}. {config.data.name}, {config.network.name}: {bench.samples(config.data)}, "
        f"{config.training.epochs} epochs, batch {config.data.batch_size}; seeds {', '.join(map(str, seeds))}.",
        'OCNOpt with `bellman="paper"`, nonlinear rollout, rank 1, no momentum; Gauss–Newton is the Kronecker '
        f"curvature, looked at every ten steps. {betas}.",
        "The learning rate is the one with the best accuracy of N = 1 on a tenth of the training samples, held out, "
        f"with the first seed, and the same for all N. {chosen}.",
    ]
