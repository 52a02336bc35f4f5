"""Products of groups of rows with one weight each: tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.linear import accumulator, precision
from model_adapters.ops.routed_matmul import LAYOUTS, Layout, routed_kernel
from model_adapters.ops.searchsorted import num_at_most

OP = "grouped_matmul"
MAX_TILE = 64  # rows of a product of the tiled implementation


def grouped_matmul(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout = "ekn") -> jax.Array:
    """Returns each row of `x` times the weight of its group.

    Args:
        x: ``[T, K]``, rows sorted by group.
        weight: ``[E, K, N]``, or ``[E, N, K]`` with ``layout="enk"``, which needs no transposed copy of weights
            stored as ``[out, in]``.
        group_sizes: ``int32[E]``, the number of rows of each group. Rows after the last group give zeros.
        layout: Order of the axes of `weight`.

    Returns:
        ``[T, N]`` in x's dtype, sums in float32.

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit together.
    """
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"grouped_matmul: expected layout 'ekn' or 'enk', got {layout!r}")
    inner = weight.shape[1 if layout == "ekn" else 2] if weight.ndim == 3 else None
    fits = x.ndim == 2 and inner == x.shape[1] and group_sizes.shape == weight.shape[:1] and x.dtype == weight.dtype
    if not fits:
        raise InvalidArgumentError(
            f"grouped_matmul: expected x[T, K], weight[{', '.join(layout.upper())}] of one dtype and group_sizes[E], "
            f"got {x.dtype}{list(x.shape)}, {weight.dtype}{list(weight.shape)} and {list(group_sizes.shape)}"
        )
    out: jax.Array = registry.call(OP, x, weight, group_sizes, layout=layout)
    return out


def by_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns ``x[heads, T, K]`` times each head's ``weight[heads, N, K]``: ``[heads, T, N]``.

    Sums are in float32.
    """
    if registry.platform() == "cpu" and spmd.mesh_in_use() is None:  # the kernel gives a row the same for any others
        num_heads, num_rows, num_in = x.shape
        sizes = jnp.full(num_heads, num_rows, jnp.int32)
        out = grouped_matmul(x.reshape(-1, num_in), weight, sizes, layout="enk")
        return out.reshape(num_heads, num_rows, -1)
    sums = jnp.einsum(
        "htk,hnk->htn", x, weight, precision=precision(x.dtype), preferred_element_type=accumulator(x.dtype)
    )
    return sums.astype(x.dtype)


@registry.define(OP, "runs of rows times one weight matrix each (experts)")
def reference(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes XLA's ragged product; on CPU that is a masked dense product with every group."""
    if layout == "enk":
        weight = jnp.swapaxes(weight, 1, 2)
    sums = jax.lax.ragged_dot(
        x,
        weight,
        group_sizes.astype(jnp.int32),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )
    return zero_after(sums, group_sizes).astype(x.dtype)


def zero_after(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns ``rows[T, N]`` with zeros after the last group of ``group_sizes[E]``."""
    inside = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(inside[:, None], rows, 0)


def _tile_len(num_rows: int, num_groups: int) -> int:
    """Returns the rows of a tile, a power of two near the mean size of a group."""
    tile = 4
    while tile < MAX_TILE and tile * num_groups < num_rows:
        tile *= 2
    return tile


def over_tiles(
    x: jax.Array, group_sizes: jax.Array, num_columns: int, product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Returns ``[T, num_columns]``: one product per tile of rows, none for empty groups.

    The last tile of a group may extend beyond its end; the next group overwrites those rows.

    Args:
        x: ``[T, K]``, rows sorted by group.
        group_sizes: ``int32[E]``.
        num_columns: Columns of the result.
        product: From rows ``[tile, K]`` and the number of their group, int32[], to ``[tile, num_columns]``.
    """
    num_rows, num_groups = x.shape[0], group_sizes.shape[0]
    tile = _tile_len(num_rows, num_groups)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    tiles_of = -(-group_sizes.astype(jnp.int32) // tile)
    tile_ends = jnp.cumsum(tiles_of)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        group = num_at_most(tile_ends, i)
        tile_of_group = i - (tile_ends[group] - tiles_of[group])
        begin = ends[group] - group_sizes[group].astype(jnp.int32) + tile_of_group * tile
        rows = jax.lax.dynamic_slice_in_dim(padded, begin, tile)
        return jax.lax.dynamic_update_slice_in_dim(out, product(rows, group).astype(x.dtype), begin, axis=0)

    out = jax.lax.fori_loop(0, tile_ends[-1], step, jnp.zeros((num_rows + tile, num_columns), x.dtype))
    return zero_after(out[:num_rows], group_sizes)


@registry.register(OP, "tiled", ("cpu",))
def loop_over_experts(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes one product per tile of rows, and reads no weights of empty groups."""
    inner = 1 if layout == "enk" else 0

    def product(rows: jax.Array, group: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        return jax.lax.dot_general(
            rows,
            one,
            (((1,), (inner,)), ((), ())),
            precision=precision(x.dtype),
            preferred_element_type=accumulator(x.dtype),
        )

    return over_tiles(x, group_sizes, weight.shape[1 if layout == "enk" else 2], product)


def ids_of(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns the group of each row, int32[num_rows, 1].

    For rows after the last group it is the number of groups.
    """
    return num_at_most(jnp.cumsum(group_sizes.astype(jnp.int32)), jnp.arange(num_rows, dtype=jnp.int32))[:, None]


def _kernel_unsupported_reason(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout
) -> str | None:
    return ffi.unsupported_reason(x) if x.shape[0] else "no rows"


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def streamed(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes with the C++ kernel, which reads only the weights of groups with rows."""

    def kernel(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return routed_kernel(layout)(x, ids_of(group_sizes, x.shape[0]), weight, None)[:, 0]

    def same(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return reference(x, weight, group_sizes, layout=layout)

    return ffi.differentiable(kernel, same)(x, weight, group_sizes)


registry.register_module(OP, "gpu", "model_adapters.ops.gpu")
spmd.leave_to_partitioner(OP, reference)
