"""Operations of a Hopper warp group: products of shared memory, and their layouts.

Tests replace each of these functions, because the interpreter does not know the instructions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA


def _product(left: Any, right: Any, num_columns: int) -> jax.Array:
    def run(out: Any) -> jax.Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], num_columns), jnp.float32))


def scores(queries: Any, keys: Any) -> jax.Array:
    """Returns ``queries[64, D] @ keys[n, D].T``, both in shared memory, as float32."""
    return _product(queries, plgpu.transpose_ref(keys, (1, 0)), keys.shape[0])


def sums(weights: jax.Array, values: Any) -> jax.Array:
    """Returns ``weights[64, n] @ values[n, Dv]`` as float32, values in shared memory."""
    return _product(weights, values, values.shape[1])


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Returns the index along `axis`, int32 of `shape`, in the layout of a product."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)


def by_row(x: jax.Array) -> jax.Array:
    """Returns ``x[64]`` in the layout of the rows of a product."""
    return plgpu.layout_cast(x, LAYOUT.reduce(1))


def by_tile(x: jax.Array) -> jax.Array:
    """Returns ``x[64, n]`` in the layout of a product."""
    return plgpu.layout_cast(x, LAYOUT)


def load(ref: Any) -> jax.Array:
    """Returns a tile ``[64, n]`` of shared memory in the layout of a product."""
    return plgpu.load(ref, (), layout=LAYOUT)
