"""Lowerings of lookups, concatenation and padding that torchax lacks or lowers badly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.traced_length import TracedLength
from model_adapters.bridge.views import (
    TorchTensor,
    as_views,
    get_lowering,
    is_view,
    jax_view,
    set_lowering,
    set_raw_lowering,
    set_view_lowering,
    to_jax_array,
    torch_view,
)
from model_adapters.lowerings import aliases, argument_checks, constant_folding, index_checks, masked_writes, overlaps
from model_adapters.lowerings.deferred_checks import TracedMaskSelection
from model_adapters.lowerings.integers import long_dtype
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import compressed_of, note_turned, quantized_of, take_compressed_rows
from model_adapters.ops.linear import accumulator
from model_adapters.ops.quantized_weight import take_rows
from model_adapters.sharding.sharded_trace import note_parts


def _check_lookups() -> None:
    """Checks indices that take rows of the module's tensors, as ``embedding`` does."""
    index, select, gather = (
        get_lowering(op) for op in (torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather)
    )

    def checked_getitem(self: torch.Tensor, indexes: Any) -> Any:
        rows, *others = indexes if isinstance(indexes, tuple) and indexes else (indexes,)
        is_lookup = isinstance(self, TorchTensor) and isinstance(rows, TorchTensor)
        if is_lookup and all(isinstance(other, slice) for other in others):
            index_checks.check_rows(jax_view(self), jax_view(rows), 0, from_end=True)
        return _getitem(self, indexes)

    def checked_index(tensor: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if indices and all(other is None for other in indices[1:]):
            index_checks.check_rows(tensor, indices[0], 0, from_end=True)
        _check_parts("index", tensor, indices)
        return index(tensor, indices, *args, **kwargs)

    def checked_select(tensor: Any, dim: int, indices: Any, *args: Any, **kwargs: Any) -> Any:
        index_checks.check_rows(tensor, indices, dim)
        index_checks.check_known("index_select", _length(tensor, dim), indices)
        return select(tensor, dim, indices, *args, **kwargs)

    def checked_gather(tensor: Any, dim: int, indices: Any, *args: Any, **kwargs: Any) -> Any:
        index_checks.check_rows(tensor, indices, dim)
        index_checks.check_known("gather", _length(tensor, dim), indices)
        _check_shape(tensor.shape, dim, indices.shape)
        return gather(tensor, dim, indices, *args, **kwargs)

    aten = torch.ops.aten
    scatter = get_lowering(aten.scatter.value)

    def scatter_number(tensor: Any, dim: int, indices: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _as_dtype(value, tensor.dtype) if isinstance(value, int | float) else value
        return scatter(tensor, dim, indices, value, *args, **kwargs)

    set_lowering(aten.scatter.value, scatter_number, keep_kind=True)
    for op in (aten.scatter.src, aten.scatter.value, aten.index_copy):
        name = str(op).split(".")[1]
        set_lowering(op, index_checks.checked(name, get_lowering(op)), keep_kind=True)
    take = get_lowering(aten.take)

    def checked_take(tensor: Any, indices: Any) -> Any:
        index_checks.check_known("take", tensor.size, indices, from_end=True)
        return take(tensor, indices)

    set_lowering(aten.take, checked_take, keep_kind=True)
    set_raw_lowering(torch.Tensor.__getitem__, checked_getitem)
    for op in (torch.ops.aten.index, torch.ops.aten.index.Tensor):
        set_lowering(op, checked_index, keep_kind=True)
    set_lowering(torch.ops.aten.index_select, checked_select, keep_kind=True)
    set_lowering(torch.ops.aten.gather, checked_gather, keep_kind=True)


def _length(x: Any, dim: int) -> int:
    return int(x.shape[dim]) if x.ndim else 1


def _check_shape(shape: Sequence[int], dim: int, chosen: Sequence[int]) -> None:
    """Raises RuntimeError if indices of `gather` are longer than the tensor along another axis."""
    pairs = list(zip(shape, chosen, strict=False))
    if shape and any(most < length for axis, (most, length) in enumerate(pairs) if axis != dim % len(shape)):
        raise RuntimeError(f"gather: expected indices of at most the shape {list(shape)}, got {list(chosen)}")


def _check_parts(operator: str, x: Any, parts: Sequence[Any]) -> None:
    """Checks the integer arrays among the parts of an index of arrays, each along its axis."""
    if any(hasattr(part, "dtype") and part.dtype == bool for part in parts):
        return  # masks, which may stand for several axes
    for axis, part in enumerate(parts):
        index_checks.check_known(operator, x.shape[axis], part, from_end=True)


def _getitem(self: torch.Tensor, indexes: Any) -> torch.Tensor:
    """Computes ``self[indexes]``: a view, or a copy if tensors, lists or masks choose elements."""
    index = _index_parts(indexes)
    if all(map(_is_of_numbers, index)):
        return aliases.getitem(self, index)
    index = jax_view(as_views(index))
    chosen = [each for each in index if isinstance(each, jax.Array | np.ndarray | bool)]
    numbers = [each for each in chosen if not isinstance(each, bool) and not each.ndim and each.dtype != bool]
    if len(chosen) == len(numbers) and (not chosen or len(chosen) == 1):
        return aliases.getitem(self, index)
    if all(isinstance(each, slice | jax.Array | np.ndarray) for each in index):
        _check_parts("index", self, index)
    return torch_view(jax_view(self)[index])


def _is_of_numbers(part: Any) -> bool:
    """Tells whether a part of an index is an integer, a slice of such, None or ..."""
    ends = (part.start, part.stop, part.step) if type(part) is slice else (part,)
    return all(end is None or end is ... or type(end) is int for end in ends)


def _index_parts(indexes: Any) -> tuple[Any, ...]:
    """Returns the parts of the index in ``x[indexes]``, lists and ranges of numbers as arrays."""
    if isinstance(indexes, list) and not all(isinstance(each, int) for each in indexes):
        indexes = tuple(indexes)
    given = indexes if isinstance(indexes, tuple) else (indexes,)
    return tuple(np.asarray(each) if isinstance(each, list | range) else each for each in given)


def _write_items() -> None:
    """Fixes ``tensor[key] = value``.

    torchax 0.0.13 bypasses its table there, and refuses values with further axes of length 1.
    """
    theirs = TorchTensor.__setitem__

    def set_item(self: Any, key: Any, value: Any) -> None:
        before = jax_view(self)
        if isinstance(value, torch.Tensor):
            overlaps.check_item(self, _index_parts(key), value)
            value = jax_view(as_views(value)).astype(before.dtype)
            while value.ndim > 1 and value.shape[0] == 1:
                value = value[0]
        elif type(value) in (int, float):
            if not jnp.issubdtype(before.dtype, jnp.inexact):
                argument_checks.check_number("fill_", value, self.dtype)
            value = _as_dtype(value, before.dtype)
        key = jax_view(as_views(_index_parts(key)))
        if all(isinstance(each, slice | jax.Array | np.ndarray) for each in key):
            _check_parts("index_put", before, key)
        if len(key) == 1 and masked_writes.is_mask(key[0]):
            self._elem = aliases.apart(masked_writes.put(before, key[0], jnp.asarray(value, before.dtype)))
            return
        written = torch_view(before)
        theirs(written, key, torch_view(value))
        self._elem = aliases.apart(jax_view(written))

    TorchTensor.__setitem__ = set_item


def _as_dtype(number: Any, dtype: Any) -> Any:
    """Returns a number as PyTorch converts it to `dtype`.

    Floats lose what is behind the point, integers below 0 become the unsigned ones of the same last bits.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        number = int(number)
        return number & jnp.iinfo(dtype).max if number < 0 and jnp.issubdtype(dtype, jnp.unsignedinteger) else number
    if not jnp.issubdtype(dtype, jnp.floating):
        return number
    with np.errstate(over="ignore"):
        return float(np.asarray(number).astype(dtype))


def _keep_tables_short() -> None:
    """Replaces ``embedding``: checks indices, and does not convert 16-bit tables on a CPU.

    XLA converts the operand of a gather to float32 there. Usually the conversion is fused with the gather and covers
    only the rows that are taken. Before a loop, XLA would convert all of the table, since the table is the same in all
    iterations. A barrier over the table together with the indices prevents that.
    """
    theirs = get_lowering(torch.ops.aten.embedding)

    def embedding(weight: jax.Array, indices: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        index_checks.check(weight, indices)
        index_checks.check_known("embedding", weight.shape[0], indices)
        if (table := quantized_of(weight)) is not None and not table.scheme.transposed:
            return take_rows(table, indices)
        if (packed := compressed_of(weight)) is not None and packed.plain is None:
            return take_compressed_rows(packed, indices)
        is_short = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2
        if is_short and registry.platform() == "cpu":
            weight, indices = jax.lax.optimization_barrier((weight, indices))
        rows = theirs(weight, indices, *args, **kwargs)
        if kwargs.get("scale_grad_by_freq", args[1:2] == (True,)):
            counts = jnp.zeros(weight.shape[0], weight.dtype).at[indices.reshape(-1)].add(1)[indices][..., None]
            rows = rows / counts + jax.lax.stop_gradient(rows - rows / counts)
        return rows

    set_lowering(torch.ops.aten.embedding, embedding)


def _find_turned_weights() -> None:
    """Lets products find a quantized weight behind its transpose.

    The transposes are ``weight.T`` and ``weight.transpose(-2, -1)``.
    """
    transpose, turn = get_lowering(torch.ops.aten.transpose), get_lowering(torch.ops.aten.t)

    def noted_transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
        out = transpose(x, dim0, dim1)
        if x.ndim > 1 and {dim0 % x.ndim, dim1 % x.ndim} == {x.ndim - 2, x.ndim - 1}:
            note_turned(x, out)
        return out

    def noted_turn(x: jax.Array) -> jax.Array:
        out = turn(x)
        if x.ndim == 2:
            note_turned(x, out)
        return out

    set_lowering(torch.ops.aten.transpose, noted_transpose, keep_kind=True)
    set_lowering(torch.ops.aten.t, noted_turn, keep_kind=True)


def _cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Computes ``torch.cat``, on a CPU in a faster layout for [B, heads, T, dim].

    Along the last dimension, the concatenation is written with heads and T exchanged. Models transpose [B, T, heads,
    dim] and rotate the halves of its last dimension (rotary embeddings). XLA on a CPU does not move a transpose through
    a concatenation and then copies number by number, four times slower.
    """
    parts = [x for x in tensors if x.shape != (0,)]  # which torch leaves out, whatever the others' shape
    if not parts:
        return tensors[0]
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in parts))
    parts = [x.astype(dtype) for x in parts]
    if parts[0].ndim == 4 and dim in (-1, 3) and registry.platform() == "cpu":
        return jnp.swapaxes(jnp.concatenate([jnp.swapaxes(x, 1, 2) for x in parts], 3), 1, 2)
    joined = jnp.concatenate(parts, dim)
    if dim in (-1, joined.ndim - 1):
        note_parts(joined, parts)
    return joined


