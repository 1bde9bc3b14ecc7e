"""What a backward pass through the model is for: the adjoints of the training loss are wanted, others are not.

``torch.autograd.grad`` of an input (saliency, a gradient penalty) goes through the same graph, and says nothing about
training. ``torch.autograd.grad`` of parameters may be a look at them, the inner loop of a meta-learner, or training by
hand, ``p.grad = g``: what it says is heard, and counts unless a ``backward()`` of the same step says more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt.anatomy import modules_of
from ocnopt.shards import is_sharded

#: the autograd nodes that add to ``p.grad``
Sinks = Sequence[Any]


class Purpose(Enum):
    OTHER = "gradients of something else"
    ASKED = "gradients of parameters are handed to whoever asked"
    ADDED = "gradients of parameters are added to p.grad"


class Reader(torch.autograd.Function):
    """Reads many leaves at once, as far as the graph tells, and computes nothing. Nobody goes back through it."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        return leaves[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("a look at the leaves of a graph has no gradient")


class Leaves:
    """The parameters of modules that gradients are added to; mostly the modules are those of the last time. Good as
    long as no parameter of the model is replaced, frozen or thawed.
    """

    def __init__(self) -> None:
        self._last: tuple[list[nn.Module], list[nn.Parameter]] = [], []

    def of(self, modules: Iterable[nn.Module]) -> list[nn.Parameter]:
        modules = list(modules)
        if modules != self._last[0]:
            self._last = modules, leaves_of(*modules)
        return self._last[1]


def leaves_of(*modules: nn.Module) -> list[nn.Parameter]:
    """Not those that are sharded: whole ones stand in for them while the module runs."""
    held = [part._parameters for module in modules for part in modules_of(module)]
    parameters = {id(p): p for own in held for p in own.values() if p is not None}.values()
    return [p for p in parameters if p.requires_grad and p.is_leaf and not is_sharded(p)]


def sinks_of(*modules: nn.Module) -> Sinks:
    return nodes_of(leaves_of(*modules))


def nodes_of(leaves: Sequence[Tensor]) -> Sinks:
    if not leaves:
        return []
    with torch.enable_grad():  # a backward pass has none
        # without a look at each leaf whether it is one of ``torch.func``'s: parameters are none
        reader: Any = super(torch.autograd.Function, Reader).apply(*leaves)  # type: ignore[no-untyped-call]
    found = () if reader.grad_fn is None else reader.grad_fn.next_functions
    return [node for node, _ in found if node is not None]  # but for what was frozen meanwhile


def all_reached(sinks: Sinks) -> bool:
    """Does the backward pass under way add to the gradients of all these parameters? Mostly it does."""
    try:
        return all(map(torch._C._will_engine_execute_node, sinks))
    except RuntimeError:
        return False


def purpose(sinks: Sinks) -> Purpose:
    """Of the backward pass under way, as far as these parameters can tell."""
    try:
        reached = not sinks or any(map(torch._C._will_engine_execute_node, sinks))
    except RuntimeError:  # torch's answer for a leaf whose gradient autograd.grad was asked for
        return Purpose.ASKED
    return Purpose.ADDED if reached else Purpose.OTHER


class Backwards:
    """Tells hooks on the graph whether what arrives at them counts.

    Args:
        model: whose parameters are trained.
        gone: have the gradients of earlier passes been given up?
        clear: called when they have.
        drop: called when what was heard so far was a look.
    """

    def __init__(
        self, model: nn.Module, gone: Callable[[], bool], clear: Callable[[], None], drop: Callable[[], None]
    ) -> None:
        self.model, self._gone, self._clear, self._drop = model, gone, clear, drop
        self._task = -1  # the backward pass that the last adjoint came with
        self._heard = False  # does it count?
        self._asked = self._added = False  # was there one of this kind since :meth:`rest`?

    def rest(self) -> None:
        """A step is over, or its gradients are gone."""
        self._asked = self._added = False

    def counts(self, sinks: Sinks) -> bool:
        return self._counts(purpose(sinks))

    def counts_for_all(self) -> bool:
        """As :meth:`counts`, where the gradients of all parameters are known to be added to."""
        return self._counts(Purpose.ADDED)

    def _counts(self, found: Purpose) -> bool:
        if found is Purpose.OTHER:
            return False
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._begin(found)
        return self._heard

    def only_looked(self) -> bool:
        """Has nothing been done so far but to ask for gradients, which nobody has put into ``p.grad``?"""
        if self._added or not self._asked:
            return False
        grads = (p.grad for p in self.model.parameters())
        return not any(bool(grad.any()) for grad in grads if grad is not None)

    def _begin(self, found: Purpose) -> None:
        if self._gone():
            self._clear()
        if found is Purpose.ADDED:
            if self.only_looked():
                self._drop()
            self._added = True
        self._heard = found is Purpose.ADDED or not self._added
        self._asked = self._asked or (self._heard and found is Purpose.ASKED)


def hook(t: Any, act: Callable[[Tensor], None]) -> None:
    """As ``t.register_hook``, on a tensor that has been computed. Without a handle to remove it by, if nobody else has
    a hook there: that takes longer than all else.
    """
    if t._backward_hooks is not None:
        t.register_hook(act)
        return
    t._backward_hooks = OrderedDict({-1: act})  # no number of theirs
    t.grad_fn._register_hook_dict(t)


def add(store: dict[int, Tensor], i: int, g: Tensor) -> None:
    """Keep the gradient, or add it when a second backward pass comes through."""
    g = g.detach()
    store[i] = store[i] + g if i in store else g
