"""Logical ops over JAX arrays: one signature each, an implementation per platform, a plain ``jnp`` reference always."""

from model_adapters.ops.activation import gelu, silu
from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.dense_attention import dense_attention
from model_adapters.ops.grouped_matmul import grouped_matmul
from model_adapters.ops.linear import addmm, baddbmm, bmm, einsum, linear, matmul
from model_adapters.ops.paged_attention import paged_attention
from model_adapters.ops.reductions import layer_norm, row_sum, softmax
from model_adapters.ops.registry import list_ops, on_platform, register_module, use
from model_adapters.ops.rms_norm import rms_norm

for op in ("decode_attention", "paged_attention"):
    register_module(op, "gpu", "model_adapters.ops.gpu")
    register_module(op, "tpu", "model_adapters.ops.tpu")

from model_adapters.ops import spmd  # isort: skip  # noqa: E402, F401  stands before all others on a mesh

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "decode_attention",
    "dense_attention",
    "einsum",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "list_ops",
    "matmul",
    "on_platform",
    "paged_attention",
    "rms_norm",
    "row_sum",
    "silu",
    "softmax",
    "use",
]
