"""What the output of a network means: its loss, what counts as right, and how bad it is to know nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from ocnopt.lab.data import Dataset


@dataclass(frozen=True)
class Task:
    """What a network is trained to do.

    Attributes:
        loss: ``loss(output, y, reduction)``, of the samples of a batch, ``"mean"`` or ``"sum"``.
        hits: ``hits(output, y)``, how many answers are right; ``None`` where nothing is right or wrong, and the loss is
            the figure by which runs are compared.
        guessing: the loss of a network that knows nothing of a dataset.
    """

    loss: Callable[[Tensor, Tensor, str], Tensor]
    hits: Callable[[Tensor, Tensor], Tensor] | None
    guessing: Callable[[Dataset], float]


def loss_of(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of logits ``[B, …, classes]`` over all samples, and over all places where there are several."""
    return cross_entropy(output.flatten(0, -2), y.flatten(), reduction=reduction)


def _right(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=-1) == y).sum()


def negative_log_likelihood(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Of a network whose output is log p of every sample; the labels mean nothing."""
    return -(output.sum() if reduction == "sum" else output.mean())


def _of_standard_normal(dataset: Dataset) -> float:
    """The mean of −log N(x; 0, I) over data with mean 0 and deviation 1."""
    return 0.5 * math.prod(dataset.input_shape) * (1 + math.log(2 * math.pi))


CLASSIFICATION = Task(loss_of, _right, lambda dataset: math.log(len(dataset.classes)))
DENSITY = Task(negative_log_likelihood, None, _of_standard_normal)

#: by the task of the dataset; a text is a classification at every place
TASKS = {"classification": CLASSIFICATION, "text": CLASSIFICATION, "density": DENSITY}


def score(record: Mapping[str, Any], part: str = "test") -> float:
    """By what runs are compared, the larger the better: the accuracy or, where there is none, minus the loss."""
    accuracy, loss = record.get(f"{part}_accuracy"), record.get(f"{part}_loss")
    if accuracy is not None:
        return float(accuracy)
    return -math.inf if loss is None else -float(loss)  # a loss that is not finite is written as nothing


def show_score(record: Mapping[str, Any], part: str = "test") -> str:
    """The same in words."""
    accuracy, loss = record.get(f"{part}_accuracy"), record.get(f"{part}_loss")
    if accuracy is not None:
        return f"{part} accuracy {100 * accuracy:.2f} %"
    return f"{part} loss {'not finite' if loss is None else f'{loss:.4f}'}"
