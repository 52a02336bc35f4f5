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
from model_adapters.bridge import (
    StoredLength,
    TorchTensor,
    TorchView,
    jax_view,
    lower,
    lower_raw,
    lowering_of,
    take_host_tensors,
    torch_view,
)
from model_adapters.errors import InvalidArgumentError


@functools.cache
def install() -> None:
    """Puts our lowerings into torchax's table."""
    lower(torch.nn.functional.linear, ops.linear)
    lower(torch.ops.aten.linear, ops.linear)
    lower(torch.ops.aten.mm, ops.matmul)
    lower(torch.ops.aten.bmm, ops.bmm)
    lower(torch.ops.aten.addmm, ops.addmm)
    lower(torch.ops.aten.baddbmm, ops.baddbmm)
    lower(torch.ops.aten._grouped_mm, _grouped_mm)
    lower(torch.nn.functional.scaled_dot_product_attention, _attention)
    lower(torch.ops.aten.scaled_dot_product_attention, _attention)
    take_host_tensors()
    _mend_copy()
    _mend_type_as()
    _understand_stored_lengths()
    torch_ops.install()


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


def _mend_type_as() -> None:
    """``tensor.type_as(other)``: torchax 0.0.13 changes the tensor itself, and fails for a view."""

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other.dtype)

    TorchTensor.type_as = type_as
    TorchView.type_as = type_as


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """``scaled_dot_product_attention`` of [..., heads, len, dim]; torchax gives no numbers where nothing is visible."""
    if dropout_p:
        raise NotImplementedError(f"scaled_dot_product_attention: expected no dropout, got {dropout_p}")
    batch = query.shape[:-3]
    if query.ndim < 3:
        raise NotImplementedError(f"scaled_dot_product_attention: expected at least 3 axes, got {query.ndim}")
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    if attn_mask is not None:
        mask = jnp.broadcast_to(attn_mask, (*batch, *jnp.broadcast_shapes((1, 1, 1), attn_mask.shape[-3:])))
        attn_mask = mask.reshape(-1, *mask.shape[-3:])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    try:
        out: Any = ops.dense_attention(q, k, v, attn_mask, scale=scale, causal=is_causal)
    except InvalidArgumentError as error:
        raise RuntimeError(str(error)) from None  # as torch has it: model code made the shapes, and no user
    return out.reshape(*batch, *out.shape[1:])


def _understand_stored_lengths() -> None:
    """``arange`` and slices from one stored length to another, which lie a known number of tokens apart."""
    their_arange, their_getitem = lowering_of(torch.arange), lowering_of(torch.Tensor.__getitem__)

    def arange(start: Any, end: Any = None, step: Any = None, **kwargs: Any) -> jax.Array:
        if isinstance(start, StoredLength) and step in (None, 1):
            length = start.distance(end)
            if length is not None:
                numbers = their_arange(0, length, **kwargs)
                return numbers + jax_view(start).astype(numbers.dtype)
        return their_arange(*jax_view((start, end, step)), **kwargs)

    def getitem(self: torch.Tensor, indexes: Any) -> Any:
        given = indexes if isinstance(indexes, tuple) else (indexes,)
        if isinstance(self, TorchView) and any(isinstance(x, torch.Tensor) for x in given):
            self = torch_view(jax_view(self))  # torchax 0.0.13 reads an array that a view does not have
        if not any(isinstance(x, slice) and isinstance(x.start, StoredLength) for x in given):
            return their_getitem(self, indexes)
        array, rest = jax_view(self), list(given)
        for axis, index in enumerate(given):
            if isinstance(index, slice) and isinstance(index.start, StoredLength):
                length = index.start.distance(index.stop)
                if length is None or index.step not in (None, 1) or any(x is None or x is ... for x in given[:axis]):
                    return their_getitem(self, indexes)
                array = jax.lax.dynamic_slice_in_dim(array, jax_view(index.start), length, axis)
                rest[axis] = slice(None)
        return their_getitem(torch_view(array), tuple(rest))

    lower_raw(torch.arange, arange)
    lower_raw(torch.Tensor.__getitem__, getitem)
