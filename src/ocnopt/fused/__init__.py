"""Steps over all parameters in a few kernels, in Triton for a GPU, in C for a CPU (:mod:`ocnopt.fused.native`).
:mod:`ocnopt.bucket` is their plain twin.

What a step needs of the parameters are two passes over gradients and state: one that forms the inner products of the
Bellman recursion, and one that moves. Everything between is a handful of numbers. The metric is worked out twice
instead of being stored; above rank 1 the gradients of the groups of samples are all that a step holds.
"""
