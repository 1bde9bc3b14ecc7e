"""The version of this package, also written into checkpoints."""

__version__ = "0.1.0"
