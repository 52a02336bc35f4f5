"""Pallas kernels for TPUs. Importing the package registers them with their ops."""

from model_adapters.ops.tpu import decode, ragged

__all__ = ["decode", "ragged"]
