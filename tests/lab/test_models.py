"""The networks: their shapes, their sizes and their seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ocnopt.lab.models import NETWORKS, BasicBlock, InceptionBlock, ResidualBlock, build

IMAGE = (3, 32, 32)
NO_IMAGE = {"gpt": (16,), "ode_rnn": (12, 4), "ffjord": (5,)}


def kinds(model: nn.Module, *types: type[nn.Module]) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, types)]


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in NO_IMAGE])
@pytest.mark.parametrize("shape", [(1, 28, 28), IMAGE], ids=str)
def test_every_network_maps_a_batch_to_logits(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    shape = NO_IMAGE.get(name, IMAGE)
    torch.manual_seed(1)
    first = build(name, shape, 10, seed=5).state_dict()
    torch.manual_seed(2)
    second, other = build(name, shape, 10, seed=5).state_dict(), build(name, shape, 10, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first[next(iter(first))], other[next(iter(other))])


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build("fcn", (4,), 2, seed=9)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("dataset", "inputs", "classes", "width", "activation"),
    [
        ("WINE", 13, 3, 10, nn.Tanh),
        ("DIGITS", 64, 10, 32, nn.Tanh),
        ("MNIST", 784, 10, 32, nn.ReLU),
        ("FMNIST", 784, 10, 32, nn.ReLU),
    ],
)
def test_fcn_of_each_dataset(dataset: str, inputs: int, classes: int, width: int, activation: type[nn.Module]) -> None:
    model = build("fcn", (inputs,), classes, dataset=dataset)
    shapes = [(m.in_features, m.out_features) for m in kinds(model, nn.Linear)]
    assert shapes == [(inputs, width), (width, width), (width, width), (width, width), (width, classes)]
    assert [type(m) for m in kinds(model, nn.Tanh, nn.ReLU)] == [activation] * 4


def test_options_win_over_the_dataset() -> None:
    model = build("fcn", (64,), 10, dataset="DIGITS", width=5, activation="relu")
    assert kinds(model, nn.Linear)[0].out_features == 5
    assert not kinds(model, nn.Tanh)


def test_cnn_has_four_convolutions_and_two_fully_connected_layers() -> None:
    model = build("cnn", (1, 28, 28), 10)
    layers = kinds(model, nn.Conv2d, nn.Linear)
    assert [type(m) for m in layers] == [nn.Conv2d] * 4 + [nn.Linear] * 2
    assert all(m.kernel_size == (3, 3) and m.out_channels == 32 for m in layers[:4])


def test_residual_has_identity_and_projection_skips() -> None:
    blocks = kinds(build("residual", (1, 28, 28), 10), ResidualBlock)
    assert [type(b.skip) for b in blocks] == [nn.Identity, nn.Conv2d, nn.Conv2d]
    assert [len(kinds(b.path, nn.Conv2d)) for b in blocks] == [3, 3, 3]
    assert len(kinds(build("residual", IMAGE, 10, blocks=1), ResidualBlock)) == 1
    (block,) = kinds(build("residual", IMAGE, 10, blocks=1, projection=True), ResidualBlock)
    assert isinstance(block.skip, nn.Conv2d)


@pytest.mark.parametrize("projection", [False, True])
def test_residual_block_computes_the_figure(projection: bool) -> None:
    block = ResidualBlock(4, 4, projection=projection)
    z = torch.randn(2, 4, 6, 6)
    f1, _, f2, _, f3 = block.path
    skip = block.skip(z) if projection else z
    assert torch.equal(block(z), torch.relu(f3(torch.relu(f2(torch.relu(f1(z))))) + skip))


def test_inception_block_has_four_paths_of_different_kernel_sizes() -> None:
    model = build("inception", (1, 28, 28), 10)
    (block,) = kinds(model, InceptionBlock)
    assert [path.kernel_size for path in block.paths] == [(1, 1), (3, 3), (5, 5), (7, 7)]
    z = torch.randn(2, 32, 14, 14)
    assert torch.equal(block(z), torch.relu(torch.cat([path(z) for path in block.paths], dim=1)))
    outside = [m for m in model if isinstance(m, nn.Conv2d | InceptionBlock | nn.Linear)]
    assert [type(m) for m in outside] == [nn.Conv2d, InceptionBlock, nn.Conv2d, nn.Linear, nn.Linear]


def torchvision_resnet18() -> dict[str, tuple[int, ...]]:
    """Names and shapes of ``torchvision.models.resnet18().state_dict()``, in order."""
    expected: dict[str, tuple[int, ...]] = {}

    def batch_norm(name: str, n: int) -> None:
        expected.update({f"{name}.{part}": (n,) for part in ("weight", "bias", "running_mean", "running_var")})
        expected[f"{name}.num_batches_tracked"] = ()

    expected["conv1.weight"] = (64, 3, 7, 7)
    batch_norm("bn1", 64)
    for layer, n in enumerate([64, 128, 256, 512], start=1):
        for block in (0, 1):
            n_in = n // 2 if block == 0 and layer > 1 else n
            prefix = f"layer{layer}.{block}"
            expected[f"{prefix}.conv1.weight"] = (n, n_in, 3, 3)
            batch_norm(f"{prefix}.bn1", n)
            expected[f"{prefix}.conv2.weight"] = (n, n, 3, 3)
            batch_norm(f"{prefix}.bn2", n)
            if n_in != n:
                expected[f"{prefix}.downsample.0.weight"] = (n, n_in, 1, 1)
                batch_norm(f"{prefix}.downsample.1", n)
    expected["fc.weight"] = (1000, 512)
    expected["fc.bias"] = (1000,)
    return expected


def test_resnet18_is_torchvisions_name_by_name() -> None:
    model = build("resnet18", (3, 224, 224), 1000)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == torchvision_resnet18()
    assert list(model.state_dict()) == list(torchvision_resnet18())
    assert len(list(model.parameters())) == 62
    assert sum(p.numel() for p in model.parameters()) == 11_689_512


def test_resnet18_starts_as_torchvisions_does() -> None:
    model = build("resnet18", IMAGE, 1000)
    for conv in kinds(model, nn.Conv2d):
        fan_out = conv.out_channels * math.prod(conv.kernel_size)
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
        assert conv.weight.abs().max() > 3 * conv.weight.std()  # normal, not uniform
    for norm in kinds(model, nn.BatchNorm2d):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert torch.equal(norm.bias, torch.zeros_like(norm.bias))
    bound = 1 / math.sqrt(512)
    assert bound * 0.99 < model.fc.weight.abs().max() <= bound
    assert bound * 0.95 < model.fc.bias.abs().max() <= bound


def test_resnet18_strides_where_torchvision_strides() -> None:
    blocks = kinds(build("resnet18", IMAGE, 10), BasicBlock)
    assert [b.conv1.stride[0] for b in blocks] == [1, 1, 2, 1, 2, 1, 2, 1]
    assert all(b.conv2.stride == (1, 1) for b in blocks)
    assert [b.downsample is not None for b in blocks] == [False, False, True, False, True, False, True, False]


def test_basic_block_adds_the_skip_before_the_last_relu() -> None:
    block = BasicBlock(4, 4).eval()
    with torch.no_grad():
        block.bn2.weight.zero_()
        x = torch.randn(2, 4, 5, 5)
        assert torch.equal(block(x), torch.relu(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mlp", (4,), 2), r"name must be one of fcn, cnn, .*, ffjord; got 'mlp'"),
        (("fcn", (), 2), "input_shape must hold positive sizes"),
        (("fcn", (4,), 0), "classes must be at least 1; got 0"),
        (("cnn", (64,), 10), r"input_shape must be \(channels, height, width\)"),
        (("inception", (1, 3, 3), 10), "height and width of at least 4"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="activation must be one of relu, tanh, softplus; got 'gelu'"):
        build("fcn", (4,), 2, activation="gelu")
    with pytest.raises(ValueError, match="projection must not be False where the shape changes"):
        ResidualBlock(4, 8, projection=False)