def _one_hot(x: jax.Array, num_classes: int = -1) -> jax.Array:
    """Computes ``one_hot``, which refuses classes that it has no column for."""
    if num_classes != -1:
        index_checks.check_known("one_hot", num_classes, x)
    count: Any = num_classes if num_classes != -1 else jnp.max(x) + 1
    return jax.nn.one_hot(x, count, dtype=long_dtype())


def _index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: float = 1) -> jax.Array:
    """Computes ``torch.index_add`` for an index known on the host, which torch refuses."""
    index_checks.check_known("index_add", _length(x, dim), index)
    added = (alpha * source).astype(x.dtype)
    if x.dtype == bool:
        return _index_add(x.astype(jnp.int32), dim, index, added.astype(jnp.int32)) != 0
    if not x.ndim:
        return x + added.reshape(-1).sum()
    at = x.astype(accumulator(x.dtype)).at[(slice(None),) * (dim % x.ndim) + (index.reshape(-1),)]
    return at.add(added.astype(accumulator(x.dtype))).astype(x.dtype)


def _pad_by_known_widths() -> None:
    """Lets model code pad by numbers in tensors, if their values are known."""
    theirs = get_lowering(torch.nn.functional.pad)

    def number(width: Any) -> Any:
        if not isinstance(width, torch.Tensor) or constant_folding.is_traced(width):
            return jax_view(width)
        with jax.ensure_compile_time_eval():
            return int(width)

    def pad(x: torch.Tensor, pad: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax_view((args, kwargs))
        return torch_view(theirs(jax_view(as_views(x)), [number(width) for width in pad], *args, **kwargs))

    set_raw_lowering(torch.nn.functional.pad, pad)


def _split_at_known_places() -> None:
    """Lets ``tensor_split`` have places in a tensor of known values.

    PyTorch wants it on the host.
    """

    def known(value: Any) -> Any:
        if not isinstance(value, TorchTensor) or constant_folding.is_traced(value):
            return value
        return np.asarray(jax_view(value)).tolist()

    def split_by(function: Any) -> Any:
        def split(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            names = {"tensor_indices_or_sections": "indices_or_sections"}
            kwargs = {names.get(name, name): known(value) for name, value in kwargs.items()}
            return function(x, *map(known, args), **kwargs)

        return split

    for function in (torch.tensor_split, torch.Tensor.tensor_split):
        set_view_lowering(function, split_by(function))


def _understand_stored_lengths() -> None:
    """Replaces ``arange`` and slices, so that they may start and end at stored lengths.

    The two lengths are a known number of tokens apart.
    """
    their_arange, their_getitem = get_lowering(torch.arange), get_lowering(torch.Tensor.__getitem__)

    def arange(start: Any = None, end: Any = None, step: Any = None, **kwargs: Any) -> jax.Array:
        start = 0 if start is None else start  # ``arange(end=5)``
        if isinstance(start, TracedLength) and step in (None, 1):
            length = start.distance(end)
            if length is not None:
                numbers = their_arange(0, length, **kwargs)
                return numbers + jax_view(start).astype(numbers.dtype)
        return their_arange(*jax_view((start, end, step)), **kwargs)

    def getitem(self: torch.Tensor, indexes: Any) -> Any:
        given = indexes if isinstance(indexes, tuple) else (indexes,)
        if not is_view(self) and any(is_view(x) for x in given):
            self = torch_view(to_jax_array(self))  # a table on the host, looked up by computed indices
        if len(given) == 1 and constant_folding.is_traced_mask(given[0]):
            return TracedMaskSelection(self, given[0])
        if not any(isinstance(x, slice) and isinstance(x.start, TracedLength) for x in given):
            return their_getitem(self, indexes)
        array, rest = jax_view(self), list(given)
        for axis, index in enumerate(given):
            if isinstance(index, slice) and isinstance(index.start, TracedLength):
                length = index.start.distance(index.stop)
                if length is None or index.step not in (None, 1) or any(x is None or x is ... for x in given[:axis]):
                    return their_getitem(self, indexes)
                array = jax.lax.dynamic_slice_in_dim(array, jax_view(index.start), length, axis)
                rest[axis] = slice(None)
        return their_getitem(torch_view(array), tuple(rest))

    set_raw_lowering(torch.arange, arange)
    set_raw_lowering(torch.Tensor.__getitem__, getitem)
