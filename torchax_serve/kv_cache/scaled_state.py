"""Keys and values of encoder outputs in 8 bits, by slot.

A request's are made once and read in each later step, so that their scales are exact: the largest number of each head
is known when they are stored. Nothing is clipped, and nothing is calibrated.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.kv_pool import LARGEST, rounded_steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledState:
    """Keys or values of all slots in 8 bits, with a scale for each slot and head."""

    numbers: jax.Array  # int8 or float8_e4m3fn[num_slots + 1, 1, heads, source_len, dim]
    scale: jax.Array  # float32[num_slots + 1, 1, heads, 1, 1]

    def gather(self, slots: jax.Array, source_len: int, dtype: np.dtype) -> jax.Array:
        """Returns `source_len` keys or values at `slots` int32[S], ``[S, 1, heads, len, dim]``."""
        numbers = self.numbers[:, :, :, :source_len][slots]
        return (numbers.astype(jnp.float32) * self.scale[slots]).astype(dtype)

    def scatter(self, slots: jax.Array, new: jax.Array, lens: jax.Array) -> ScaledState:
        """Returns the state with `new` ``[S, 1, heads, len, dim]`` at `slots` int32[S].

        What lies behind `lens` int32[S] is padding: it has no part in the scales, and zeros are stored.
        """
        is_valid = jnp.arange(new.shape[3])[:, None] < lens[:, None, None, None, None]
        exact = jnp.where(is_valid, new, 0).astype(jnp.float32)
        largest = jnp.abs(exact).max(axis=(3, 4), keepdims=True)
        scale = jnp.where(largest > 0, largest / LARGEST[str(self.numbers.dtype)], 1.0)
        numbers = rounded_steps(exact / scale, self.numbers.dtype)
        return ScaledState(self.numbers.at[slots, :, :, : new.shape[3]].set(numbers), self.scale.at[slots].set(scale))
