"""Products of float rows with int8 matrices, for chips that multiply int8 only by int8.

A row is converted to 32-bit fixed point, whose four signed bytes are four rows of one int8 product. Sums are exact, so
that only rows are rounded: to 2^-23 of a query's largest element or better, and to 2^-31 of the largest weight.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

ONE = 127 << 24  # 1.0 in fixed point
SIGNS = 0x00808080  # sign bits of the three lower bytes
TINY = 1e-30  # divisor of a query of zeros


def multiplies_int8() -> bool:
    """Returns whether the chip that is compiled for multiplies int8."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().is_matmul_supported(jnp.int8, jnp.int8)


def times_keys(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns ``float32[R, n]``: ``q[R, lanes]`` times ``int8 keys[n, lanes]`` transposed.

    The lowest byte of a query is dropped.
    """
    q = q.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(q), axis=1, keepdims=True), TINY)
    words = _words(q / largest)
    rows = jnp.concatenate([(words << shift) >> 24 for shift in (16, 8, 0)], axis=0)
    products = jnp.split(_product(rows.astype(jnp.int8), keys, 1), 3, axis=0)
    return _joined(products) * (largest / 127)


def times_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns ``weights[R, n]``, from 0 to 1, times ``int8 values[n, lanes]``, as float32.

    The bytes of a word already are four consecutive rows of an int8 tile, so that no data is moved.
    """
    sums = _product(pltpu.bitcast(_words(weights), jnp.int8), values, 0)
    sums = sums.reshape(weights.shape[0], 4, values.shape[1])
    return _joined([sums[:, i] for i in range(4)]) * (1 / 127)


def _words(rows: jax.Array) -> jax.Array:
    """Returns rows in ``[-1, 1]`` times `ONE`, as int32 of four signed digits."""
    return ((rows * ONE).astype(jnp.int32) + SIGNS) ^ SIGNS


def _product(rows: jax.Array, matrix: jax.Array, contract: int) -> jax.Array:
    """Returns products of ``int8 rows[R, n]`` and axis `contract` of an int8 matrix, as float32."""
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(rows, matrix, dimensions, preferred_element_type=jnp.int32).astype(jnp.float32)


def _joined(products: list[jax.Array]) -> jax.Array:
    """Returns the sum of products with the digits of a word, lowest first."""
    return functools.reduce(lambda low, high: high + low * 2**-8, products)
