"""The weight gradients of a layer, computed once: group by group for the game, and their sum is what autograd gets.

While such a layer runs, the function that multiplies by its weight is replaced by :class:`Product`, and that of a batch
norm by :class:`Normalised`: they have the same output and the same gradients up to rounding. Where anything is out of
the ordinary nothing is replaced: then group gradients are computed in the step, from inputs and adjoints on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ocnopt.backwards import Purpose, purpose
from ocnopt.fused import norms
from ocnopt.fused.sums import total
from ocnopt.groups import Groups
from ocnopt.layers.base import Adapter, Call, compute_dtype, first_tensor, spread
from ocnopt.marks import Mark
from ocnopt.records import Pass, Record
from ocnopt.stock import Stock

#: how a layer is to be run, its input, weight and bias
Operands = tuple[tuple[Any, ...], Tensor, Tensor, Tensor | None]


class Product(torch.autograd.Function):
    """``function(x, weight, bias, …)`` of a layer, whose weight gradient comes group by group."""

    @staticmethod
    def operands(rank: int, *args: Any, **kwargs: Any) -> Operands | None:
        """What a call of the function reads, to be split into so many groups. ``None``: it is left alone."""
        return None if kwargs else (args[3:], *args[:3])

    @staticmethod
    def forward(
        ctx: Any, watch: Watch, rest: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.watch = watch
        # without a gradient of the input nobody needs the weight: it may be overwritten before the backward pass
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[2] else None)
        out = watch.function(x, weight, bias, *rest)
        return out.detach() if out._is_view() else out  # a view made in here could not be overwritten by what follows

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        watch: Watch = ctx.watch
        x, weight = ctx.saved_tensors
        call = Call(watch.record.module, (x,), {}, h, stock=watch.once.stock)
        into = None if weight is None else watch.adapter.pull_back(call, weight)
        found = watch.split(call) if watch.is_wanted() else {}
        return None, None, into, found.get("weight"), found.get("bias")


class Normalised(torch.autograd.Function):
    """A batch norm by the statistics of the batch, all of whose gradients come from what its forward pass has left."""

    @staticmethod
    def operands(
        rank: int,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Operands | None:
        """As ``F.batch_norm`` is called."""
        if weight is None or bias is None or not training or not norms.fit(rank, input, weight, bias):
            return None
        if eps <= 0 or input.numel() <= input.shape[1]:
            return None  # torch says why it refuses
        return (running_mean, running_var, momentum, eps), input, weight, bias

    @staticmethod
    def forward(ctx: Any, watch: Watch, how: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, var, momentum, ctx.eps = how
        # what torch.batch_norm is but for what it keeps
        given = x, weight, bias, mean, var, True, momentum, ctx.eps, torch.backends.cudnn.enabled
        out, *statistics, _, _ = torch._batch_norm_impl_index(*given)
        ctx.watch = watch
        ctx.save_for_backward(x, weight, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        watch: Watch = ctx.watch
        x, weight, mean, scale = ctx.saved_tensors
        groups = watch.groups(Call(watch.record.module, (x,), {}, h)) if watch.is_wanted() else None
        found = None if groups is None else norms.backward(x, h, mean, scale, weight, groups)
        if found is None:
            given = h, x, weight, None, None, mean, scale, True, ctx.eps, [True] * 3
            return None, None, *torch.ops.aten.native_batch_norm_backward(*given)
        sums = {"weight": found.weight, "bias": found.bias}
        watch.leave(dict(zip(sums, found.columns, strict=True)), sums)
        return None, None, found.into, found.weight, found.bias


class Watch(TorchFunctionMode):
    """Active while one layer runs; its product is seen to once."""

    def __init__(self, function: Callable[..., Tensor], record: Record, adapter: Adapter, once: Once) -> None:
        super().__init__()
        self.function, self.record, self.adapter, self.once = function, record, adapter, once
        self.waiting = True

    @_disable_dynamo
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.waiting and func is self.function:
            node = Normalised if func is F.batch_norm else Product
            groups = self.record.origin.groups
            given = None if groups is None else node.operands(groups.rank, *args, **(kwargs or {}))
            if given is not None and self._is_its_own(*given[1:]):
                self.waiting = False
                return node.apply(self, *given)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def _is_its_own(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        own, given = self.record.module._parameters, first_tensor((self.record.args, self.record.kwargs))
        if weight is not own.get("weight") or bias is not own.get("bias") or given is None or type(x) is not Tensor:
            return False
        same = x.data_ptr() == given.data_ptr() and x.shape == given.shape and x.stride() == given.stride()
        plain = x.dtype == weight.dtype == compute_dtype(x.dtype)
        rows = x.shape[:1] == (self.record.origin.batch,)
        call = Call(self.record.module, (x,), {}, x)  # the output stands in for its adjoint, and the input for that
        return same and plain and rows and self.adapter.call_refusal(call) is None

    def is_wanted(self) -> bool:
        """Is the backward pass under way one that the parameters have a part in?"""
        record = self.record
        return record.origin.all_reached() or purpose(record.sinks) is not Purpose.OTHER

    def groups(self, call: Call) -> Groups:
        """Whose gradients are asked for; one, if nobody asks for several."""
        groups = self.record.origin.groups if self.once.hears(self.record.origin, self.record) else None
        if groups is None or (self.once.gram and self.adapter.prefers_gram(call, groups.rank)):
            return Groups(call.batch, 1)
        return groups

    def split(self, call: Call) -> dict[str, Tensor]:
        """The gradients of the parameters. Those of the groups stay with the record."""
        columns, parts = self.adapter.part_gradients(call, self.groups(call)), self.adapter.parts(call)
        sums = {name: total(G) if len(G) > 1 else G[0] for name, G in columns.items()}
        own = self.adapter.parameters(call.module)
        sums |= {name: spread(sums[name], part, own[name].shape) for name, part in parts.items()}
        self.leave(columns, sums)
        return sums

    def leave(self, columns: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """With the record: gradients of groups, if there are several, and where those of the parameters are."""
        several = {name: G.detach() for name, G in columns.items() if len(G) > 1}
        if several:
            self.record.keep(several)
        # what is split is not looked at: gradients of groups are made to add up to whatever is found
        self.record.left = {name: Mark.of(g) for name, g in sums.items() if name not in several}


class Once:
    """Watches the layers of a model, one at a time."""

    def __init__(self, hears: Callable[[Pass, Record], bool], stock: Stock) -> None:
        """``hears``: does what the backward pass under way says of a call belong to the step?"""
        self.hears, self.stock = hears, stock
        self.adapters: Mapping[str, Adapter] = {}  # by name of module
        self.gram = False  # may it be that explicit group gradients are of no use to a layer?
        self._watch: Watch | None = None

    def begin(self, record: Record) -> None:
        """A layer is about to run."""
        self.end()
        adapter = self.adapters.get(record.name)
        if adapter is None or record.origin.groups is None or record.autocast is not None or _observed():
            return
        function = adapter.product(record.module)
        weight = record.module._parameters.get("weight")
        if function is None or not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return
        self._watch = Watch(function, record, adapter, self)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """It has run, or was interrupted."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.waiting = False
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is watch:
            watch.__exit__(None, None, None)


def nothing_else(record: Record, name: str, grad: Tensor | None) -> bool:
    """Is it certain that ``p.grad`` is what the layer gave autograd, and that alone?

    Autograd hands on the tensor that it gets if there is no other to add to it.
    """
    return name in record.left and record.left[name].holds(grad)


def _observed() -> bool:
    """Does anybody look at what is saved for the backward pass (activation checkpointing counts it), or differentiate
    forward?
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    level: int = forward_ad._current_level
    return hooks is not None or level >= 0
