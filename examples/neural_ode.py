"""A Neural ODE that tells two nested rings apart, trained with second-order curvature along its solve."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import ConcatLinear, TimeSequential


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Points at radius 1 or 2, and which of the two it is."""
    label = torch.randint(2, (count,))
    angle, radius = 6.2832 * torch.rand(count), 1.0 + label + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


torch.manual_seed(0)
field = TimeSequential(ConcatLinear(3, 32), nn.Tanh(), ConcatLinear(32, 3))
block = NeuralODE(field, t=(0.0, 1.0), solver="dopri5", gradient="adjoint")
model = nn.Sequential(nn.Linear(2, 3), block, nn.Linear(3, 2))
optimizer = OCNOpt(model.parameters(), lr=0.01, model=model, curvature="kronecker", refresh_every=20)

for step in range(101):
    x, label = rings(128)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), label)
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}  {block.nfe}")
        block.nfe.reset()

x, label = rings(1000)
with torch.no_grad():
    print(f"accuracy {100 * (model(x).argmax(1) == label).float().mean():.1f} %")
optimizer.summary()
