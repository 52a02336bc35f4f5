"""Writes into a tensor whose memory an operand shares in part: refused if PyTorch differs.

PyTorch refuses them itself, or computes in the order of its loop.

``x[1:] += x[:-1]`` reads elements that the same operator writes. JAX reads all of them before. PyTorch has an error for
it where both tensors are dense; where they are not, the result depends on which elements its loop has written before it
reads them. What would differ is refused, by name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from model_adapters.bridge.views import TorchTensor, default_env
from model_adapters.errors import OperatorArgumentError
from model_adapters.lowerings import strides

_LOOPS = frozenset(("copy_", "masked_fill_", "where", "copysign_", "heaviside_", "threshold_", "bernoulli_"))
"""Operators that compute element by element, beside those that PyTorch tags so."""
_READ_WHILE_WRITING = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "cat", "stack", "gather", "take")
)
"""Operators whose ``out=`` may be none of their operands."""
_READ_ONCE = frozenset({"fill_", "masked_fill_", "index_fill_"})
"""Operators that read a number in a tensor before they write."""
_MOST_ELEMENTS = 1 << 24
"""Tensors of more elements are not compared: their places would take seconds."""


def install() -> None:
    """Makes torchax ask before an operator writes into a tensor."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if "out" in kwargs or (isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable):
            _check(func, args, kwargs)
        return theirs(func, types, args, kwargs)

    env.dispatch = dispatch


@dataclasses.dataclass(frozen=True)
class _WrittenArguments:
    """What an operator writes, and how it reads.

    Attributes:
        name: Of the operator, without its overload.
        places, names: Of the arguments that it writes to.
        is_loop: Whether it computes element by element.
        changes_shape: Whether it makes its first operand a view of what that was.
    """

    name: str
    places: frozenset[int]
    names: frozenset[str]
    is_loop: bool
    changes_shape: bool


@functools.cache
def _written_arguments(func: Any) -> _WrittenArguments:
    if not isinstance(func, torch._ops.OpOverload):
        name = getattr(func, "__name__", "")
        packet = getattr(torch.ops.aten, name, None)
        is_loop = name in _LOOPS or any(
            torch.Tag.pointwise in getattr(packet, each).tags for each in (packet.overloads() if packet else ())
        )
        return _WrittenArguments(name, frozenset(), frozenset({"out"}), is_loop, False)
    written = [
        (place, each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    name = func._schema.name.partition("::")[2]
    return _WrittenArguments(
        name,
        frozenset(place for place, _ in written),
        frozenset(name for _, name in written),
        torch.Tag.pointwise in func.tags or name in _LOOPS,
        torch.Tag.inplace_view in func.tags,
    )


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Raises OperatorArgumentError if an operand may be written before it is read."""
    kind = _written_arguments(func)
    given = [*((place in kind.places, each) for place, each in enumerate(args))]
    given += [(name in kind.names, each) for name, each in kwargs.items()]
    targets = [x for is_written, each in given if is_written for x in _tensors(each)]
    operands = [x for is_written, each in given if not is_written for x in _tensors(each)]
    if not targets or not operands or kind.changes_shape:
        return
    may_be_same = kind.is_loop or not (kind.name.endswith("_") or kind.name in _READ_WHILE_WRITING)
    for target, operand in itertools.product(targets, operands):
        if operand is target and not may_be_same:
            raise _refusal(kind.name)
        if _may_share(target, operand) and not (kind.name in _READ_ONCE and not operand.ndim):
            _compare(kind.name, target, target._strided, operand, is_loop=kind.is_loop, may_be_same=may_be_same)


def _tensors(value: Any) -> Iterator[Any]:
    """Yields the torch views in an argument that have elements."""
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, TorchTensor) and each.numel():
            yield each


def _may_share(target: Any, operand: Any) -> bool:
    if operand is target or operand._alias is None or target._alias is None:
        return False
    return bool(operand._alias.base() is target._alias.base())


def check_item(tensor: Any, key: Any, value: Any) -> None:
    """Raises OperatorArgumentError if ``tensor[key] = value`` reads what it writes.

    `key` is a tuple.
    """
    is_view = isinstance(value, TorchTensor) and bool(value.numel())
    if not is_view or not _may_share(tensor, value) or any(isinstance(part, bool) for part in key):
        return
    chosen = [hasattr(part, "ndim") and bool(part.ndim) for part in key]  # masks, and arrays of integers
    parts: list[Any] = []
    for part, is_chosen in zip(key, chosen, strict=True):
        num_axes = part.ndim if is_chosen and str(part.dtype).endswith("bool") else 1
        parts += [slice(None)] * num_axes if is_chosen else [part]
    try:
        with no_dispatch(), torch._C.DisableTorchFunction():
            shape = tuple(strides.empty(tensor)[tuple(parts)].shape)
    except Exception:  # an index of unknown value, or one that the write itself refuses
        return
    into, is_loop = strides.after_index(tensor, tuple(parts)), not any(chosen)
    name = "copy_" if is_loop else "index_put_"
    _compare(name, _Target(shape, tensor.dtype), into, value, is_loop=is_loop, may_be_same=is_loop)


class _Target:
    """Shape and dtype of the part of a tensor that is written."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _compare(name: str, target: Any, strided: Any, operand: Any, *, is_loop: bool, may_be_same: bool) -> None:
    """Raises OperatorArgumentError if `operand` may be written before it is read.

    It is if it has elements of `target`.
    """
    noted = operand._strided
    sizes = [int(np.prod(each.shape)) for each in (target, operand)]
    if strided is strides.UNKNOWN or noted is strides.UNKNOWN or max(sizes) > _MOST_ELEMENTS:
        return
    width = min(target.dtype.itemsize, operand.dtype.itemsize)
    written, read = _places(target, strided, width), _places(operand, noted, width)
    if not np.isin(written, read).any():
        return
    if may_be_same and np.array_equal(written, read):
        return
    may_be_part = is_loop and not (_is_dense(written) and _is_dense(read))
    if may_be_part and _is_read_first(target, written, operand, read):
        return
    raise _refusal(name)


def _refusal(name: str) -> OperatorArgumentError:
    return OperatorArgumentError(
        f"{name}: expected operands that share no memory with the tensor that is written, or all of it in the same "
        "order, got one whose elements may be written before they are read; give a clone() of it"
    )


def _places(tensor: Any, strided: Any, width: int) -> np.ndarray:
    """Returns the places of a tensor's elements in parts of `width` bytes, int64[n * parts]."""
    num_parts = tensor.dtype.itemsize // width
    places = strides.offsets(tuple(tensor.shape), strided)
    return places if num_parts == 1 else (places[:, None] * num_parts + np.arange(num_parts)).reshape(-1)


def _is_dense(places: np.ndarray) -> bool:
    return int(places.max() - places.min()) + 1 == len(np.unique(places))


def _is_read_first(target: Any, written: np.ndarray, operand: Any, read: np.ndarray) -> bool:
    """Tells whether a loop over `target` reads each element before it writes it.

    The order is that of memory.
    """
    if target.dtype.itemsize != operand.dtype.itemsize:
        return False
    read = np.broadcast_to(read.reshape(tuple(operand.shape)), tuple(target.shape)).reshape(-1)
    order = np.argsort(written, kind="stable")
    turns = np.empty_like(order)
    turns[order] = np.arange(len(order))
    found = np.searchsorted(written, read, sorter=order).clip(max=len(order) - 1)
    is_written = written[order[found]] == read
    return bool((~is_written | (found >= turns)).all())
