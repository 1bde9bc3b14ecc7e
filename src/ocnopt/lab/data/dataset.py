"""The types that every loader returns: :class:`Dataset`, :class:`Split` and :class:`Batch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ocnopt.lab.data.splits import stratified_indices

Task = Literal["classification", "density", "text"]


@dataclass(frozen=True, eq=False)
class Normalisation:
    """``x = scale * values + shift``, broadcast over the samples."""

    scale: Tensor
    shift: Tensor

    @classmethod
    def of_bytes(cls, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
        """Bytes 0..255 to ``(values / 255 - mean) / std``, with one mean and deviation per channel."""
        m, s = (torch.tensor(v, dtype=torch.float64).reshape(-1, 1, 1) for v in (mean, std))
        return cls(scale=(1 / (255 * s)).float(), shift=(-m / s).float())

    def __call__(self, values: Tensor) -> Tensor:
        return torch.addcmul(self.shift, values.to(self.scale.dtype), self.scale)

    def to(self, device: torch.device | str) -> Normalisation:
        return Normalisation(self.scale.to(device), self.shift.to(device))


@dataclass(frozen=True, eq=False)
class Batch:
    """Some samples, ready for a network. ``lengths`` and ``mask`` are set for time series only."""

    x: Tensor
    y: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[Tensor]:
        """``x, y = batch``, as with the tuples of a torch ``DataLoader``."""
        return iter((self.x, self.y))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, non_blocking=non_blocking)

        return Batch(
            self.x.to(device, non_blocking=non_blocking),
            self.y.to(device, non_blocking=non_blocking),
            move(self.lengths),
            move(self.mask),
        )


@dataclass(frozen=True, eq=False)
class Split:
    """One part (train, validation or test) of a dataset.

    Images stay bytes until a batch is asked for: a float copy of CIFAR-10 is four times as large, and a sweep
    holds one per worker. ``values`` is what is stored, ``x`` what a network sees.

    Attributes:
        values: ``[N, *input_shape]``, uint8 (images), int64 (text) or float32.
        y: ``[N]`` int64 class numbers from 0; all 0 in a density task. Text: ``[N, T]``, the characters that follow.
        lengths: ``[N]`` int64, how many of the ``T`` steps of each time series are real; the rest is padding.
        mask: ``[N, T, D]`` bool, where a time series has a value. Elsewhere ``x`` is 0, the training mean.
        normalisation: from ``values`` to ``x``; None when ``values`` are normalised already.
    """

    values: Tensor
    y: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None
    normalisation: Normalisation | None = None

    def __post_init__(self) -> None:
        for name in ("values", "lengths", "mask"):
            part = getattr(self, name)
            if part is not None and len(part) != len(self.y):
                raise ValueError(f"{name} has {len(part)} rows but y has {len(self.y)}.")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, so that a torch ``DataLoader`` can be used as well."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples.")
        return self._normalised(self.values[index]), self.y[index]

    @property
    def x(self) -> Tensor:
        """All inputs, normalised, in one float tensor. Large for images: prefer :meth:`batch` there."""
        return self._normalised(self.values)

    def batch(self, indices: Tensor) -> Batch:
        part = self.take(indices)
        return Batch(part.x, part.y, part.lengths, part.mask)

    def take(self, indices: Tensor) -> Split:
        """The samples with these numbers, in this order."""
        return replace(
            self,
            values=self.values[indices],
            y=self.y[indices],
            lengths=None if self.lengths is None else self.lengths[indices],
            mask=None if self.mask is None else self.mask[indices],
        )

    def to(self, device: torch.device | str) -> Split:
        return Split(
            self.values.to(device),
            self.y.to(device),
            None if self.lengths is None else self.lengths.to(device),
            None if self.mask is None else self.mask.to(device),
            None if self.normalisation is None else self.normalisation.to(device),
        )

    def label_counts(self, classes: int) -> list[int]:
        """How many samples (in text: characters) each class has."""
        return torch.bincount(self.y.cpu().flatten(), minlength=classes).tolist()

    def _normalised(self, values: Tensor) -> Tensor:
        return values if self.normalisation is None else self.normalisation(values)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory.

    Attributes:
        name: as in the paper's tables, e.g. ``"CIFAR10"``.
        task: ``"classification"``, ``"density"`` (continuous normalizing flows; labels mean nothing), or ``"text"``
            (a class at every place of a sample: the character that follows).
        train, test, validation: the parts; most sets have no validation part of their own, see
            :meth:`with_validation`.
        classes: their names, in the order of the class numbers; empty for a density task.
        input_shape: of one sample: ``(C, H, W)``, ``(features,)``, ``(T, D)``, or ``(T,)`` of text.
        subset: whether samples of the published set are left out.
        notes: what a reader of results should know, one sentence each.
        source: the folder the files came from, or the library that made the data.
    """

    name: str
    task: Task
    train: Split
    test: Split
    validation: Split | None
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    source: str
    subset: bool = False
    notes: tuple[str, ...] = ()

    def with_validation(self, fraction: float = 0.1, seed: int = 0) -> Dataset:
        """Take a validation part out of train, class by class; a set that has one is left as it is."""
        if self.validation is not None:
            return self
        kept, held_out = stratified_indices(self.train.y.cpu(), fraction, seed)
        note = f"Validation: {len(held_out)} of the train samples, stratified, seed {seed}."
        return replace(
            self,
            train=self.train.take(kept),
            validation=self.train.take(held_out),
            notes=(*self.notes, note),
        )

    def limited(self, train: int | None = None, test: int | None = None) -> Dataset:
        """Only so many samples, for quick runs; says so in the notes.

        They are drawn class by class, in the proportions of the whole (some sets are sorted by class), with a seed of
        their own: always the same ones.
        """
        some_train, some_test = _some(self.train, train, "train"), _some(self.test, test, "test")
        if some_train is self.train and some_test is self.test:
            return self
        note = f"Limited to {len(some_train)} train and {len(some_test)} test samples, stratified."
        return replace(self, train=some_train, test=some_test, subset=True, notes=(*self.notes, note))

    def to(self, device: torch.device | str) -> Dataset:
        validation = None if self.validation is None else self.validation.to(device)
        return replace(self, train=self.train.to(device), test=self.test.to(device), validation=validation)


def _some(split: Split, count: int | None, name: str) -> Split:
    if count is None or count >= len(split):
        return split
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}.")
    classes = split.y.cpu() if split.y.dim() == 1 else torch.zeros(len(split))  # a sample of text is of no class
    _, drawn = stratified_indices(classes, count / len(split), seed=0)
    return split.take(drawn.to(split.y.device))
