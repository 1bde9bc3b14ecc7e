"""Neural ODEs: the time of one iteration and the peak memory, as ratios to Adam measured in the same run.

    python benchmarks/ode.py --threads 2
    python benchmarks/ode.py --device cuda --rounds 20 --json ode.json

Networks and batch sizes of the paper's three applications, on random data of their shapes: images (28×28, batch 128),
time series (6 observations of 9 channels, batch 128) and a flow (FFJORD in two dimensions, batch 128). The lab's
ODE-RNN on 93 observations of 13 channels must be asked for (``--application long-series``). Contenders take turns. A
refresh of the curvature is timed by itself and spread over the steps between two of them, so that no hundred steps have
to be waited for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _report import markdown
from _training import environment
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.lab.models import build
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import ConcatConv2d, ConcatLinear, ConcatSquashLinear, TimeSequential

# A learning rate too small to do anything: the time must not depend on where training would lead.
RATE = 1e-7


def image_network() -> nn.Module:
    """Two convolutions that shrink the image, an ODE on 64 channels of 7×7, a linear classifier."""

    def norm() -> nn.Module:
        return nn.GroupNorm(32, 64)

    field = TimeSequential(
        norm(), nn.ReLU(), ConcatConv2d(64, 64, padding=1), norm(), nn.ReLU(), ConcatConv2d(64, 64, padding=1), norm()
    )
    return nn.Sequential(
        nn.Conv2d(1, 64, 4, 2, 1), norm(), nn.ReLU(), nn.Conv2d(64, 64, 4, 2, 1),
        NeuralODE(field, rtol=1e-3, atol=1e-3),
        norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class SeriesNetwork(nn.Module):
    """An ODE between observations, a gated unit at each of them."""

    def __init__(self, channels: int = 9, hidden: int = 64, observations: int = 6) -> None:
        super().__init__()
        field = TimeSequential(ConcatLinear(hidden, hidden), nn.Tanh(), ConcatLinear(hidden, hidden))
        self.ode = NeuralODE(field, t=(0.0, 1.0 / observations), rtol=1e-3, atol=1e-3)
        self.cell, self.head = nn.GRUCell(channels, hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for observation in x.unbind(1):
            state = self.cell(observation, self.ode(state))
        out: Tensor = self.head(state)
        return out


class FlowField(nn.Module):
    """dz/dt of a network and d log p/dt = −tr ∂(dz/dt)/∂z, exactly."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = TimeSequential(
            ConcatSquashLinear(2, width), nn.Tanh(), ConcatSquashLinear(width, width), nn.Tanh(),
            ConcatSquashLinear(width, 2),
        )  # fmt: skip

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        z = state[0] if torch.is_grad_enabled() else state[0].detach()
        with torch.enable_grad():
            z = z if z.requires_grad else z.requires_grad_()
            speed = self.net(t, z)
            rows = [torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(z.shape[1])]
        return speed, -torch.stack(rows).sum(0)


