"""Conversion of quantized numbers from and to the order of `cpu/quantized_rows.h`.

Sixteen rows of a matrix form a block; four columns of a row are a word of 32 bits. Of int8 one step of 64 bytes holds a
word of each of the sixteen rows; of 4 bits it holds two steps, in the low and the high halves of its bytes. On a mesh
of CPU devices numbers of 4 bits are pairs: a byte holds two neighbouring columns of a row, so that XLA can divide them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT

BLOCK_ROWS, UNIT_COLUMNS, STEP_COLUMNS = 16, 32, 4


def to_steps(values: np.ndarray, bits: int, zero: int) -> np.ndarray:
    """Returns integers ``[..., out, in]`` in the kernel's order of steps, on the host.

    These are int8 ``[..., out / 16, in / 4, 16, 4]`` or uint8 ``[..., out / 16, in / 8, 16, 4]``, aligned for XLA.

    Args:
        values: int8 or uint8 numbers or bits; of 4 bits from ``-zero`` to ``15 - zero``.
        bits: 8 or 4.
        zero: Added to numbers of 4 bits: 8 or 0.
    """
    *lead, rows, columns = values.shape
    blocks, width = -(-rows // BLOCK_ROWS), -(-columns // UNIT_COLUMNS) * UNIT_COLUMNS
    words = _padded(values.view(np.uint8), blocks * BLOCK_ROWS, width).view(np.uint32)
    words = words.reshape(*lead, blocks, BLOCK_ROWS, -1)
    steps = aligned_empty((*lead, blocks, width * bits // 32, BLOCK_ROWS), np.uint32)
    turned = np.swapaxes(steps, -1, -2)
    if bits == 8:
        turned[...] = words
        return steps[..., None].view(np.int8)
    # A number plus 8 has the four lowest bits of the number with the highest of them turned over.
    np.bitwise_or(_low_halves(words[..., ::2], zero), _low_halves(words[..., 1::2], zero) << np.uint32(4), out=turned)
    return steps[..., None].view(np.uint8)


def to_pairs(values: np.ndarray, zero: int) -> np.ndarray:
    """Returns numbers of 4 bits on the host, two columns in a byte: uint8[..., out, in / 2].

    Args:
        values: int8 or uint8 ``[..., out, in]`` from ``-zero`` to ``15 - zero``, `in` even.
        zero: Added to the numbers: 8 or 0.
    """
    both = np.ascontiguousarray(values).view(np.uint16)  # the second column is the high byte
    both = (both & np.uint16(0x0F0F)) ^ np.uint16(0x0808 if zero else 0)
    return (both | both >> np.uint16(4)).astype(np.uint8)


def from_pairs(pairs: jax.Array, zero: int) -> jax.Array:
    """Returns the numbers int8[..., out, in] of :func:`to_pairs`."""
    halves = pairs[..., None] >> jnp.asarray([0, 4], jnp.uint8) & 15
    return (halves.astype(jnp.int8) - zero).reshape(*pairs.shape[:-1], -1)


def _low_halves(words: np.ndarray, zero: int) -> np.ndarray:
    return (words & np.uint32(0x0F0F0F0F)) ^ np.uint32(0x08080808 if zero else 0)


def _padded(array: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """Returns ``array[..., rows, columns]`` in C order with zeros behind its rows and columns."""
    if array.shape[-2:] == (num_rows, num_columns):
        return np.ascontiguousarray(array)
    padded = np.zeros((*array.shape[:-2], num_rows, num_columns), array.dtype)
    padded[..., : array.shape[-2], : array.shape[-1]] = array
    return padded


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns memory that JAX takes over without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + XLA_CPU_ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % XLA_CPU_ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _split(steps: jax.Array, bits: int, zero: int) -> jax.Array:
    """Returns int8 ``[..., in / 4, 4]`` of stored steps ``[..., in / 4 or in / 8, 4]``."""
    if bits == 8:
        return steps
    halves = jnp.stack([steps & 15, steps >> 4], -2)
    return (halves.astype(jnp.int8) - zero).reshape(*steps.shape[:-2], -1, STEP_COLUMNS)


def from_steps(steps: jax.Array, bits: int, zero: int, rows: int, columns: int) -> jax.Array:
    """Returns the numbers int8[..., rows, columns] of :func:`to_steps`."""
    words = _split(jnp.swapaxes(steps, -3, -2), bits, zero)  # [..., out / 16, 16, in / 4, 4]
    return words.reshape(*steps.shape[:-4], -1, words.shape[-2] * STEP_COLUMNS)[..., :rows, :columns]


def rows_of_steps(steps: jax.Array, bits: int, zero: int, indices: jax.Array, columns: int) -> jax.Array:
    """Returns rows int8[*indices.shape, columns] of a matrix in the kernel's order of steps.

    The matrix is ``[out / 16, ..., 16, 4]``.
    """
    words = _split(steps[indices // BLOCK_ROWS, :, indices % BLOCK_ROWS], bits, zero)
    return words.reshape(*indices.shape, -1)[..., :columns]


def to_blocks(scale: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns scales or offsets ``[..., out, groups]`` in blocks of 16 rows, on the host.

    The blocks are ``dtype[..., out / 16, groups, 16]``, padded with zeros, aligned for XLA.
    """
    *lead, rows, groups = scale.shape
    blocks = -(-rows // BLOCK_ROWS)
    made = aligned_empty((*lead, blocks, groups, BLOCK_ROWS), dtype)
    padded = _padded(np.asarray(scale, np.float32), blocks * BLOCK_ROWS, groups)
    np.swapaxes(made, -1, -2)[...] = padded.reshape(*lead, blocks, BLOCK_ROWS, groups)
    return made


def from_blocks(scale: jax.Array, rows: int) -> jax.Array:
    """Returns the scales ``[..., rows, groups]`` of :func:`to_blocks`."""
    turned = jnp.swapaxes(scale, -1, -2)
    return turned.reshape(*scale.shape[:-3], -1, scale.shape[-2])[..., :rows, :]
