"""Normalisations: the parameters scale and shift the normalised input x̂, which is computed again."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

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
        """x̂, without scale and shift."""

    @abstractmethod
    def over_positions(self, call: Call, rows: Tensor) -> Tensor:
        """Sum what is shaped as the output over its shared positions: ``[B, *parameter.shape]``."""

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        names = self.parameters(call.module)
        x, h = outer.operands(call)
        gradients = {}
        if "weight" in names:
            rows = self.over_positions(call, h * self.normalised(call, x))
            gradients["weight"] = groups.sum(rows)
        if "bias" in names:
            gradients["bias"] = groups.sum(self.over_positions(call, h))
        return gradients


class TrailingNorm(Norm):
    """Parameters shaped as the last dimensions; those between them and the samples are shared."""

    def over_positions(self, call: Call, rows: Tensor) -> Tensor:
        shape = _shape(call.module)
        return rows.reshape(call.batch, -1, *shape).sum(1) if call.batch else rows.new_zeros(0, *shape)

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

    def over_positions(self, call: Call, rows: Tensor) -> Tensor:
        return rows.sum(tuple(range(2, rows.dim()))) if rows.dim() > 2 else rows


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
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        assert module.running_mean is not None
        assert module.running_var is not None
        return F.batch_norm(x, module.running_mean.to(x.dtype), module.running_var.to(x.dtype), eps=module.eps)

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


def _shape(module: nn.Module) -> tuple[int, ...]:
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return tuple(module.normalized_shape)


def _has_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
