"""Operations of a Hopper warp group: products of shared memory, and their layouts.

Tests replace each of these functions, because the interpreter does not know the instructions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA
# An index, which `plgpu.load` needs up to jax 0.10 and warns of from 0.11 on.
LOAD_INDEX = ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()


def _nothing() -> None:
    pass


def _product(left: Any, right: Any, num_columns: int, meanwhile: Callable[[], None] = _nothing) -> jax.Array:
    def run(out: Any) -> jax.Array:
        plgpu.wgmma(out, left, right)
        meanwhile()
        return out[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], num_columns), jnp.float32))


def scores(queries: Any, keys: Any, meanwhile: Callable[[], None] = _nothing) -> jax.Array:
    """Returns ``queries[64, D] @ keys[n, D].T``, both in shared memory, as float32.

    `meanwhile` is called while the product is computed.
    """
    return _product(queries, keys.transpose((1, 0)), keys.shape[0], meanwhile)


def sums(weights: jax.Array, values: Any) -> jax.Array:
    """Returns ``weights[64, n] @ values[n, Dv]`` as float32, values in shared memory."""
    return _product(weights, values, values.shape[1])


def add_product(sums: jax.Array, weights: jax.Array, values: Any, meanwhile: Callable[[], None]) -> jax.Array:
    """Returns float32 ``sums[64, Dv] + weights[64, n] @ values[n, Dv]``; values in smem.

    `meanwhile` is called while the product is computed.
    """

    def run(out: Any) -> None:
        plgpu.wgmma(out, weights, values)
        meanwhile()

    return pl.run_state(run)(plgpu.ACC.init(sums))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the index along `axis`, int32 of `shape`, in the layout of a product."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)


def row_iota(num_rows: int) -> jax.Array:
    """Returns the index of each row, ``int32[num_rows]``, in the layout of a product's rows."""
    return plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=LAYOUT.reduce(1))


def by_row(x: jax.Array) -> jax.Array:
    """Returns ``x[64]`` in the layout of the rows of a product."""
    return plgpu.layout_cast(x, LAYOUT.reduce(1))


def by_tile(x: jax.Array) -> jax.Array:
    """Returns ``x[64, n]`` in the layout of a product."""
    return plgpu.layout_cast(x, LAYOUT)


def load(ref: Any) -> jax.Array:
    """Returns a tile ``[64, n]`` of shared memory in the layout of a product."""
    return plgpu.load(ref, *LOAD_INDEX, layout=LAYOUT)
