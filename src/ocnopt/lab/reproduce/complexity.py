"""Run time and memory of a step against the batch size. No data is needed: the inputs are random numbers."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ocnopt.lab import models
from ocnopt.lab.optimizers import read_optimizer
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.trainer import take_step

METHODS: dict[str, dict[str, Any]] = {
    "SGDm": {"name": "sgdm"},
    "Adam": {"name": "adam"},
    "EKFAC": {"name": "ekfac"},
    "E-MSA": {"name": "emsa"},
    "OCNOpt": {"name": "ocnopt"},
    "OCNOpt, nonlinear": {"name": "ocnopt", "feedback": "nonlinear"},
    "OCNOpt, nonlinear, Kronecker": {"name": "ocnopt", "feedback": "nonlinear", "curvature": "kronecker"},
}


#: fewer than there are between two eigendecompositions
MOST_STEPS = 50


@dataclass(frozen=True)
class Panel:
    """One panel of the figure: a network with inputs of the shape of a dataset."""

    network: str
    dataset: str
    shape: tuple[int, ...]
    classes: int
    sizes: tuple[int, ...]


QUICK = (Panel("cnn", "MNIST", (1, 28, 28), 10, (8, 32, 128)),)
FULL = (
    Panel("cnn", "MNIST", (1, 28, 28), 10, (16, 32, 64, 128, 256, 512, 1024)),
    Panel("resnet18", "CIFAR100", (3, 32, 32), 100, (16, 32, 64, 128, 256, 512)),
)


@dataclass(frozen=True)
class Cell:
    """One measurement. ``megabytes``: what the steps took beyond the network; ``None`` where it cannot be measured."""

    network: str
    method: str
    batch_size: int
    seconds: float | None
    megabytes: float | None
    error: str | None = None


def run(bench: Bench) -> Finding:
    """Measure every cell in a process of its own: memory that one leaves behind must not be another's."""
    panels = bench.select(QUICK if bench.quick else FULL)
    if bench.epochs is not None or bench.train_limit is not None:
        raise ConfigError("epochs and train_limit mean nothing here: single steps are measured, on random inputs")
    sizes = sorted({size for panel in panels for size in panel.sizes})
    steps = 5 if bench.quick else 10
    places = [(panel, method, size) for panel in panels for method in METHODS for size in panel.sizes]
    cells: list[Cell] = []
    for panel, method, size in places:
        cells.append(_measure_apart(panel, method, size, steps, bench.device))
        bench.tell(f"{panel.network}, {method}, batch {size}: {_text(cells[-1])}")
        bench.count("measurements", len(cells), len(places))
    figure = bench.folder / "complexity.png"
    figures.draw_complexity(figure, [f"{p.dataset}, {p.network}" for p in panels], [_lines(p, cells) for p in panels])
    threads = 1 if bench.device == "cpu" else 0
    return Finding(
        title="Run time and memory against batch size",
        setting=[
            f"Scale: {bench.scale}. Device {bench.device}{', one thread' if threads else ''}; the fastest of at "
            f"least {steps} steps (as many as fit into a second) after one that is not counted; network and optimizers "
            "with default arguments. Eigendecompositions, every hundredth step of Kronecker curvature, are not among "
            "the steps.",
            "Memory is the peak during these steps less what the process held before them: activations, gradients and "
            "everything that the optimizer keeps.",
        ],
        data=[asdict(cell) for cell in cells],
        headings=("ms per step, MB", "method", *(f"batch {size}" for size in sizes)),
        rows=[
            [f"{panel.dataset}, {panel.network}", method, *(_at(cells, panel, method, size) for size in sizes)]
            for panel in panels
            for method in METHODS
        ],
        verdict=" ".join(_verdict(panel, cells) for panel in panels),
        remarks=[
            "The paper draws these curves on log-log axes and gives no numbers but one: the run time of OCNOpt is that "
            "of EKFAC ± 40 %. On smaller networks it finds run times comparable to those of first-order methods, with "
            "a minor increase in memory."
        ],
        figures={figure.name: "Seconds and megabytes per step against batch size"},
    )


