"""The networks of the paper's experiments (App. D) and two transformers, built from one seed.

``build`` is the only door: it draws the initial weights from its own random stream, so that every optimizer
in a comparison starts from the same point, whatever ran before it. Where the paper leaves a size open, the
choice made here is written beside it in ``plain.py``, ``branching.py`` and ``ode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ocnopt.lab.models.branching import InceptionBlock, ResidualBlock, inception, residual
from ocnopt.lab.models.ode import ODERNN, Flow, conv_ode, ffjord, ode_rnn
from ocnopt.lab.models.plain import cnn, fcn
from ocnopt.lab.models.resnet import BasicBlock, resnet18
from ocnopt.lab.models.transformer import Attention, TransformerBlock, gpt
from ocnopt.lab.models.vit import vit

__all__ = [
    "DENSITIES",
    "NETWORKS",
    "ODERNN",
    "READ_SERIES",
    "READ_TEXT",
    "Attention",
    "BasicBlock",
    "Flow",
    "InceptionBlock",
    "ResidualBlock",
    "TransformerBlock",
    "build",
    "cnn",
    "conv_ode",
    "fcn",
    "ffjord",
    "gpt",
    "inception",
    "ode_rnn",
    "residual",
    "resnet18",
    "vit",
]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "fcn": fcn,
    "cnn": cnn,
    "residual": residual,
    "resnet18": resnet18,
    "inception": inception,
    "vit": vit,
    "gpt": gpt,
    "conv_ode": conv_ode,
    "ode_rnn": ode_rnn,
    "ffjord": ffjord,
}

#: networks whose samples are characters, and not numbers that mean how much of something there is
READ_TEXT = frozenset({"gpt"})

#: networks of series with a channel that says where they were observed, see :func:`ocnopt.lab.data.irregular`
READ_SERIES = frozenset({"ode_rnn"})

#: networks that answer log p of every sample
DENSITIES = frozenset({"ffjord"})

# What is set by dataset. In the paper: hidden widths "from 10 to 32", tanh "to better distinguish between optimizers".
# Here: patches so small that 8×8 pixels are 16 of them.
_BY_DATASET: dict[str, dict[str, dict[str, Any]]] = {
    "fcn": {
        "wine": {"width": 10, "activation": "tanh"},
        "digits": {"width": 32, "activation": "tanh"},
        "mnist": {"width": 32, "activation": "relu"},
        "fmnist": {"width": 32, "activation": "relu"},
    },
    "vit": {"digits": {"patch": 2}},
    "conv_ode": {"digits": {"halvings": 1}},
    # of FFJORD: 20 times as many hidden units as dimensions
    "ffjord": {
        "gas": {"width": 160, "depth": 3, "activation": "tanh", "flows": 5, "trace": "rademacher"},
        "miniboone": {"width": 860, "depth": 2, "activation": "softplus", "trace": "rademacher"},
    },
}


def build(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    *,
    seed: int = 0,
    dataset: str | None = None,
    **options: Any,
) -> nn.Module:
    """A freshly initialised network; the same arguments always give the same weights.

    ``input_shape`` is the shape of one sample, without the batch dimension. ``dataset`` sets what
    depends on it (width and activation of the FCN, patches of the ViT, sizes of Neural ODEs); ``options`` go to the
    network's own function and win over it. The global random state is neither used nor moved.
    """
    if name not in NETWORKS:
        raise ValueError(f"name must be one of {', '.join(NETWORKS)}; got {name!r}")
    shape = tuple(int(n) for n in input_shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"input_shape must hold positive sizes; got {tuple(input_shape)}")
    if classes < 1 and name not in DENSITIES:
        raise ValueError(f"classes must be at least 1; got {classes}")
    settings = _BY_DATASET.get(name, {}).get(dataset.lower(), {}) if dataset is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name](shape, classes, **{**settings, **options})
