"""What the experiments on games share: learning rates by held-out accuracy, and numbers of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TypeVar

from ocnopt.lab.config import RunConfig
from ocnopt.lab.reproduce.bench import Bench
from ocnopt.lab.runs import RunFolder

Key = TypeVar("Key")


def best_rates(bench: Bench, tried: Mapping[Key, Sequence[RunConfig]]) -> dict[Key, float]:
    """Train all of them; of each key, the learning rate with the best accuracy on held-out samples."""
    runs = iter(bench.train([config for configs in tried.values() for config in configs]))
    scores = {key: [(held_out_accuracy(next(runs)), config.optimizer.lr) for config in tried[key]] for key in tried}
    return {key: max(theirs, key=lambda score: score[0])[1] for key, theirs in scores.items()}


def held_out_accuracy(run: RunFolder) -> float:
    return float(run.metrics("epoch")[-1]["validation_accuracy"])


def test_accuracy(run: RunFolder) -> float:
    """Of a finished run on the test samples, in percent."""
    final = run.final()
    assert final is not None
    return 100 * float(final["test_accuracy"])


def losses(run: RunFolder) -> list[float]:
    """The training loss before each step that was logged; NaN where it was not finite."""
    return [float("nan") if record["loss"] is None else record["loss"] for record in run.metrics("step")]


def spread(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Mean and, where there are several, standard deviation."""
    text = f"{mean(values):{sign}.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"
