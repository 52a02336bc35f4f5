"""Logical ops over JAX arrays: one signature each, an implementation per platform, a plain ``jnp`` reference always."""

from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.dense_attention import dense_attention
from model_adapters.ops.grouped_matmul import grouped_matmul
from model_adapters.ops.linear import addmm, baddbmm, bmm, einsum, linear, matmul
from model_adapters.ops.paged_attention import paged_attention
from model_adapters.ops.registry import list_ops, on_platform, use

from model_adapters.ops import gpu, tpu  # isort: skip  # noqa: F401  they register implementations of the ops above
from model_adapters.ops import sharded  # isort: skip  # noqa: F401  stands before all others on a mesh

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "decode_attention",
    "dense_attention",
    "einsum",
    "grouped_matmul",
    "linear",
    "list_ops",
    "matmul",
    "on_platform",
    "paged_attention",
    "use",
]
