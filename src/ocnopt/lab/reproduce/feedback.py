"""The visualised feedback policy: which differences of the images the layers respond to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ocnopt.lab import data, models
from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.gain import Gain, leading_gains

#: pairs that look alike; the paper shows 7 and 1, 8 and 3
PAIRS = ((4, 9), (7, 1), (8, 3))
BATCH = 64


class _Part(NamedTuple):
    network: str
    dataset: str


PART = _Part("cnn", "MNIST")


def run(bench: Bench) -> Finding:
    """Train a CNN on MNIST, then decompose the gains of its layers on a batch of test images."""
    bench.select([PART])
    config = _config(bench)
    (folder,) = bench.train([config])
    dataset = bench.load(config.data)
    state = folder.load_checkpoint()
    assert state is not None  # it was trained just now
    options: dict[str, Any] = dict(config.network.options)
    network = models.build(config.network.name, dataset.input_shape, len(dataset.classes), **options)
    network.load_state_dict(state["network"])
    network.eval()
    x, y = _pairs(dataset)
    gains = leading_gains(network, x, y, lr=config.optimizer.lr)[1:]  # the input of the first layer never changes
    shown = _most_responsive(gains, y)
    figure = bench.folder / "feedback.png"
    figures.draw_gains(figure, x, y, _second_choice(network, x, y), gains, shown)
    return Finding(
        title="What the feedback policies respond to",
        setting=_describe(config, bench, folder.final() or {}),
        data=[_as_data(gain, y) for gain in gains],
        headings=("layer", "σ₁", "share of σ₁² in Σσ²", "samples with half of the weight"),
        rows=[_cells(gain) for gain in gains],
        verdict=_verdict(x, gains[0]),
        remarks=[
            "The leading right singular vector of the gain, projected to image space (δx_max). Each sample's part of "
            "it is the adjoint of the image times a number, which differs from layer to layer: so the picture is the "
            "same for all layers up to that number, and the bars show how much of a layer's vector it is. Red and blue "
            "pixels push in opposite directions. Each line is the image, of a pair of digits, that takes most part in "
            "the vector of the first layer above. The paper shows three such pictures and no numbers, and finds in "
            "them the differences between digits that look alike."
        ],
        figures={figure.name: "Images, and the differences that the layers respond to most"},
    )


def _config(bench: Bench) -> RunConfig:
    quick: dict[str, Any] = {"train_limit": 2500, "test_limit": 2000, "batch_size": 32}
    table = {
        "data": {"name": PART.dataset, **(quick if bench.quick else {"batch_size": 128})},
        "network": {"name": PART.network, **({"channels": 8, "hidden": 32} if bench.quick else {})},
        "optimizer": {"name": "ocnopt"},
        "training": {"epochs": 2 if bench.quick else 10, "seed": bench.seed},
    }
    return parse_run(bench.resized(table))


def _pairs(dataset: data.Dataset) -> tuple[Tensor, Tensor]:
    """Test images of the digits in question, as many of each."""
    digits = [digit for pair in PAIRS for digit in pair]
    rows = [(dataset.test.y == digit).nonzero()[: BATCH // len(digits), 0] for digit in digits]
    batch = dataset.test.batch(torch.cat(rows).sort().values)
    return batch.x, batch.y


def _most_responsive(gains: list[Gain], y: Tensor) -> list[int]:
    """For each pair of digits, the image with the largest part in the vector of the first layer."""
    part = gains[0].image.flatten(1).norm(dim=1)
    return [int(torch.where(torch.isin(y, torch.tensor(pair)), part, -1.0).argmax()) for pair in PAIRS]


@torch.no_grad()
def _second_choice(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The class that the network takes an image for, next to the true one."""
    output: Tensor = network(x)
    return output.scatter(1, y[:, None], -torch.inf).argmax(1)


def _verdict(x: Tensor, gain: Gain) -> str:
    """Whether the vector lies on what is drawn: as the paper sees it, or spread over the image."""
    drawn = x > x.amin(dim=(1, 2, 3), keepdim=True)
    on_strokes = float(gain.image.square()[drawn].sum() / gain.image.square().sum())
    area = float(drawn.float().mean())
    agrees = "this fits what the paper sees" if on_strokes > area else "unlike what the paper sees, it avoids them"
    return (
        f"{100 * on_strokes:.0f} % of the vector (of its square) lies on the strokes, which are {100 * area:.0f} % of "
        f"the pixels: {agrees}. Whether it shows the difference between two digits is for the eye to judge."
    )


def _as_data(gain: Gain, y: Tensor) -> dict[str, Any]:
    return {
        "layer": gain.layer,
        "singular_values": gain.singular_values.tolist(),
        "coefficients": gain.coefficients.tolist(),
        "labels": y.tolist(),
    }


def _cells(gain: Gain) -> list[str]:
    squares = gain.singular_values.square()
    weight = gain.state.flatten(1).square().sum(1).sort(descending=True).values.cumsum(0)
    half = int((weight < weight[-1] / 2).sum()) + 1
    return [
        gain.layer,
        f"{float(gain.singular_values[0]):.3g}",
        f"{100 * float(squares[0] / squares.sum()):.0f} %",
        f"{half} of {len(weight)}",
    ]


def _describe(config: RunConfig, bench: Bench, final: dict[str, Any]) -> list[str]:
    options = "".join(f", {key} = {value}" for key, value in config.network.options.items())
    return [
        f"Scale: {bench.scale}. {config.data.name}, {config.network.name}{options}: {bench.samples(config.data)}, "
        f"{config.training.epochs} epochs of OCNOpt at lr = {config.optimizer.lr:g}, seed {config.training.seed}; "
        f"test accuracy {100 * final['test_accuracy']:.2f} %.",
        f"Gains at rank B on {BATCH // 6 * 6} test images of the digits 4, 9, 7, 1, 8, 3, with identity curvature and "
        "β = 1.",
    ]
