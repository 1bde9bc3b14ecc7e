"""Which adapter treats which kind of module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

from torch import nn

from ocnopt.layers.base import Adapter

_ADAPTERS: dict[type[nn.Module], Adapter] = {}

AdapterType = TypeVar("AdapterType", bound=type[Adapter])


@overload
def register(module_type: type[nn.Module], adapter: Adapter) -> None: ...
@overload
def register(module_type: type[nn.Module]) -> Callable[[AdapterType], AdapterType]: ...


def register(
    module_type: type[nn.Module], adapter: Adapter | None = None
) -> Callable[[AdapterType], AdapterType] | None:
    """Treat modules of a type with an adapter: ``register(MyLayer, Recompute())``.

    Without ``adapter`` it decorates an adapter class that can be made without arguments. The last
    registration of a type counts. Subclasses are treated alike as long as they do not override ``forward``.
    """
    if nn.Module not in getattr(module_type, "__mro__", ()):
        raise TypeError(f"module_type must be a subclass of torch.nn.Module, got {module_type!r}")
    if adapter is None:

        def decorate(adapter_type: AdapterType) -> AdapterType:
            register(module_type, adapter_type())
            return adapter_type

        return decorate
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be an instance of ocnopt.layers.Adapter, got {adapter!r}")
    _ADAPTERS[module_type] = adapter
    return None


def find(module: nn.Module) -> tuple[Adapter | None, str | None]:
    """The adapter for ``module`` and ``None``, or ``None`` and the reason why there is none."""
    adapter, reason = _of_kind(module)
    reason = reason if adapter is None else adapter.refusal(module)
    return (adapter, None) if reason is None else (None, reason)


def joining(model: nn.Module) -> frozenset[str]:
    """The names of the modules that act in the stage of the layer before them: trained or frozen, and whether or not
    their gradients can be split.
    """
    adapters = ((name, _of_kind(module)[0]) for name, module in model.named_modules())
    return frozenset(name for name, adapter in adapters if adapter is not None and adapter.joins)


def _of_kind(module: nn.Module) -> tuple[Adapter | None, str | None]:
    """As :func:`find`, whatever the adapter says about this very module."""
    kind = type(module)
    base = next((t for t in kind.__mro__ if t in _ADAPTERS), None)
    if base is None:
        return None, f"no adapter is registered for {kind.__name__}"
    # What matters is what the layer computes: an overridden forward may do anything with the same parameters.
    if kind.forward is not base.forward:
        return None, f"{kind.__name__} overrides the forward of {base.__name__}"
    if "forward" in vars(module):
        return None, f"the forward of this {kind.__name__} has been replaced by another function"
    return _ADAPTERS[base], None