def _of(cells: list[Cell], panel: Panel, method: str) -> list[Cell]:
    return [cell for cell in cells if cell.network == panel.network and cell.method == method]


def _verdict(panel: Panel, cells: list[Cell]) -> str:
    """OCNOpt against Adam and, with the same curvature, against EKFAC: at the largest batch that all managed."""
    names = ("Adam", "OCNOpt", "OCNOpt, nonlinear", "EKFAC", "OCNOpt, nonlinear, Kronecker")
    by_size = {size: [c for c in cells if (c.network, c.batch_size) == (panel.network, size)] for size in panel.sizes}
    times = {size: {c.method: c.seconds for c in found if c.seconds} for size, found in by_size.items()}
    sizes = [size for size in panel.sizes if set(names) <= set(times[size])]
    if not sizes:
        return f"{panel.dataset}, {panel.network}: not all methods ran at one batch size."
    adam, linear, nonlinear, ekfac, kronecker = (times[sizes[-1]][name] for name in names)
    ratio = kronecker / ekfac
    agrees = "within the paper's ± 40 %" if 0.6 <= ratio <= 1.4 else "outside the paper's ± 40 %"
    return (
        f"{panel.dataset}, {panel.network}, batch {sizes[-1]}: a step of OCNOpt takes {linear / adam:.1f} times as "
        f"long as one of Adam, with the nonlinear rollout {nonlinear / adam:.1f} times; with Kronecker curvature "
        f"{ratio:.2f} times as long as one of EKFAC, {agrees}."
    )


def _lines(panel: Panel, cells: list[Cell]) -> dict[str, list[tuple[int, float | None, float | None]]]:
    return {
        method: [(cell.batch_size, cell.seconds, cell.megabytes) for cell in _of(cells, panel, method)]
        for method in METHODS
    }


def _at(cells: list[Cell], panel: Panel, method: str, size: int) -> str:
    return next((_text(cell) for cell in _of(cells, panel, method) if cell.batch_size == size), "–")


def _text(cell: Cell) -> str:
    if cell.seconds is None:
        return cell.error or "failed"
    memory = "–" if cell.megabytes is None else f"{cell.megabytes:.0f} MB"
    return f"{1e3 * cell.seconds:.1f} ms, {memory}"


def _measure_apart(panel: Panel, method: str, size: int, steps: int, device: str) -> Cell:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (panel, method, size, steps, device))


def measure(panel: Panel, method: str, size: int, steps: int, device: str) -> Cell:
    """Seconds and memory of a step, in this process.

    The fastest of the steps is the one that other work on the machine disturbed least.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = models.build(panel.network, panel.shape, panel.classes).to(device)
    optimizer = read_optimizer(METHODS[method]).build(network)
    x = torch.randn(size, *panel.shape, device=device)
    y = torch.randint(panel.classes, (size,), device=device)
    try:
        before = _begin_memory(device)
        take_step(network, optimizer, x, y)
        times: list[float] = []
        while len(times) < steps or (sum(times) < 1.0 and len(times) < MOST_STEPS):
            _wait(device)
            start = perf_counter()
            take_step(network, optimizer, x, y)
            _wait(device)
            times.append(perf_counter() - start)
        peak = _peak_memory(device)
    except torch.OutOfMemoryError:
        return Cell(panel.network, method, size, None, None, "out of memory")
    used = None if before is None or peak is None else (peak - before) / 1e6
    return Cell(panel.network, method, size, min(times), used)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _begin_memory(device: str) -> int | None:
    """Bytes in use; the peak starts from here. ``None`` on a CPU whose system does not tell."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not _STATUS.exists():
        return None
    _RESET.write_text("5")
    return _status("VmRSS")


def _peak_memory(device: str) -> int | None:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") if _STATUS.exists() else None


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