class FlowNetwork(nn.Module):
    """Minus the log-likelihood of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.ode = NeuralODE(FlowField(), t=(1.0, 0.0), rtol=1e-6, atol=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        z, change = self.ode((x, x.new_zeros(len(x))))
        return 0.5 * z.square().sum(1) + change


class Application(NamedTuple):
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: bool
    goal: float  # of the time ratio


APPLICATIONS = {
    "images": Application(image_network, (128, 1, 28, 28), True, 1.15),
    "series": Application(SeriesNetwork, (128, 6, 9), True, 1.15),
    "flow": Application(FlowNetwork, (128, 2), False, 1.6),
    # 13 channels and whether they were observed
    "long-series": Application(lambda: build("ode_rnn", (93, 14), 10), (128, 93, 14), True, 1.15),
}
USUAL = ("images", "series", "flow")
CONTENDERS = ("adam", "ocnopt")


class Training:
    """A network with its optimizer, ready to take steps."""

    def __init__(self, application: str, contender: str, device: torch.device, refresh: int) -> None:
        torch.manual_seed(0)
        made = APPLICATIONS[application]
        self.model = made.network().to(device)
        self.x = torch.randn(*made.shape, device=device)
        self.y = torch.randint(10, made.shape[:1], device=device) if made.labels else None
        self.device = device
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=RATE)
        if contender == "ocnopt":
            options: dict[str, Any] = {"refresh_every": refresh, "factor_every": refresh}
            self.optimizer = OCNOpt(self.model.parameters(), RATE, model=self.model, curvature="kronecker", **options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        out = self.model(self.x)
        loss = out.mean() if self.y is None else F.cross_entropy(out, self.y)
        loss.backward()
        self.optimizer.step()

    def timed(self) -> float:
        """Milliseconds of one step."""
        self._wait()
        start = time.perf_counter()
        self.step()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def next_refreshes(self) -> None:
        for group in self.optimizer.param_groups:
            group["refresh_every"] = 1

    def refresh_no_more(self, every: int) -> None:
        for group in self.optimizer.param_groups:
            group["refresh_every"] = every

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def times(application: str, device: torch.device, rounds: int, refresh: int) -> dict[str, Any]:
    """Milliseconds by contender, and the ratio of a whole period of refreshes."""
    trainings = {name: Training(application, name, device, refresh) for name in CONTENDERS}
    for training in trainings.values():
        for _ in range(3):
            training.timed()
    seen: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name in CONTENDERS[:: 1 if turn % 2 else -1]:  # nobody always follows the same neighbour's cache
            seen[name].append(trainings[name].timed())
    renewed = []
    for _ in range(3):
        trainings["ocnopt"].next_refreshes()
        renewed.append(trainings["ocnopt"].timed())
        trainings["ocnopt"].refresh_no_more(refresh)
        trainings["ocnopt"].timed()
    adam, plain, renewal = (statistics.median(v) for v in (seen["adam"], seen["ocnopt"], renewed))
    whole = ((refresh - 1) * plain + renewal) / refresh
    return {"adam_ms": adam, "step_ms": plain, "refresh_ms": renewal, "time_ratio": whole / adam}


def peak_memory(application: str, contender: str, device: torch.device, refresh: int) -> float:
    """MiB of three steps, the first with a refresh: what torch allocates on a GPU, else what the process grows by."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        training = Training(application, contender, device, refresh)
        for _ in range(3):
            training.step()
        return torch.cuda.max_memory_allocated(device) / 2**20
    command = [sys.executable, __file__, "--one", application, contender, "--refresh", str(refresh)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(application: str, contender: str, refresh: int) -> float:
    """In a process of its own, which has nothing in it but the imports."""
    torch.set_num_threads(1)
    before = _resident("VmRSS")
    training = Training(application, contender, torch.device("cpu"), refresh)
    for _ in range(3):
        training.step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """MiB of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--application", action="append", choices=list(APPLICATIONS), help=f"may be repeated; {USUAL}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--refresh", type=int, default=100, help="steps between two refreshes of the curvature")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--one", nargs=2, metavar=("APPLICATION", "CONTENDER"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.one:
        print(one(*arguments.one, arguments.refresh))
        return 0
    torch.set_num_threads(arguments.threads)
    device, rows = torch.device(arguments.device), []
    for name in arguments.application or USUAL:
        found = times(name, device, arguments.rounds, arguments.refresh)
        memory = {c: peak_memory(name, c, device, arguments.refresh) for c in CONTENDERS}
        rows.append({"application": name, **found, "goal": APPLICATIONS[name].goal, "memory_mib": memory})
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n")
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    header = [
        "application",
        "Adam ms",
        "step ms",
        "refresh ms",
        "time ratio",
        "goal",
        "Adam MiB",
        "MiB",
        "memory ratio",
    ]
    cells = [
        [
            r["application"],
            *(f"{r[key]:.1f}" for key in ("adam_ms", "step_ms", "refresh_ms")),
            f"{r['time_ratio']:.2f}",
            f"≤ {r['goal']}",
            *(f"{r['memory_mib'][c]:.0f}" for c in CONTENDERS),
            f"{r['memory_mib']['ocnopt'] / r['memory_mib']['adam']:.2f}",
        ]
        for r in rows
    ]
    return markdown(header, cells)


if __name__ == "__main__":
    sys.exit(main())
