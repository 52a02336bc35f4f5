"""Lossless compression of bfloat16 weights to three quarters; see `packed.h` for the format."""

from __future__ import annotations

import ctypes
import math

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.ffi import GROUP_COLUMNS, GROUP_ROWS

GROUP_BYTES = 192  # of a group of 16 rows and 8 columns, which takes 256 bytes uncompressed
CODES = 16  # entries in the table of high bytes: 4 bits each
_MAX_UNCOMPRESSED_SHARE = 8  # at most one group of so many is stored uncompressed; with more, little is saved


def unsupported_reason(weight: jax.Array) -> str | None:
    """Returns why a matrix or a stack of them cannot be compressed, or None."""
    if weight.dtype != jnp.bfloat16:
        return f"it is {weight.dtype}; only the high bytes of bfloat16 are much alike"
    shape = list(weight.shape)
    if weight.ndim not in (2, 3) or shape[-1] % GROUP_COLUMNS or not weight.size:
        return f"its shape is {shape}, not [n, k] or [matrices, n, k] with k of whole {GROUP_COLUMNS}s"
    if shape[-2] % GROUP_ROWS and (weight.ndim == 3 or shape[0] < GROUP_ROWS):
        return f"its shape is {shape}: expected n of whole {GROUP_ROWS}s, or above in one matrix"
    return ffi.packing_unsupported_reason()


def group_bytes(shape: tuple[int, ...]) -> int:
    """Returns the bytes of the groups of a weight of `shape`, padded for the next weight."""
    *matrices, n, k = shape
    size = math.prod(matrices) * -(-n // GROUP_ROWS) * (k // GROUP_COLUMNS) * GROUP_BYTES
    return size + -size % XLA_CPU_ALIGNMENT


def pack(weight: np.ndarray, place: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns groups uint8[..., n / 16, k / 8, 192] and int32 index; None if little is saved.

    Args:
        weight: bfloat16[n, k], whose last row is repeated up to whole 16s; or [matrices, n, k]: packed as one matrix,
            below each other.
        place: Memory for the groups, uint8[group_bytes(weight.shape)], or None for new memory.
    """
    if missing := -weight.shape[-2] % GROUP_ROWS:
        weight = np.pad(weight, ((0, missing), (0, 0)), mode="edge")
    *matrices, rows, k = weight.shape
    n = math.prod(matrices) * rows
    plain = np.ascontiguousarray(weight)
    shape = (n // GROUP_ROWS, k // GROUP_COLUMNS, GROUP_BYTES)
    groups = np.empty(math.prod(shape), np.uint8) if place is None else place[: math.prod(shape)]
    table, first = np.empty(CODES, np.uint8), np.empty(n // GROUP_ROWS + 1, np.int32)
    most = shape[0] * shape[1] // _MAX_UNCOMPRESSED_SHARE
    at, words = np.empty(most, np.int32), np.empty((most, GROUP_ROWS * GROUP_COLUMNS // 2), np.int32)
    sizes = [ctypes.c_int64(size) for size in (n, k, most)]
    arrays = [_pointer(array) for array in (table, groups, first, at, words)]
    count = int(ffi.library().tas_pack(_pointer(plain), *sizes, *arrays))
    if count > most:
        return None
    return groups.reshape(*matrices, rows // GROUP_ROWS, *shape[1:]), np.concatenate(
        [table.view(np.int32), first, at[:count], words[:count].ravel()]
    )


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
