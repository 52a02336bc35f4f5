"""Pallas kernels for TPUs. Importing the package registers them with their ops."""

from model_adapters.ops.tpu import decode_attention, ragged_paged_attention

__all__ = ["decode_attention", "ragged_paged_attention"]
