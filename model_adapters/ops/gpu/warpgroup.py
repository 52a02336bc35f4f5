"""What a Hopper warp group does in ways of its own: products out of shared memory, and the layouts that they give.

An interpreter has other means for each of these, and may put them in their place.
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
    """``float32[64, n]``: the products of queries ``[64, D]`` and keys ``[n, D]``, both in shared memory."""
    return _product(queries, plgpu.transpose_ref(keys, (1, 0)), keys.shape[0])


def sums(weights: jax.Array, values: Any) -> jax.Array:
    """``float32[64, Dv]``: values ``[n, Dv]`` in shared memory, summed by weights ``[64, n]``."""
    return _product(weights, values, values.shape[1])


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """The index along `axis`, laid out as a product is."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)


def by_row(x: jax.Array) -> jax.Array:
    """``x[64]``, laid out as the rows of a product are."""
    return plgpu.layout_cast(x, LAYOUT.reduce(1))


def by_tile(x: jax.Array) -> jax.Array:
    """``x[64, n]``, laid out as a product is."""
    return plgpu.layout_cast(x, LAYOUT)


def load(ref: Any) -> jax.Array:
    """A tile ``[64, n]`` of shared memory, laid out as a product is."""
    return plgpu.load(ref, (), layout=LAYOUT)
