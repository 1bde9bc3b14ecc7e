"""What is read off one evaluation of a field: the calls of its layers, each with the adjoint at its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt import layers as adapters
from ocnopt.hosts import Execution, Host
from ocnopt.layers.base import Call, first_tensor
from ocnopt.rng import RNGState
from ocnopt.trees import mapped, tensors

#: of layers that a host runs: their names from outside, and their names inside it
Inner = dict[str, str]


def _by_host(field: nn.Module, layers: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[Host, Inner]]:
    """The layers that the field itself runs, and those that hosts inside it run, by host."""
    outermost: list[Host] = []
    for module in field.modules():  # what is outside comes first
        if isinstance(module, Host) and not any(module in host.modules() for host in outermost):
            outermost.append(module)
    inner: dict[Host, Inner] = {
        host: {path: own for path, layer in layers.items() if (own := _name_in(host, layer)) is not None}
        for host in outermost
    }
    taken = {path for paths in inner.values() for path in paths}
    return {path: layer for path, layer in layers.items() if path not in taken}, {h: p for h, p in inner.items() if p}


def _name_in(host: Host, layer: nn.Module) -> str | None:
    return next((name for name, module in host.named_modules() if module is layer), None)


class Watch:
    """Hooks on the layers and on the hosts inside a field, for one evaluation of it.

    A probe is zero and added to an output: its gradient is that of the output, whatever is done to that in place.
    """

    def __init__(self, field: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.layers, self.hosts = _by_host(field, layers)
        self.probes: list[Tensor] = []
        self._calls: list[tuple[str, Call, int]] = []  # with the place of its probe
        self._executions: list[tuple[Host, Execution, dict[int, int]]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for path, module in self.layers.items():
            begun: list[RNGState | None] = []
            handles += [
                module.register_forward_pre_hook(_before(begun)),
                module.register_forward_hook(self._after(path, begun), with_kwargs=True, prepend=True),
            ]
        handles += [
            host.register_forward_hook(self._after_host(host), with_kwargs=True, prepend=True) for host in self.hosts
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _probe(self, out: Tensor) -> int:
        self.probes.append(torch.zeros_like(out).requires_grad_())
        return len(self.probes) - 1

    def _after(self, path: str, begun: list[RNGState | None]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            out, rng = first_tensor(output), begun.pop()
            if out is None or not out.is_floating_point() or _again():
                return None
            place = self._probe(out)
            args, kwargs = mapped(Tensor.detach, (args, kwargs))
            call = Call(module, args, kwargs, self.probes[place], rng, module.training, _autocast(out))
            self._calls.append((path, call, place))
            return mapped(lambda t: t + self.probes[place] if t is out else t, output)

        return hook

    def _after_host(self, host: Host) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if _again():
                return None
            found = [t for t in tensors(output) if t.is_floating_point()]
            places, outputs = {}, {}
            for i, t in enumerate(found):
                places[i], outputs[i] = self._probe(t), t.detach()
            args, kwargs = mapped(Tensor.detach, (args, kwargs))
            how = Execution(args, kwargs, outputs, {}, _autocast(outputs[0]), training=module.training)
            self._executions.append((host, how, places))
            probes = iter(self.probes[place] for place in places.values())
            return mapped(lambda t: t + next(probes) if t.is_floating_point() else t, output)

        return hook

    def told(self, h: Sequence[Tensor]) -> list[tuple[str, Call]]:
        """The calls with their adjoints, those inside hosts included."""
        seen = [(path, replace(call, h=h[place])) for path, call, place in self._calls]
        for host, execution, places in self._executions:
            execution.h = {i: h[place] for i, place in places.items()}
            inside = {path: host.get_submodule(path) for path in self.hosts[host].values()}
            calls = host.layer_calls(execution, inside)
            seen += [(path, call) for path, own in self.hosts[host].items() for call in calls[own]]
        return seen


def _again() -> bool:
    """Inside a backward pass a layer runs again for activation checkpointing: its call has been seen."""
    return torch._C._current_graph_task_id() != -1


def _autocast(out: Tensor) -> torch.dtype | None:
    device = out.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _before(begun: list[RNGState | None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        adapter, _ = adapters.find(module)
        random = adapter is not None and adapter.needs_rng(module)
        begun.append(RNGState.capture({p.device for p in module.parameters()}) if random else None)

    return hook
