"""Pallas kernels for GPUs. Importing the package registers them with their ops."""

from model_adapters.ops.gpu import decode, mosaic_decode, ragged

__all__ = ["decode", "mosaic_decode", "ragged"]
