"""What runs in a step: kernels on a CUDA device, operators inside ``optimizer.step()``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as recording

from ocnopt.lab.bench.benchmark import Settings
from ocnopt.lab.bench.contenders import find
from ocnopt.lab.bench.networks import find as find_network
from ocnopt.lab.bench.tables import Table
from ocnopt.lab.bench.timing import timed, wait
from ocnopt.lab.bench.training import Setup, Training, silent
from ocnopt.lab.schema import ConfigError


def look_inside(settings: Settings, *, kernels: str | None = None, profile: str | None = None) -> Table:
    """One contender on the first network and batch size of the settings."""
    settings.check()
    (contender, *others), network = find(kernels or profile or ""), find_network(settings.networks[0])
    if others:
        raise ConfigError(f"one optimizer can be looked into at a time; {kernels or profile!r} are {1 + len(others)}")
    if contender.why_missing is not None:
        raise ConfigError(contender.why_missing)
    with settings.in_force() as device, silent():
        if kernels and device.type != "cuda":
            raise ConfigError(f"kernels are those of a CUDA device; got {device}")
        training = Setup(network, settings.batches[0], device).build(contender, settings.graphed and not profile)
        return count_kernels(training) if kernels else profile_step(training)


def count_kernels(training: Training, steps: int = 3, top: int = 15) -> Table:
    """On the device, in one step."""
    timed(training.step, training.warm_up, training.device)
    with recording(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            training.step()
        wait(training.device)
    found = [event for event in recorded.key_averages() if event.self_device_time_total]
    found.sort(key=lambda event: -event.self_device_time_total)
    ms = sum(event.self_device_time_total for event in found) / 1e3 / steps
    count = sum(event.count for event in found) / steps
    rows = [[e.key[:100], f"{e.self_device_time_total / 1e3 / steps:.3f}", f"{e.count / steps:g}"] for e in found[:top]]
    return Table(f"{training.contender.title}: {ms:.2f} ms in {count:g} kernels", ("kernel", "ms", "times"), rows)


def profile_step(training: Training, steps: int = 10, top: int = 25) -> Table:
    """The operators that cost most inside ``optimizer.step()`` alone."""
    timed(training.step, training.warm_up, training.device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (training.device.type == "cuda")
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for _ in range(steps):
        training.gradient()
        wait(training.device)
        with recording(activities=activities) as recorded:
            training.optimizer.step()
            wait(training.device)
        for event in recorded.key_averages():
            for slot, amount in enumerate(_amounts(event)):
                totals[event.key][slot] += amount / steps
    costliest = sorted(totals.items(), key=lambda item: -max(item[1][:2]))[:top]
    rows = [[key, f"{cpu / 1e3:.3f}", f"{gpu / 1e3:.3f}", f"{count:g}"] for key, (cpu, gpu, count) in costliest]
    title = f"{training.contender.title}: what costs in its step"
    return Table(title, ("operator", "self CPU ms", "self GPU ms", "calls a step"), rows)


def _amounts(event: Any) -> tuple[float, float, float]:
    return event.self_cpu_time_total, event.self_device_time_total, event.count
