"""Searches among ascending numbers without a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def num_at_most(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the number of ``ascending[m]`` that are at most each of ``values[...]``, int32.

    All are compared with all. The loop of a binary search costs more: on a GPU the host runs it step by step, and on a
    TPU XLA computes it, and all that depends on it, again in each layer, since it shares no loops among layers.
    """
    return jnp.searchsorted(ascending, values, side="right", method="compare_all").astype(jnp.int32)
