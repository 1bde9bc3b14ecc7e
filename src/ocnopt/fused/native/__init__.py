"""Acting by kernels for a CPU, in C."""

from ocnopt.fused.native.actor import NativeActor, why_not

__all__ = ["NativeActor", "why_not"]
