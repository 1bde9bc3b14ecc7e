"""ResNet-18 (He et al. 2016) with the parameters of torchvision's: same names, shapes, order and initial
distribution.

A checkpoint of torchvision's ``resnet18`` loads into it and the other way round. Written as an
``nn.Sequential`` with torchvision's attribute names, so that what needs a chain of layers finds one.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from ocnopt.lab.models.plain import Shape, image_size


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalisation; the skip is a strided 1×1 convolution where the shape
    changes.
    """

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        # Drawn first and registered last, as in torchvision: the order in which initial weights are drawn is
        # part of it.
        downsample = None
        if stride != 1 or n_in != n_out:
            downsample = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        path = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(path + skip)
        return out


def resnet18(input_shape: Shape, classes: int) -> nn.Sequential:
    n_in, _, _ = image_size(input_shape, at_least=2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(n_in, 64, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    for number, (before, after, stride) in enumerate(
        [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)], start=1
    ):
        layers[f"layer{number}"] = nn.Sequential(BasicBlock(before, after, stride), BasicBlock(after, after))
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(512, classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
