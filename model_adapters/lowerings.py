"""Torch operators that reach our own ops: products, and what torchax lacks or lowers badly.

`install` is idempotent and called before anything is traced. What torchax does well is left to torchax.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters import ops, torch_ops
from model_adapters.bridge import TorchView, jax_view, lower, lowering_of, torch_view
from model_adapters.sharding import placed_in_use, whole_result


@functools.cache
def install() -> None:
    """Puts our lowerings into torchax's table."""
    lower(torch.nn.functional.linear, _linear)
    lower(torch.ops.aten.linear, _linear)
    lower(torch.ops.aten.mm, ops.matmul)
    lower(torch.ops.aten.bmm, ops.bmm)
    lower(torch.ops.aten.addmm, _addmm)
    lower(torch.ops.aten.baddbmm, ops.baddbmm)
    lower(torch.ops.aten._grouped_mm, _grouped_mm)
    _mend_copy()
    torch_ops.install()


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    out = ops.linear(x, weight, bias)
    placed = placed_in_use(weight)
    return out if placed is None else whole_result(out, placed.dims[0])


def _addmm(bias: jax.Array, x: jax.Array, weight: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    out = ops.addmm(bias, x, weight, beta=beta, alpha=alpha)
    placed = placed_in_use(weight)
    return out if placed is None else whole_result(out, placed.dims[1])


def _grouped_mm(
    x: jax.Array,
    weight: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """``torch._grouped_mm``: `x` [rows, in] sorted by expert, `weight` [experts, in, out], `offs` their ends."""
    if offs is None or bias is not None or x.ndim != 2 or weight.ndim != 3:
        raise NotImplementedError("grouped_mm: expected x [rows, in], weight [experts, in, out] and offs, without bias")
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)
    return ops.grouped_matmul(x, weight, sizes)


def _mend_copy() -> None:
    """``tensor.copy_(view)``: torchax 0.0.13 reads the view's array under a name that only tensors have."""
    theirs = lowering_of(torch.ops.aten.copy_)

    def copy(x: torch.Tensor, y: torch.Tensor, memory_format: Any = None, env: Any = None) -> torch.Tensor:
        return theirs(x, torch_view(jax_view(y)) if isinstance(y, TorchView) else y, memory_format, env)

    lower(torch.ops.aten.copy_, copy, keep_kind=True)
