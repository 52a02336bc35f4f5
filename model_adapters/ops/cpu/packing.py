"""Weights of bfloat16 taken together in three quarters of their bytes, and apart again; `packed.h` says how."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import kernels

ROWS, COLUMNS = 16, 8
"""Of a group, whose numbers are packed together."""
GROUP_BYTES = 192
CODES = 16
_MOST_IN_LIST = 1 / 8
"""Of groups. With more of them as they were, little is gained."""


def refuses(weight: jax.Array) -> str | None:
    """Why a weight is left as it is, or None."""
    if weight.dtype != jnp.bfloat16:
        return f"it is {weight.dtype}; only the high bytes of bfloat16 are much alike"
    if weight.ndim != 2 or weight.shape[0] % ROWS or weight.shape[1] % COLUMNS or not weight.size:
        return f"its shape is {list(weight.shape)}, not [n, k] of whole {ROWS}s and {COLUMNS}s"
    return kernels.refuses_packing()


def pack(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Groups uint8[n / 16, k / 8, 192] and index int32[...] of `weight` bfloat16[n, k]; None where little is gained."""
    n, k = weight.shape
    plain = np.ascontiguousarray(weight)
    groups = np.empty((n // ROWS, k // COLUMNS, GROUP_BYTES), np.uint8)
    table, first = np.empty(CODES, np.uint8), np.empty(n // ROWS + 1, np.int32)
    library = kernels.library()
    size = ctypes.c_int64(n), ctypes.c_int64(k)
    listed = int(library.tas_pack(_pointer(plain), *size, _pointer(table), _pointer(groups), _pointer(first)))
    if listed > groups.shape[0] * groups.shape[1] * _MOST_IN_LIST:
        return None
    at, words = np.empty(listed, np.int32), np.empty((listed, ROWS * COLUMNS // 2), np.int32)
    library.tas_pack_list(_pointer(plain), *size, _pointer(table), _pointer(at), _pointer(words))
    return groups, np.concatenate([table.view(np.int32), first, at, words.ravel()])


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
