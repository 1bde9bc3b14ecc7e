"""What a forward pass depends on besides its inputs and parameters, kept so that it can be repeated exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ocnopt.hooks import Others
from ocnopt.rng import AllRNG


class Buffers:
    """The buffers of a model at one moment. Modules overwrite them or put other tensors in their places; both are
    undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items()]
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for _, _, b in self._places:
            if b is not None:
                alike.setdefault((b.device, b.dtype), []).append(b)
        # few operations for many buffers
        self._kept = [(theirs, [torch.empty_like(b, requires_grad=False) for b in theirs]) for theirs in alike.values()]
        for theirs, values in self._kept:
            torch._foreach_copy_(values, [b.detach() for b in theirs])

    def restore(self) -> None:
        for owner, name, b in self._places:
            owner[name] = b
        for theirs, values in self._kept:
            # to autograd, and to whoever keeps an eye on its inputs, nothing has happened
            torch._foreach_copy_([b.data for b in theirs], values)


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on, and to which dtype, for the devices of a model."""

    states: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def capture(cls, model: nn.Module) -> Autocast:
        devices = sorted({t.device.type for t in (*model.parameters(), *model.buffers())})
        return cls(tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.states:  # no cache: the weights change while the model runs
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode as it was, should it have changed since."""
    modes = _modes(module)
    if module.training != training:
        module.train(training)
    try:
        yield
    finally:
        _set_modes(modes)


@dataclass
class Environment:
    """Random numbers, buffers, training mode, autocast and the hooks of others."""

    rng: AllRNG
    buffers: Buffers
    modes: list[tuple[nn.Module, bool]]
    autocast: Autocast
    model: nn.Module
    idle: frozenset[int] = field(default_factory=frozenset)  # hooks that are not to be called again

    @classmethod
    def capture(cls, model: nn.Module) -> Environment:
        rng = AllRNG.capture({p.device for p in model.parameters()})
        return cls(rng, Buffers(model), _modes(model), Autocast.capture(model), model)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Run a block as the captured pass ran, without gradients, then leave everything as it was found.

        Nothing is compiled in it: what is cached would be used when the hooks are to be called again.
        """
        found, modes, quiet = Buffers(self.model), _modes(self.model), Others(self.model).silent(self.idle)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self.rng.restored(), self.autocast.restored():
            try:
                self.buffers.restore()
                _set_modes(self.modes)
                with quiet:
                    yield
            finally:
                found.restore()
                _set_modes(modes)


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for module in model.modules()]


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def autocast_dtype(module: nn.Module) -> torch.dtype | None:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_transforming() -> bool:
    """Does ``torch.func``, a tracer or an exporter run the model? What they do with it is no training."""
    functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return functorch or torch._C._is_tracing() or torch.compiler.is_exporting()
