"""Torch operators that reach our own ops: products, and what torchax lacks or lowers badly.

`install` is idempotent and called before anything is traced. What torchax does well is left to torchax.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters import conditions, folding, index_checks, interpolation, ops, torch_ops
from model_adapters.bridge import (
    StoredLength,
    TorchTensor,
    TorchView,
    default_env,
    is_view,
    jax_view,
    lower,
    lower_raw,
    lowering_of,
    take_host_tensors,
    to_jax_array,
    torch_view,
    views_of,
)
from model_adapters.conditions import Selected
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
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
    lower(torch.ops.aten.silu, ops.silu)
    lower(torch.ops.aten.silu.default, ops.silu)  # torchax has both names and looks for this one first
    lower(torch.ops.aten.gelu, ops.gelu)
    _keep_tables_short()
    _check_lookups()
    lower(torch.ops.aten.cat, _cat)
    lower(torch.ops.aten.mean, _mean)
    lower(torch.ops.aten.sum, _sum)
    lower(torch.ops.aten.native_layer_norm, _layer_norm)
    for softmax in (torch.ops.aten._softmax, torch.ops.aten.softmax, torch.ops.aten.softmax.int):
        lower(softmax, _softmax)
    lower(torch.nn.functional.scaled_dot_product_attention, _attention)
    lower(torch.ops.aten.scaled_dot_product_attention, _attention)
    take_host_tensors()
    _mend_copy()
    _mend_type_as()
    _understand_stored_lengths()
    torch_ops.install()
    conditions.install()
    folding.install()
    interpolation.install()
    lower(torch.nn.functional.embedding_bag, _embedding_bag)
    _pad_by_known_widths()
    _stay_on_device()
    _write_through_views()


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    out = ops.linear(x, weight, bias)
    placed = placed_in_use(weight)
    return out if placed is None else whole_result(out, placed.dims[0])


def _addmm(bias: jax.Array, x: jax.Array, weight: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    out = ops.addmm(bias, x, weight, beta=beta, alpha=alpha)
    placed = placed_in_use(weight)
    return out if placed is None else whole_result(out, placed.dims[1])


def _check_lookups() -> None:
    """Where rows of a tensor of the module are taken by index, indices are checked as those of ``embedding`` are."""
    index, select, gather = (
        lowering_of(op) for op in (torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather)
    )

    their_getitem = lowering_of(torch.Tensor.__getitem__)

    def checked_getitem(self: torch.Tensor, indexes: Any) -> Any:
        rows, *others = indexes if isinstance(indexes, tuple) and indexes else (indexes,)
        is_lookup = isinstance(self, TorchTensor) and isinstance(rows, TorchTensor)
        if is_lookup and all(isinstance(other, slice) for other in others):
            index_checks.check_rows(jax_view(self), jax_view(rows), 0, from_end=True)
        return their_getitem(self, indexes)

    def checked_index(tensor: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if indices and all(other is None for other in indices[1:]):
            index_checks.check_rows(tensor, indices[0], 0, from_end=True)
        return index(tensor, indices, *args, **kwargs)

    def checked_select(tensor: Any, dim: int, indices: Any, *args: Any, **kwargs: Any) -> Any:
        index_checks.check_rows(tensor, indices, dim)
        return select(tensor, dim, indices, *args, **kwargs)

    def checked_gather(tensor: Any, dim: int, indices: Any, *args: Any, **kwargs: Any) -> Any:
        index_checks.check_rows(tensor, indices, dim)
        return gather(tensor, dim, indices, *args, **kwargs)

    lower_raw(torch.Tensor.__getitem__, checked_getitem)
    for op in (torch.ops.aten.index, torch.ops.aten.index.Tensor):
        lower(op, checked_index, keep_kind=True)
    lower(torch.ops.aten.index_select, checked_select, keep_kind=True)
    lower(torch.ops.aten.gather, checked_gather, keep_kind=True)


def _keep_tables_short() -> None:
    """``embedding``: indices are checked, and a table of 16-bit floats stays as it is on a CPU.

    XLA makes float32 there of what rows are taken from. That is part of the taking, of those rows alone; but before a
    loop it would make a whole table of float32, since the table is the same for all turns of the loop. Behind a barrier
    together with the indices, it is not.
    """
    theirs = lowering_of(torch.ops.aten.embedding)

    def embedding(weight: jax.Array, indices: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        index_checks.check(weight, indices)
        is_short = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2
        if is_short and registry.platform() == "cpu":
            weight, indices = jax.lax.optimization_barrier((weight, indices))
        return theirs(weight, indices, *args, **kwargs)

    lower(torch.ops.aten.embedding, embedding)


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


def _cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """``torch.cat``; of [B, heads, T, dim] along the last dimension it is written with heads and T changed places.

    Models turn [B, T, heads, dim] and rotate the halves of its last dimension (rotary embeddings). XLA on a CPU does
    not move a turn through a concatenation and then copies number by number, four times slower.
    """
    parts = [x for x in tensors if x.shape != (0,)]  # which torch leaves out, whatever the others' shape
    if not parts:
        return tensors[0]
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in parts))
    parts = [x.astype(dtype) for x in parts]
    if parts[0].ndim == 4 and dim in (-1, 3) and registry.platform() == "cpu":
        return jnp.swapaxes(jnp.concatenate([jnp.swapaxes(x, 1, 2) for x in parts], 3), 1, 2)
    return jnp.concatenate(parts, dim)


def _jax_dtype(dtype: Any) -> Any:
    return dtype if dtype is None else jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))


def _is_last(dim: Any, x: jax.Array) -> bool:
    """Whether `dim`, a number or a sequence, is the last of two or more dimensions of floats, and that alone."""
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return x.ndim > 1 and len(dims) == 1 and dims[0] in (-1, x.ndim - 1) and jnp.issubdtype(x.dtype, jnp.floating)


def _dims(dim: Any) -> Any:
    """As jnp wants them: None for all, which torch also writes as none at all."""
    if isinstance(dim, Sequence):
        return tuple(dim) or None
    return dim


def _sum(x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """``torch.sum``; torchax 0.0.13 overlooks `dtype`."""
    x = x if dtype is None else x.astype(_jax_dtype(dtype))
    if _is_last(dim, x):
        return _kept(ops.row_sum(x), keepdim).astype(x.dtype)
    return jnp.sum(x, _dims(dim) if x.ndim else None, keepdims=keepdim)


def _mean(x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """``torch.mean``."""
    x = x if dtype is None else x.astype(_jax_dtype(dtype))
    if _is_last(dim, x):
        return _kept(ops.row_sum(x) / x.shape[-1], keepdim).astype(x.dtype)
    return jnp.mean(x, _dims(dim) if x.ndim else None, keepdims=keepdim)


def _kept(x: jax.Array, keepdim: bool) -> jax.Array:
    return x[..., None] if keepdim else x


def _softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """``torch.softmax``; the third argument is a dtype, or for the inner operator whether half becomes float."""
    if dtype is True:
        x = x.astype(jnp.float32)
    elif dtype is not None and dtype is not False:
        x = x.astype(_jax_dtype(dtype))
    # Scores [batch, heads, query, key] are left to XLA, which fuses the parts; rows of a router's are few and short.
    if _is_last(dim, x) and x.ndim == 2:
        return ops.softmax(x)
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


def _layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``torch.native_layer_norm``: result, means, reciprocal deviations."""
    size = len(normalized_shape)
    rows = x.reshape(*x.shape[: x.ndim - size], -1)
    weight, bias = (None if array is None else array.reshape(-1) for array in (weight, bias))
    out, mean, scale = ops.layer_norm(rows, weight, bias, eps)
    kept = (*x.shape[: x.ndim - size], *[1] * size)
    return out.reshape(x.shape), mean.reshape(kept), scale.reshape(kept)


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


