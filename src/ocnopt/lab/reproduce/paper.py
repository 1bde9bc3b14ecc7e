"""What the paper reports: Table I (test accuracy in percent) and which curvature OCNOpt had in each row."""

from __future__ import annotations

from dataclasses import dataclass

#: the columns of Table I, by the names of the lab
COLUMNS = ("sgdm", "rmsprop", "adam", "ekfac", "emsa", "ddp", "ocnopt")


@dataclass(frozen=True)
class Row:
    """A row of Table I; a column that the paper leaves empty is not in ``accuracy``."""

    network: str
    dataset: str
    curvature: str
    accuracy: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.network}-{self.dataset}".lower()

    @property
    def recipe(self) -> str:
        """The recipe with the grids of the paper."""
        return f"table1-{self.name}"


def _row(network: str, dataset: str, curvature: str, *accuracy: float | None) -> Row:
    found = {column: value for column, value in zip(COLUMNS, accuracy, strict=True) if value is not None}
    return Row(network, dataset, curvature, found)


TABLE1 = (
    _row("fcn", "WINE", "adaptive", 94.35, 98.10, 98.13, 94.60, 93.56, 98.00, 98.18),
    _row("fcn", "DIGITS", "adaptive", 95.36, 94.33, 94.98, 95.24, 94.87, 91.68, 95.13),
    _row("fcn", "MNIST", "adaptive", 92.65, 91.89, 92.54, 92.73, 90.24, 90.42, 93.30),
    _row("fcn", "FMNIST", "adaptive", 82.49, 83.87, 84.36, 84.12, 82.04, 81.98, 84.98),
    _row("cnn", "MNIST", "adaptive", 97.94, 98.05, 98.04, 98.02, 96.48, None, 98.09),
    _row("cnn", "SVHN", "kronecker", 89.00, 88.41, 87.76, 90.63, 79.45, None, 90.70),
    _row("cnn", "CIFAR10", "kronecker", 71.26, 70.52, 70.04, 71.85, 61.42, None, 71.92),
    _row("residual", "MNIST", "kronecker", 98.65, 98.61, 98.49, 98.77, 98.25, None, 98.76),
    _row("residual", "SVHN", "kronecker", 88.58, 88.96, 89.20, 88.75, 87.40, None, 89.91),
    _row("resnet18", "CIFAR10", "adaptive", 82.94, 83.75, 85.66, 85.65, 75.60, None, 85.85),
    _row("resnet18", "CIFAR100", "kronecker", 71.78, 71.65, 71.96, 71.95, 62.63, None, 72.24),
    _row("inception", "MNIST", "identity", 97.96, 97.75, 97.72, 97.90, 97.39, None, 98.03),
    _row("inception", "SVHN", "kronecker", 87.61, 86.14, 86.84, 88.89, 82.68, None, 88.94),
    _row("inception", "CIFAR10", "kronecker", 76.66, 74.38, 75.38, 77.54, 70.17, None, 77.72),
)
