"""A whole training step in one CUDA graph: small networks spend their time on launches, and a graph is one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ocnopt import clockwork, whole_step
from ocnopt.clockwork import Rates
from ocnopt.environment import Autocast
from ocnopt.games.flow import Flow
from ocnopt.linalg import without_autocast
from ocnopt.recording import Recording, Studio, told_of_waiting
from ocnopt.rng import AllRNG

#: eager steps of a kind before one of it is captured: tables are filled, libraries choose their kernels
_WARM_UP = 2


def graphed_step(
    model: nn.Module, loss_fn: Callable[..., Tensor], opt: Optimizer, example_inputs: Sequence[Any]
) -> GraphedStep:
    """A function that makes one training step, captured in a CUDA graph and replayed.

    >>> step = graphed_step(model, cross_entropy, opt, (x, y))
    >>> for x, y in batches:
    ...     loss = step(x, y)

    A call is ``opt.zero_grad()``, ``loss = loss_fn(model(x), y)``, ``loss.backward()``, ``opt.step()``. The numbers are
    those of the same lines without a graph.

    Args:
        model: the network.
        loss_fn: gets what the model returns, and the other inputs; returns a scalar.
        opt: :class:`ocnopt.OCNOpt`, or an optimizer of torch that can be captured (``capturable=True``; SGD:
            ``fused=True``). Learning rates become tensors on the device: schedulers go on as before.
        example_inputs: what the step is going to be called with. The first is for the model: a tensor, a tuple of
            positional arguments or a dict of keyword arguments; the others are for ``loss_fn``. Only shapes, dtypes
            and whatever is no tensor matter.

    The first calls are ordinary steps, and so is each that a graph cannot make; :attr:`GraphedStep.reason` says why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model's output and the other inputs, got {loss_fn!r}")
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt must be a torch.optim.Optimizer, got {type(opt).__name__}")
    if not isinstance(example_inputs, (tuple, list)) or not example_inputs:
        raise TypeError(
            f"example_inputs must be a tuple of what the model gets and what else loss_fn gets, "
            f"got {type(example_inputs).__name__ if example_inputs != () else 'an empty one'}"
        )
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in opt.param_groups for p in group["params"]):
        raise ValueError("opt holds none of the parameters of model")
    return GraphedStep(model, loss_fn, opt, tuple(example_inputs))


