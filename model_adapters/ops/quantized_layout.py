"""Conversion of quantized numbers to and from the C++ kernels' order (`cpu/quantized.h`).

Sixteen rows of a matrix form a block; four columns of a row are a word of 32 bits. Of int8 one step of 64 bytes holds a
word of each of the sixteen rows; of 4 bits it holds two steps, in the low and the high halves of its bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK_ROWS, UNIT_COLUMNS, STEP_COLUMNS = 16, 32, 4


def _padded(array: jax.Array, num_rows: int, num_columns: int) -> jax.Array:
    missing = (num_rows - array.shape[-2], num_columns - array.shape[-1])
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, each) for each in missing])


def to_steps(values: jax.Array, bits: int, zero: int) -> jax.Array:
    """Returns integers ``[..., out, in]`` in the kernel's order of steps.

    These are int8 ``[..., out / 16, in / 4, 16, 4]`` or uint8 ``[..., in / 8, 16, 4]``.

    Args:
        values: From -128 to 127, or of 4 bits from ``-zero`` to ``15 - zero``.
        bits: 8 or 4.
        zero: Added to numbers of 4 bits.
    """
    *lead, rows, columns = values.shape
    blocks, units = -(-rows // BLOCK_ROWS), -(-columns // UNIT_COLUMNS)
    padded = _padded(values.astype(jnp.int8), blocks * BLOCK_ROWS, units * UNIT_COLUMNS)
    words = padded.reshape(*lead, blocks, BLOCK_ROWS, -1, STEP_COLUMNS)
    steps = jnp.swapaxes(words, -3, -2)
    if bits == 8:
        return steps
    halves = (steps + zero).astype(jnp.uint8).reshape(*lead, blocks, -1, 2, BLOCK_ROWS, STEP_COLUMNS)
    return halves[..., 0, :, :] | halves[..., 1, :, :] << 4


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


def to_blocks(scale: jax.Array) -> jax.Array:
    """Returns scales or offsets ``[..., out, groups]`` in blocks of 16 rows.

    The blocks are ``[..., out / 16, groups, 16]``, padded with zeros.
    """
    *lead, rows, groups = scale.shape
    blocks = -(-rows // BLOCK_ROWS)
    return jnp.swapaxes(_padded(scale, blocks * BLOCK_ROWS, groups).reshape(*lead, blocks, BLOCK_ROWS, groups), -1, -2)


def from_blocks(scale: jax.Array, rows: int) -> jax.Array:
    """Returns the scales ``[..., rows, groups]`` of :func:`to_blocks`."""
    turned = jnp.swapaxes(scale, -1, -2)
    return turned.reshape(*scale.shape[:-3], -1, scale.shape[-2])[..., :rows, :]
