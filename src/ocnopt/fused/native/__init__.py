"""Kernels for a CPU, in C."""