class GraphedStep:
    """What :func:`graphed_step` returns: call it with the inputs of a step, get its loss.

    Attributes:
        reason: why the last step did not come from a graph, or ``None`` if it did.
        captures: how many graphs have been captured so far.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], opt: Optimizer, example: tuple[Any, ...]
    ) -> None:
        self.model, self.loss_fn, self.opt = model, loss_fn, opt
        self.reason: str | None = None
        self.captures = 0
        self._inputs = Inputs(example)
        self._rates = Rates(opt)
        self._modules = list(model.modules())
        mine = {id(p) for group in opt.param_groups for p in group["params"]}
        self._others: list[Tensor] = [p for p in model.parameters() if id(p) not in mine]
        self._said: set[str] = set()
        self._never: str | None = clockwork.why_never(model, opt) or self._inputs.why_never()
        self._why = self._never
        self._frozen: dict[Any, Any] = {}
        self._flow: Flow | None = None  # of the steps that graphs are about
        self._forget()
        if self._never is not None:
            self._say(self._never)
            return
        self._device = opt.param_groups[0]["params"][0].device
        self._studio = Studio(self._device)
        self._follow_changes()

    def __call__(self, *inputs: Any) -> Tensor:
        """One step. Returns the loss, detached."""
        if self._never is None:
            self._follow_changes()
        self.reason = self._why or self._failed
        if self.reason is not None:
            self._say(self.reason)
            return self._train(inputs)
        with torch.cuda.device(self._device):
            if (odd := self._inputs.why_not(inputs)) is not None:
                self.reason = odd
                self._say(odd)
                return self._on_the_side(inputs)
            self.reason = clockwork.why_eager(self.opt, self._flow)
            return self._eager(inputs) if self.reason is not None else self._caught_up(inputs)

    # --- eager steps ---

    def _train(self, inputs: tuple[Any, ...]) -> Tensor:
        """As it is written in a plain loop."""
        given, *rest = inputs
        self.opt.zero_grad()
        # what autocast remembers of the weights is wrong after the step
        with torch.enable_grad(), Autocast.capture(self.model).restored():
            loss: Any = self.loss_fn(_called(self.model, given), *rest)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn must return a tensor with one number, got {what}")
        with without_autocast():
            loss.backward()
            self.opt.step()
        found: Tensor = loss.detach()
        return found

    def _eager(self, inputs: tuple[Any, ...]) -> Tensor:
        """One that a graph could have made another time."""
        loss = self._on_the_side(inputs)
        self._flow = clockwork.flow_of(self.opt)
        return loss

    def _on_the_side(self, inputs: tuple[Any, ...]) -> Tensor:
        """On the stream of the captures: the nodes that add to gradients belong to the stream they are made on."""
        present = torch.cuda.current_stream()
        stream = self._studio.stream
        stream.wait_stream(present)
        with torch.cuda.stream(stream), whole_step.to_come():
            loss = self._train(inputs)
        present.wait_stream(stream)
        return loss

    # --- graphs ---

    def _forget(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: dict[Hashable, int] = {}  # eager steps of each kind
        self._failed: str | None = None  # why a step of these hyper-parameters cannot be captured after all

    def _follow_changes(self) -> None:
        """What a graph has frozen may have been changed since the last step: then it is of no use any more."""
        if self._why is None:
            self._rates.adopt()
        before, self._frozen = self._frozen, clockwork.frozen(self.opt, self._modules, self._others)
        if before == self._frozen:
            return
        self._forget()
        self._why = clockwork.why_not(self.opt)
        if self._why is None:
            if changed := clockwork.changed_options(before, self._frozen):
                self._say(f"{', '.join(changed)} changed: new graphs are captured")
            self.opt._warned_capturable_if_run_uncaptured = True  # it is going to be captured
            self._rates.adopt()
            self._frozen = clockwork.frozen(self.opt, self._modules, self._others)

    def _caught_up(self, inputs: tuple[Any, ...]) -> Tensor:
        with torch.no_grad():
            failed = clockwork.catch_up(self.opt)
        loss = self._of_kind(clockwork.kind(self.opt), inputs)
        if failed:
            self.opt.diagnostics.failed_refreshes += failed  # type: ignore[attr-defined]
        return loss

    def _of_kind(self, kind: Hashable, inputs: tuple[Any, ...]) -> Tensor:
        seen = self._seen.get(kind, 0)
        if seen < _WARM_UP:
            self.reason, self._seen[kind] = "the first steps warm up", seen + 1
            return self._eager(inputs) if seen + 1 < _WARM_UP else self._watched(inputs)
        graph = self._graphs.get(kind)
        if graph is None:
            captured = self._capture()
            if isinstance(captured, str):
                self.reason = self._failed = captured
                self._say(captured)
                return self._train(inputs)
            graph = self._graphs[kind] = captured
        self._inputs.fill(inputs)
        return graph.replay()

    def _watched(self, inputs: tuple[Any, ...]) -> Tensor:
        """An eager step that tells whether it could be captured: one that tries and fails leaves torch in disorder."""
        waits: list[str] = []
        before = AllRNG.capture([self._device])
        with told_of_waiting(waits):
            loss = self._eager(inputs)
        after = AllRNG.capture([self._device])
        again = clockwork.must_repeat_random_numbers(self.opt)
        if waits:
            self._failed = f"the step waits for the device ({waits[0]})"
        elif not before.same_on_host_as(after):
            self._failed = "random numbers are drawn on the host, and a graph would stay with those of its capture"
        elif again and not before.of_torch.same_as(after.of_torch):
            self._failed = f"the model draws random numbers, and {again}, with the same ones"
        return loss

    def _capture(self) -> Graph | str:
        """A graph, or why there is none. Nothing runs on the device."""
        buffers = self._inputs.buffers()
        captured = self._studio.record(lambda: self._train(buffers), self.opt, self._flow)
        if isinstance(captured, str):
            return captured
        self.captures += 1
        params = [p for group in self.opt.param_groups for p in group["params"]]
        return Graph(captured, [(p, p.grad) for p in params])

    def _say(self, why: str) -> None:
        """Once."""
        if why not in self._said:
            self._said.add(why)
            warnings.warn(f"graphed_step: {why}", stacklevel=4)


@dataclass
class Graph:
    """One captured step."""

    step: Recording[Tensor]
    grads: list[tuple[Tensor, Tensor | None]]  # of each parameter, where the graph writes it

    def replay(self) -> Tensor:
        self.step.replay()
        for p, grad in self.grads:
            if p.grad is not grad:  # since an eager step
                p.grad = grad
        return self.step.result.clone()  # the next replay overwrites it


class Inputs:
    """The inputs of a step: what they must be like, and the buffers that graphs read them from."""

    def __init__(self, example: tuple[Any, ...]) -> None:
        leaves, self._tree = pytree.tree_flatten(example)
        self._example = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._kinds = [_kind(leaf) for leaf in leaves]
        self._buffers: list[Any] | None = None

    def why_never(self) -> str | None:
        trained = any(isinstance(kind, dict) and kind["requires_grad"] for kind in self._kinds)
        return "an input requires a gradient" if trained else None

    def why_not(self, inputs: tuple[Any, ...]) -> str | None:
        leaves, tree = pytree.tree_flatten(inputs)
        if tree != self._tree:
            return "the inputs are not made up as the example is"
        for i, (expected, leaf) in enumerate(zip(self._kinds, leaves, strict=True)):
            found = _kind(leaf)
            if type(found) is not type(expected) or found != expected:
                return f"input {i} is {_text(found)}, the example {_text(expected)}"
        return None

    def buffers(self) -> tuple[Any, ...]:
        """Of all graphs the same."""
        if self._buffers is None:
            self._buffers = [t.clone() if isinstance(t, Tensor) else t for t in self._example]
        made: tuple[Any, ...] = pytree.tree_unflatten(self._buffers, self._tree)
        return made

    def fill(self, inputs: tuple[Any, ...]) -> None:
        given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        torch._foreach_copy_([b for b in self._buffers or () if isinstance(b, Tensor)], given)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return {
        "shape": tuple(leaf.shape), "dtype": leaf.dtype, "device": leaf.device, "requires_grad": leaf.requires_grad
    }  # fmt: skip


def _text(kind: Any) -> str:
    if not isinstance(kind, dict):
        return repr(kind)
    learned = ", with a gradient" if kind["requires_grad"] else ""
    return f"{kind['shape']} {str(kind['dtype']).removeprefix('torch.')} on {kind['device']}{learned}"


def _called(model: nn.Module, given: Any) -> Any:
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple) else model(given)
