from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from ocnopt.lab.data import Dataset, Normalisation, Split


def image_split(count: int) -> Split:
    values = torch.arange(count * 12, dtype=torch.uint8).reshape(count, 3, 2, 2)
    norm = Normalisation.of_bytes((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))
    return Split(values, torch.arange(count) % 2, normalisation=norm)


def series_split(count: int) -> Split:
    lengths = torch.arange(1, count + 1)
    mask = (torch.arange(count)[None] < lengths[:, None])[..., None]
    return Split(mask.float(), torch.arange(count) % 2, lengths, mask)


def dataset(train: Split, validation: Split | None = None) -> Dataset:
    return Dataset("Toy", "classification", train, image_split(4), validation, ("a", "b"), (3, 2, 2), "here")


def test_images_stay_bytes_and_are_normalised_per_channel_when_asked_for() -> None:
    part = image_split(5)
    assert part.values.dtype == torch.uint8
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in ((0.1, 0.2, 0.3), (0.5, 1.0, 2.0)))
    expected = (part.values.float() / 255 - mean) / std
    torch.testing.assert_close(part.x, expected)
    torch.testing.assert_close(part.batch(torch.tensor([3, 1])).x, expected[[3, 1]])
    torch.testing.assert_close(part[2][0], expected[2])


def test_a_batch_keeps_lengths_and_mask_of_its_samples() -> None:
    batch = series_split(4).batch(torch.tensor([2, 0]))
    assert batch.lengths is not None
    assert batch.mask is not None
    assert batch.lengths.tolist() == [3, 1]
    assert batch.mask.sum((1, 2)).tolist() == [3, 1]
    x, y = batch
    assert (x.shape, y.tolist(), len(batch)) == ((2, 4, 1), [0, 0], 2)
    moved = batch.to("cpu")
    assert moved.lengths is not None
    assert moved.lengths.tolist() == [3, 1]


def test_a_torch_data_loader_can_read_a_split() -> None:
    part = image_split(5)
    x, y = next(iter(DataLoader(part, batch_size=5)))  # type: ignore[arg-type]
    torch.testing.assert_close(x, part.x)
    assert y.tolist() == part.y.tolist()
    with pytest.raises(IndexError, match="index 5 is out of range for 5 samples"):
        part[5]


@pytest.mark.parametrize("name", ["values", "lengths", "mask"])
def test_parts_of_different_length_are_refused(name: str) -> None:
    parts = {"values": torch.zeros(3, 2, 1), "lengths": torch.ones(3), "mask": torch.ones(3, 2, 1)}
    parts[name] = parts[name][:2]
    with pytest.raises(ValueError, match=f"{name} has 2 rows but y has 3"):
        Split(y=torch.zeros(3, dtype=torch.long), **parts)


def test_with_validation_takes_a_stratified_part_of_train_and_says_so() -> None:
    data = dataset(image_split(20)).with_validation(0.2, seed=1)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (16, 4)
    assert data.validation.label_counts(2) == [2, 2]
    rows = torch.cat((data.train.values, data.validation.values)).flatten(1)
    assert len(rows.unique(dim=0)) == 20
    assert "Validation: 4 of the train samples, stratified, seed 1." in data.notes
    assert data.with_validation(0.5) is data


def test_limited_draws_samples_of_every_class_and_says_so() -> None:
    whole = dataset(image_split(20))
    ordered = replace(whole, train=whole.train.take(whole.train.y.argsort(stable=True)))  # sorted by class, as WINE is
    data = ordered.limited(train=6, test=100)
    assert data.train.label_counts(2) == [3, 3]
    kept = {tuple(row) for row in data.train.values.flatten(1).tolist()}
    assert len(kept & {tuple(row) for row in whole.train.values.flatten(1).tolist()}) == 6
    assert torch.equal(ordered.limited(train=6).train.values, data.train.values)
    assert len(data.test) == 4
    assert data.subset
    assert data.notes == ("Limited to 6 train and 4 test samples, stratified.",)
    assert whole.limited(train=20) is whole
    with pytest.raises(ValueError, match="test must be at least 1, got 0"):
        whole.limited(test=0)


def test_limited_text_has_no_classes_to_keep_apart() -> None:
    text = Split(torch.arange(20).reshape(10, 2), torch.arange(1, 21).reshape(10, 2))
    data = replace(dataset(image_split(20)), task="text", train=text).limited(train=4)
    assert data.train.y.shape == (4, 2)


def test_moving_a_dataset_moves_everything_a_batch_needs() -> None:
    data = dataset(image_split(6)).with_validation(0.5).to("meta")
    assert data.validation is not None
    for part in (data.train, data.validation, data.test):
        assert part.normalisation is not None
        tensors = (part.values, part.y, part.normalisation.scale, part.normalisation.shift)
        assert {t.device.type for t in tensors} == {"meta"}
    series = series_split(3).to("meta")
    assert series.lengths is not None
    assert series.mask is not None
    assert {series.lengths.device.type, series.mask.device.type} == {"meta"}
