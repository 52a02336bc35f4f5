"""The layers of a device cache as model code sees them in a trace.

An attention layer stores K and V together in one array ``pool[batch, kv_heads, capacity, k_dim + v_dim]``. Sliding
layers store the full length too: the window is applied by the attention mask or the kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

import pytree_registry
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.errors import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class KVWrite:
    """Record of one call of ``cache.update``, attached to the keys that the call returned.

    An attention function that receives these keys unchanged may write and attend in one pass, from the pool before the
    write; the write that ``update`` has traced is then dead code. Model code that changes the keys in between loses the
    attachment, and attention runs on the dense keys and values of that code.
    """

    layer: AttentionLayer
    keys: jax.Array  # [batch, kv_heads, num_new, k_dim]
    values: jax.Array  # [batch, kv_heads, num_new, v_dim]
    values_out: torch.Tensor  # the values that `update` returned with the keys
    pool_before: jax.Array | None  # [batch, kv_heads, capacity, k_dim + v_dim]; None in a first prefill


class AttentionLayer(CacheLayerMixin):
    """Keys and values of one attention layer, full or sliding.

    An empty layer (``pool is None``) takes a first prefill: it returns the new keys and values unchanged and stores
    them at position 0. Later updates store at ``offset`` and return the full pool.

    With `right_align_len` set, returns keys and values shifted so that the newest token is last, for model code that
    counts from the end: to such code it looks like a batch padded on the left, of a length that is known.
    """

    supports_early_init = False
    # Names of the attributes with an array [batch, heads, capacity, width], one row per token.
    POOLS: tuple[str, ...] = ("pool",)

    def __init__(self, capacity: int, window: int | None = None) -> None:
        self.capacity = capacity
        self.window = window
        self.k_dim = 0
        self.keeps_latents = False  # whether model code makes keys and values of several heads of what is stored
        self.pool: Any = None
        self.offset: Any = None
        self.right_align_len: int | None = None  # number of new tokens, in a right-aligned forward
        self.prefill_len: int | None = None  # number of tokens stored by a first forward
        self.counted_new_tokens = False  # whether the new tokens are counted as stored

    def clear_trace_state(self) -> None:
        """Clears what holds for one forward only."""
        self.offset, self.right_align_len, self.prefill_len, self.counted_new_tokens = None, None, None, False

    @property
    def is_sliding(self) -> bool:
        """Whether only the last `window` positions are attended to."""
        return self.window is not None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether something has been stored."""
        return self.pool is not None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """Dense keys [batch, kv_heads, capacity, k_dim]."""
        return torch_view(jax_view(self.pool)[..., : self.k_dim])

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """Dense values [batch, kv_heads, capacity, v_dim]."""
        return torch_view(jax_view(self.pool)[..., self.k_dim :])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the first update makes the pool."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values [batch, kv_heads, num_new, dim]; returns those to attend to."""
        keys, values = jax_view(key_states), jax_view(value_states)
        before = None if self.pool is None else jax_view(self.pool)
        new = jnp.concatenate([keys, values], -1)
        if before is None:
            num_new = new.shape[2]
            if num_new > self.capacity:
                raise ValueError(f"expected at most {self.capacity} tokens for this cache, got {num_new}")
            self.k_dim = keys.shape[-1]
            pool = jnp.pad(new, ((0, 0), (0, 0), (0, self.capacity - num_new), (0, 0)))
            self.prefill_len = num_new
            keys_out, values_out = torch_view(keys), torch_view(values)
        else:
            pool = jax.lax.dynamic_update_slice_in_dim(before, new.astype(before.dtype), jax_view(self.offset), axis=2)
            visible = self._right_aligned(pool)
            self.counted_new_tokens = True
            keys_out, values_out = torch_view(visible[..., : self.k_dim]), torch_view(visible[..., self.k_dim :])
        self.pool = torch_view(pool)
        keys_out.cache_write = KVWrite(self, keys, values, values_out, before)
        return keys_out, values_out

    def _right_aligned(self, pool: jax.Array) -> jax.Array:
        """Returns `pool` [batch, heads, capacity, width] as model code sees it."""
        if self.right_align_len is None:
            return pool
        return jnp.roll(pool, self.capacity - self.right_align_len - jax_view(self.offset), axis=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns length and offset of the keys from ``update`` for `query_length` new tokens."""
        return (query_length if self.pool is None else self.capacity), 0

    def get_seq_length(self) -> Any:
        """Returns the number of tokens stored: 0 for an empty layer, else a traced scalar."""
        if self.pool is None:
            return 0
        if self.prefill_len is not None:
            return self.prefill_len
        if self.right_align_len is None:
            return self.offset
        return self.capacity - (0 if self.counted_new_tokens else self.right_align_len)

    def get_max_length(self) -> int:
        """Returns the number of tokens that fit."""
        return self.capacity


class HybridLayer(LinearAttentionLayer, AttentionLayer):  # type: ignore[override]  # as transformers' own
    """A layer with both a linear-attention state and keys and values."""

    is_initialized = AttentionLayer.is_initialized

    def __init__(self, capacity: int, window: int | None, number_of_states: int) -> None:
        AttentionLayer.__init__(self, capacity, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepares the linear-attention state; keys and values need no preparation."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class IndexedLayer(AttentionLayer):
    """An attention layer that also stores the keys of an indexer.

    The indexer selects the positions to attend to.
    """

    POOLS = ("pool", "index_pool", "position_pool")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.num_indexed = 0  # number of tokens whose index keys this forward appended
        self.index_pool: Any = None  # [batch, 1, capacity, index_dim]
        self.position_pool: Any = None  # int32[batch, 1, capacity, axes]

    def clear_trace_state(self) -> None:
        """Clears what holds for one forward only."""
        super().clear_trace_state()
        self.num_indexed = 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Stores an indexer's new keys [batch, num_new, dim]; returns all of them, as `update` does."""
        new = jax_view(indexer_key_states)[:, None]
        is_first = self.index_pool is None
        self.num_indexed = 0 if is_first else new.shape[2]
        self.index_pool = self._stored(self.index_pool, new)
        return indexer_key_states if is_first else torch_view(self._right_aligned(jax_view(self.index_pool))[:, 0])

    def get_seq_length(self) -> Any:
        """Returns the number of tokens stored, with those of this forward once their index keys are."""
        length = super().get_seq_length()
        return length + self.num_indexed if self.num_indexed and self.right_align_len is None else length

    def _stored(self, before: Any, new: jax.Array) -> torch.Tensor:
        """Returns a pool [batch, 1, capacity, width] with `new` stored at the offset.

        `new` is [batch, 1, num_new, width].
        """
        if before is None:
            return torch_view(jnp.pad(new, ((0, 0), (0, 0), (0, self.capacity - new.shape[2]), (0, 0))))
        pool = jax_view(before)
        return torch_view(
            jax.lax.dynamic_update_slice_in_dim(pool, new.astype(pool.dtype), jax_view(self.offset), axis=2)
        )

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions int[axes, batch, past] before the new tokens; None at first.

        Model code appends the positions of the new tokens.
        """
        if self.position_pool is None:
            return None
        if self.right_align_len is None:
            raise UnsupportedModelError("an indexer that stores positions needs a right-aligned cache")
        past = self._right_aligned(jax_view(self.position_pool))[:, 0, : self.capacity - self.right_align_len]
        return torch_view(jnp.moveaxis(past, 2, 0))

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        new = jnp.moveaxis(jax_view(positions), 0, 2)[:, None]
        if self.position_pool is not None:
            assert self.right_align_len is not None
            new = new[:, :, -self.right_align_len :]
        self.position_pool = self._stored(self.position_pool, new)


for _layer in (AttentionLayer, HybridLayer, IndexedLayer):
    pytree_registry.register(_layer)