def _embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """``embedding_bag`` of bags int[n, size], all of one size; torchax 0.0.13 mixes up the weights of samples."""
    if input.ndim != 2 or mode not in ("sum", "mean") or padding_idx is not None or max_norm is not None:
        raise NotImplementedError("embedding_bag: expected bags [n, size], mode sum or mean, no padding and no norm")
    rows = weight[input]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _stay_on_device() -> None:
    """``tensor.to("cpu")`` of a traced tensor: there is no other device inside a program."""
    env = default_env()
    theirs = env._to_copy

    def to_copy(x: torch.Tensor, dtype: Any, device: Any) -> torch.Tensor:
        return theirs(x, dtype, None if folding.is_traced(x) else device)

    env._to_copy = to_copy
    lower(torch.Tensor.cpu, lambda x, *args, **kwargs: x)


def _write_through_views() -> None:
    """``x[1:].masked_fill_(…)``: what torchax 0.0.13 decomposes writes into a copy of the view, and is lost."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        target = args[0] if args else None
        if not isinstance(target, TorchView) or not folding.in_place(func) or folding.is_assignment(func):
            return theirs(func, types, args, kwargs)
        if env._get_op_or_decomp(func).is_view_op:
            return theirs(func, types, args, kwargs)
        whole = target.torch()
        theirs(func, types, (whole, *args[1:]), kwargs)
        target.update(whole)
        return target

    env.dispatch = dispatch


def _pad_by_known_widths() -> None:
    """Padding by numbers that model code keeps in tensors, where they are known."""
    theirs = lowering_of(torch.nn.functional.pad)

    def number(width: Any) -> Any:
        if not isinstance(width, torch.Tensor) or folding.is_traced(width):
            return jax_view(width)
        with jax.ensure_compile_time_eval():
            return int(width)

    def pad(x: torch.Tensor, pad: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax_view((args, kwargs))
        return torch_view(theirs(jax_view(views_of(x)), [number(width) for width in pad], *args, **kwargs))

    lower_raw(torch.nn.functional.pad, pad)


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
        if not is_view(self) and any(is_view(x) for x in given):
            self = torch_view(to_jax_array(self))  # a table on the host, looked up by computed indices
        if len(given) == 1 and folding.is_unknown_mask(given[0]):
            return Selected(self, given[0])
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
