"""Logical ops over JAX arrays: one signature, a reference, and fast implementations each.

An op is one module of this folder: its signature, its reference, its implementations and how it runs on a mesh. All
modules are imported here, so that a new one is registered by being there.
"""

import importlib
import pkgutil

from model_adapters.ops.activation import gelu, silu
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.causal_convolution import causal_convolution
from model_adapters.ops.cross_attention import cross_attention
from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.dense_attention import dense_attention
from model_adapters.ops.gated_delta_rule import gated_delta_rule
from model_adapters.ops.grouped_matmul import grouped_matmul
from model_adapters.ops.linear import addmm, baddbmm, bmm, einsum, linear, matmul
from model_adapters.ops.linear_recurrence import linear_recurrence
from model_adapters.ops.paged_attention import paged_attention
from model_adapters.ops.reductions import layer_norm, row_sum, softmax
from model_adapters.ops.registry import list_ops, on_platform, use
from model_adapters.ops.rms_norm import rms_norm
from model_adapters.ops.routed_matmul import routed_matmul
from model_adapters.ops.segments import Segments
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.ops.state_space import state_space
from model_adapters.ops.varlen_attention import varlen_attention

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:  # kernels of a platform are imported when they are needed
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "AttentionArgs",
    "KVScales",
    "Segments",
    "addmm",
    "baddbmm",
    "bmm",
    "causal_convolution",
    "cross_attention",
    "decode_attention",
    "dense_attention",
    "einsum",
    "gated_delta_rule",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_recurrence",
    "list_ops",
    "matmul",
    "on_platform",
    "paged_attention",
    "rms_norm",
    "routed_matmul",
    "row_sum",
    "selective_scan",
    "silu",
    "softmax",
    "state_space",
    "use",
    "varlen_attention",
]
