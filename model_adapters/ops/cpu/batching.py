"""Batching rules of the C++ kernels: the rows of a ``jax.vmap`` become rows of one call.

JAX by itself runs a custom call once for each row of a ``vmap``, and each run would read all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Kernel = Callable[..., Any]


def with_rows_folded(kernel: Kernel, num_row_operands: int, folded: Kernel | None = None) -> Kernel:
    """Returns `kernel` with a batching rule that merges the axis of the ``vmap`` and the rows.

    Args:
        kernel: Computes each row of its result, ``[rows, ...]``, from the same row of its first operands. All others,
            such as weights, are the same for all rows; where a ``vmap`` has some for each of its rows, the kernel runs
            once for each.
        num_row_operands: Number of these first operands.
        folded: What computes the merged rows, which are more; None: the kernel.
    """
    run = custom_vmap(kernel)

    @run.def_vmap
    def rule(axis_size: int, is_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        if any(jax.tree.leaves(is_batched[num_row_operands:])):
            out = one_by_one(run, axis_size, is_batched, operands)
        else:
            pairs = zip(operands[:num_row_operands], is_batched[:num_row_operands], strict=True)
            rows = [merged(each, axis_size, batched) for each, batched in pairs]
            merged_out = (folded or run)(*rows, *operands[num_row_operands:])
            out = jax.tree.map(lambda x: divided(x, axis_size), merged_out)
        return out, jax.tree.map(lambda _: True, out)

    return run


def with_axis(x: jax.Array, axis_size: int, is_batched: bool) -> jax.Array:
    """Returns `x` with the axis of the ``vmap`` in front."""
    return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))


def merged(x: jax.Array, axis_size: int, is_batched: bool) -> jax.Array:
    """Returns ``x[S, rows, ...]`` as ``[S * rows, ...]``."""
    x = with_axis(x, axis_size, is_batched)
    return x.reshape(-1, *x.shape[2:])


def divided(x: jax.Array, axis_size: int) -> jax.Array:
    """Returns ``x[S * rows, ...]`` as ``[S, rows, ...]``."""
    return x.reshape(axis_size, -1, *x.shape[1:])


def one_by_one(kernel: Kernel, axis_size: int, is_batched: Sequence[Any], operands: Sequence[Any]) -> Any:
    """Runs `kernel` once for each row of the ``vmap``."""
    flags = jax.tree.leaves(list(is_batched))
    leaves, tree = jax.tree.flatten(list(operands))
    mapped = [leaf for leaf, batched in zip(leaves, flags, strict=True) if batched]

    def one(rows: list[jax.Array]) -> Any:
        of_row = iter(rows)
        given = [next(of_row) if batched else leaf for leaf, batched in zip(leaves, flags, strict=True)]
        return kernel(*jax.tree.unflatten(tree, given))

    return jax.lax.map(one, mapped)
