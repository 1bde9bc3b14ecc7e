"""Normalisations: the parameters scale and shift the normalised input x̂, which is computed again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ocnopt import whole_step
from ocnopt.fused import sums
from ocnopt.groups import Groups
from ocnopt.layers import outer
from ocnopt.layers.base import Adapter, Call
from ocnopt.layers.registry import register


class Norm(Adapter):
    """``y = weight ⊙ x̂ + bias``: a sample's gradients are h ⊙ x̂ and h, summed over the shared positions."""

    covers = ("weight", "bias")
    joins = True

    @abstractmethod
    def normalised(self, call: Call, x: Tensor) -> Tensor:
        """x̂, without scale and shift: a new tensor."""

    @abstractmethod
    def positions(self, call: Call) -> range:
        """The dimensions of the output that are neither the samples nor those of the parameters."""

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        names = self.parameters(call.module)
        x, h = outer.operands(call)
        if "weight" not in names:
            return {"bias": groups.sum(h, self.positions(call))} if "bias" in names else {}
        x = self.normalised(call, x)
        if "bias" in names and (both := self.sums(x, h, groups)) is not None:
            return dict(zip(("weight", "bias"), both, strict=True))
        gradients = {"weight": groups.sum(x.mul_(h), self.positions(call))}
        if "bias" in names:
            gradients["bias"] = groups.sum(h, self.positions(call))
        return gradients

    def sums(self, x: Tensor, h: Tensor, groups: Groups) -> tuple[Tensor, Tensor] | None:
        """Both gradients at once, where there is a kernel for that. ``x``: normalised."""
        return None


class TrailingNorm(Norm):
    """Parameters shaped as the last dimensions; those between them and the samples are shared."""

    def positions(self, call: Call) -> range:
        return range(1, call.h.dim() - len(_shape(call.module)))

    def call_refusal(self, call: Call) -> str | None:
        if call.x.dim() <= len(_shape(call.module)):
            return "its input has no dimension of samples: normalized_shape takes up all dimensions"
        return super().call_refusal(call)


@register(nn.LayerNorm)
class LayerNormAdapter(TrailingNorm):
    def normalised(self, call: Call, x: Tensor) -> Tensor:
        assert isinstance(call.module, nn.LayerNorm)
        return F.layer_norm(x, call.module.normalized_shape, eps=call.module.eps)


@register(nn.RMSNorm)
class RMSNormAdapter(TrailingNorm):
    def normalised(self, call: Call, x: Tensor) -> Tensor:
        assert isinstance(call.module, nn.RMSNorm)
        # eps=None is the epsilon of the dtype that torch computes in: float32's for half precision, as here.
        return F.rms_norm(x, call.module.normalized_shape, eps=call.module.eps)


class ChannelNorm(Norm):
    """One parameter per channel, dimension 1; the dimensions after it are shared."""

    def positions(self, call: Call) -> range:
        return range(2, call.h.dim())

    def sums(self, x: Tensor, h: Tensor, groups: Groups) -> tuple[Tensor, Tensor] | None:
        return sums.by_channel(x, h, groups)


@register(nn.GroupNorm)
class GroupNormAdapter(ChannelNorm):
    def normalised(self, call: Call, x: Tensor) -> Tensor:
        assert isinstance(call.module, nn.GroupNorm)
        return F.group_norm(x, call.module.num_groups, eps=call.module.eps)


class BatchNormAdapter(ChannelNorm):
    """With batch statistics samples are coupled: a sample's gradient is what its row of ``h`` causes."""

    def normalised(self, call: Call, x: Tensor) -> Tensor:
        module = call.module
        assert isinstance(module, _BatchNorm)
        if call.training or not _has_statistics(module):
            # a library that takes one pass to normalise and scale may need two to normalise
            return F.batch_norm(x, None, None, *_neither(x.shape[1], x.dtype, x.device), training=True, eps=module.eps)
        assert module.running_mean is not None
        assert module.running_var is not None
        return F.batch_norm(x, module.running_mean.to(x.dtype), module.running_var.to(x.dtype), eps=module.eps)

    def product(self, module: nn.Module) -> Callable[..., Tensor] | None:
        # in evaluation nothing depends on the batch
        both = len(self.parameters(module)) == 2 and self.couples_samples(module)
        return F.batch_norm if both else None

    def couples_samples(self, module: nn.Module) -> bool:
        return module.training or not _has_statistics(module)


class SyncBatchNormAdapter(BatchNormAdapter):
    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.SyncBatchNorm)
        if distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size(module.process_group or distributed.group.WORLD)
            if ranks > 1:
                return f"its batch statistics are those of {ranks} processes, of which this is one"
        return None


for _kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    register(_kind, BatchNormAdapter())
register(nn.SyncBatchNorm, SyncBatchNormAdapter())


@whole_step.remembered
def _neither(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift that change nothing."""
    return torch.ones(channels, dtype=dtype, device=device), torch.zeros(channels, dtype=dtype, device=device)


def _shape(module: nn.Module) -> tuple[int, ...]:
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return tuple(module.normalized_shape)


def _has_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
