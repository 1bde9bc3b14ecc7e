"""What a forward pass depends on besides its inputs and parameters, kept so that it can be repeated exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack as _transform

from ocnopt.anatomy import Anatomy, modules_of
from ocnopt.hooks import Others
from ocnopt.rng import AllRNG
from ocnopt.trees import mapped, tensors


class Buffers:
    """The buffers of a model at one moment. Modules overwrite them or put other tensors in their places; both are
    undone.
    """

    def __init__(self, model: nn.Module | Anatomy) -> None:
        anatomy = model if isinstance(model, Anatomy) else Anatomy.of(model)
        self._places = anatomy.buffers
        self._kept = [(theirs, _copied(theirs, plain)) for theirs, plain in anatomy.places.alike]

    @property
    def values(self) -> list[Tensor]:
        """What they were."""
        return tensors([copy for _, copy in self._kept])

    @values.setter
    def values(self, values: Iterable[Tensor]) -> None:
        them = iter(values)
        self._kept = [(theirs, mapped(lambda _: next(them), copy)) for theirs, copy in self._kept]

    def restore(self) -> None:
        for owner, name, b in self._places:
            owner[name] = b
        for theirs, copy in self._kept:
            # to autograd, and to whoever keeps an eye on its inputs, nothing has happened
            torch._foreach_copy_([b.data for b in theirs], _parts(copy, theirs))


@torch.no_grad()
def _copied(theirs: list[Tensor], plain: bool) -> Tensor | list[Tensor]:
    """One operation for many buffers, where they are plain tensors."""
    if plain:
        found = torch.cat([b if b.dim() == 1 else b.reshape(-1) for b in theirs])
        if found.dtype == theirs[0].dtype:
            return found
    return [b.clone() for b in theirs]


def _parts(copy: Tensor | list[Tensor], theirs: list[Tensor]) -> list[Tensor]:
    if not isinstance(copy, Tensor):
        return copy
    parts = copy.split([b.numel() for b in theirs])
    return [part if b.dim() == 1 else part.view(b.shape) for part, b in zip(parts, theirs, strict=True)]


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on, and to which dtype, for the devices of a model."""

    states: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def capture(cls, model: nn.Module) -> Autocast:
        return cls.of(Anatomy.of(model))

    @classmethod
    def of(cls, anatomy: Anatomy) -> Autocast:
        kinds = anatomy.places.kinds
        return cls(tuple([(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in kinds]))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.states:  # no cache: the weights change while the model runs
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode as it was, should it have changed since."""
    modules = modules_of(module)
    modes = _modes(modules)
    if module.training != training:
        module.train(training)
    try:
        yield
    finally:
        _set_modes(modules, modes)


@dataclass
class Environment:
    """Random numbers, buffers, training mode, autocast and the hooks of others."""

    rng: AllRNG
    buffers: Buffers
    modes: tuple[bool, ...]  # train or eval, of each module
    autocast: Autocast
    model: nn.Module
    anatomy: Anatomy  # of the model, as it was
    idle: frozenset[int] = field(default_factory=frozenset)  # hooks that are not to be called again

    @classmethod
    def capture(cls, model: nn.Module) -> Environment:
        anatomy = Anatomy.of(model)
        return cls.of(model, anatomy, AllRNG.capture(anatomy.places.devices), Autocast.of(anatomy))

    @classmethod
    def of(cls, model: nn.Module, anatomy: Anatomy, rng: AllRNG, autocast: Autocast) -> Environment:
        """What is known of it need not be asked for again."""
        return cls(rng, Buffers(anatomy), _modes(anatomy.modules), autocast, model, anatomy)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Run a block as the captured pass ran, without gradients, then leave everything as it was found.

        Nothing is compiled in it: what is cached would be used when the hooks are to be called again.
        """
        anatomy, modules = Anatomy.of(self.model, self.anatomy), self.anatomy.modules
        found, modes, quiet = Buffers(anatomy), _modes(anatomy.modules), Others(self.model).silent(self.idle)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self.rng.restored(), self.autocast.restored():
            try:
                self.buffers.restore()
                _set_modes(modules, self.modes)
                with quiet:
                    yield
            finally:
                found.restore()
                _set_modes(anatomy.modules, modes)


def _modes(modules: Sequence[nn.Module]) -> tuple[bool, ...]:
    return tuple([module.training for module in modules])


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for module, training in zip(modules, modes, strict=True):
        if module.training is not training:
            module.training = training


def autocast_dtype(module: nn.Module) -> torch.dtype | None:
    if not torch._C._is_any_autocast_enabled():
        return None
    device = next((p.device.type for p in module.parameters()), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_transforming() -> bool:
    """Does ``torch.func``, a tracer or an exporter run the model? What they do with it is no training."""
    return _transform() is not None or _is_tracing() or torch.compiler.is_exporting()
