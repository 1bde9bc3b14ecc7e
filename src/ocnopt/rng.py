"""The state of the random number generators, kept so that a piece of a forward pass can be repeated."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ocnopt import whole_step

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class RNGState:
    """Snapshot of the default generators of the CPU and of chosen devices.

    Reading or setting one does not wait for the device: its generator is a seed and an offset held by the
    host. A ``torch.Generator`` that a module made for itself is not part of it.
    """

    states: dict[torch.device, Tensor]

    @classmethod
    def capture(cls, devices: Iterable[torch.device | str] = ()) -> RNGState:
        """The present state: the CPU's always, and that of each device named (repetitions do no harm).

        A CUDA generator can be neither read nor set while a graph is captured, and need not be: see
        :mod:`ocnopt.whole_step`.
        """
        states = {_CPU: torch.default_generator.get_state()}
        for device in map(torch.device, devices):
            if device not in states and (device.type != "cuda" or not whole_step.underway()):
                states[device] = _get(device)
        return cls(states)

    def same_as(self, other: RNGState) -> bool:
        """Has nothing been drawn between the two?"""
        return all(torch.equal(state, other.states[device]) for device, state in self.states.items())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block with these random numbers; afterwards the generators go on as if it never ran."""
        present = RNGState.capture(self.states)
        try:
            self._apply()
            yield
        finally:
            present._apply()

    def _apply(self) -> None:
        for device, state in self.states.items():
            if device.type != "cuda" or not whole_step.underway():
                _set(device, state)


@dataclass(frozen=True, eq=False)
class AllRNG:
    """Python's own generator and numpy's, if anybody has imported it, besides those of torch: a ``forward`` may draw
    from any of them.
    """

    of_torch: RNGState
    python: Any
    numpy: Any

    @classmethod
    def none(cls) -> AllRNG:
        """Of a pass that is known to draw nothing."""
        return cls(RNGState({}), None, None)

    @classmethod
    def capture(cls, devices: Iterable[torch.device | str] = ()) -> AllRNG:
        numpy = sys.modules.get("numpy.random")
        return cls(RNGState.capture(devices), random.getstate(), None if numpy is None else numpy.get_state())

    def same_on_host_as(self, other: AllRNG) -> bool:
        """Has nothing been drawn between the two, except on devices?"""
        if self.python != other.python or not torch.equal(self.of_torch.states[_CPU], other.of_torch.states[_CPU]):
            return False
        return self._same_numpy_as(other)

    def _same_numpy_as(self, other: AllRNG) -> bool:
        numbers = zip(self.numpy or (), other.numpy or (), strict=True)
        return all(sys.modules["numpy"].array_equal(mine, theirs) for mine, theirs in numbers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As :meth:`RNGState.restored`."""
        present = AllRNG.capture()
        try:
            with self.of_torch.restored():
                self._apply(present)
                yield
        finally:
            present._apply()

    def _apply(self, present: AllRNG | None = None) -> None:
        """``present``: what there is, if that is known."""
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and (present is None or not self._same_numpy_as(present)):
            sys.modules["numpy.random"].set_state(self.numpy)


def _get(device: torch.device) -> Tensor:
    if device.type == "mps":  # one device, and so no argument to name it
        return torch.mps.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
