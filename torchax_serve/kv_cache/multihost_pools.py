"""Pages and states whose arrays lie on the devices of several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import Pool, ScaledPool, laid_out
from model_adapters.ops.compressed_weight import Weights
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.kv_cache.pools import HeadScales, PoolAllocator, copy_pages

ArrayOf = tuple[tuple[int, ...], str]
"""Shape and name of the dtype."""


class MultiHostPoolAllocator(PoolAllocator):
    """Makes pools and states and copies pages by programs that all hosts run.

    Args:
        executables: that all hosts run.
        sharding: of the model.
    """

    def __init__(self, executables: ExecutableCache, sharding: ModelSharding) -> None:
        super().__init__(sharding.pool_sharding)
        self._pool_sharding, self._state_sharding = sharding.pool_sharding, sharding.state_sharding
        self._recurrent_sharding = sharding.recurrent_sharding
        self._zeros = CachedFunction(executables, "zero_pool", self._make)
        self._scaled = CachedFunction(executables, "zero_scaled_pool", self._make_scaled)
        self._zero_states = CachedFunction(executables, "zero_states", self._make_states)
        self._zero_recurrent = CachedFunction(executables, "zero_recurrent_states", self._make_recurrent)
        self._copied = CachedFunction(executables, "copy_pages", self._copy, donate={"pools": 1})

    def _make(self, weights: Weights, spec: ArrayOf) -> tuple[None, jax.Array]:
        shape, dtype = spec
        return None, jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), self._pool_sharding(shape[1]))

    def _make_states(self, weights: Weights, spec: ArrayOf) -> tuple[None, jax.Array]:
        shape, dtype = spec
        return None, jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), self._state_sharding(shape))

    def _make_recurrent(self, weights: Weights, spec: ArrayOf) -> tuple[None, jax.Array]:
        shape, dtype = spec
        return None, jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), self._recurrent_sharding(shape))

    def _make_scaled(
        self, weights: Weights, k_scale: jax.Array, v_scale: jax.Array, spec: ArrayOf
    ) -> tuple[None, Pool]:
        shape, dtype = spec
        pool = ScaledPool(jnp.zeros(shape, dtype), k_scale, v_scale)
        return None, laid_out(pool, self._pool_sharding, jax.lax.with_sharding_constraint)

    @staticmethod
    def _copy(
        weights: Weights,
        pools: tuple[jax.Array, ...],
        sources: jax.Array,
        targets: jax.Array,
        spec: None,
    ) -> tuple[None, tuple[jax.Array, ...]]:
        return None, copy_pages(pools, sources, targets)

    def pool(self, shape: tuple[int, int, int, int], dtype: np.dtype, scales: HeadScales | None) -> Pool:
        """Implements `PoolAllocator.pool`."""
        if scales is None:
            return self.zeros(shape, dtype)
        pool: Pool = self._scaled({}, *scales, spec=(shape, np.dtype(dtype).name))[1]
        return pool

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> jax.Array:
        """Implements `PoolAllocator.zeros`."""
        return self._zeros({}, spec=(shape, np.dtype(dtype).name))[1]

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype, *, is_of_heads: bool = False) -> jax.Array:
        """Implements `PoolAllocator.slot_states`."""
        zeros = self._zero_recurrent if is_of_heads else self._zero_states
        return zeros({}, spec=(shape, np.dtype(dtype).name))[1]

    def copy(self, pools: tuple[jax.Array, ...], sources: Sequence[int], targets: Sequence[int]) -> Any:
        """Implements `PoolAllocator.copy`."""
        return self._copied({}, pools, np.array(sources, np.int32), np.array(targets, np.int32), spec=None)[1]
