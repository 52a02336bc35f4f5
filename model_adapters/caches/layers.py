"""The layers of a device cache as model code sees them in a trace.

An attention layer stores K and V together in one array ``pool[batch, kv_heads, capacity, k_dim + v_dim]``. Sliding
layers store the full length too: the window is applied by the attention mask or the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

import pytree_registry
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import ScaledPool, pages_of
from model_adapters.errors import UnsupportedModelError
from model_adapters.ops.attention_args import KVScales
from model_adapters.ops.kv_pool import write_at
from model_adapters.ops.row_pages import read_row, rounded, widened, write_row


@dataclasses.dataclass
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
    # [batch, kv_heads, capacity, k_dim + v_dim], or the pages of all sequences; None in a first prefill. Layers that
    # share the keys get the pool that the first of them has written: XLA would copy an old one that is read twice.
    pool_before: jax.Array | None


class AttentionLayer(CacheLayerMixin):
    """Keys and values of one attention layer, full or sliding.

    An empty layer (``pool is None``) takes a first prefill: it returns the new keys and values unchanged and stores
    them at position 0. Later updates store at ``offset`` and return the full pool.

    With `table` set, the pools are pages of all sequences, ``[pages, kv_heads, page, width]``, and the layer is one
    sequence's: it writes its new tokens to its pages, and reads them where model code needs dense keys and values.

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
        self.table: Any = None  # int32[pages], the sequence's pages
        self.num_valid: Any = None  # int32[], the new tokens that are no padding; with `table` only
        self.scales: dict[str, Any] = {}  # by name of a pool of pages in 8 bits: those of keys and of values

    def clear_trace_state(self) -> None:
        """Clears what holds for one forward only."""
        self.offset, self.right_align_len, self.prefill_len, self.counted_new_tokens = None, None, None, False
        self.table, self.num_valid, self.scales = None, None, {}

    def use_pages(self, table: jax.Array, num_valid: Any) -> None:
        """Makes the pools pages of all sequences, of which `table` int32[pages] are this one's.

        `num_valid` int32[] are the new tokens that are no padding.
        """
        for name in self.POOLS:
            pool = getattr(self, name)
            if isinstance(pool, ScaledPool):
                self.scales[name] = (pool.k_scale, pool.v_scale)
                setattr(self, name, pool.pages)
        self.table, self.num_valid = table, jnp.asarray(num_valid, jnp.int32)
        self.capacity = len(table) * pages_of(self.pool).shape[2]

    def kv_scales(self, name: str = "pool") -> KVScales | None:
        """Returns the scales of a pool of pages in 8 bits; None for any other."""
        found = self.scales.get(name)
        return None if found is None else KVScales(*map(jax_view, found))

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
        return self._stored(slice(self.k_dim))

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """Dense values [batch, kv_heads, capacity, v_dim]."""
        return self._stored(slice(self.k_dim, None))

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
            pool = self._write("pool", new)
            keys_out, values_out = (
                torch_view(self._right_aligned(self._with_new("pool", pool, new, columns)))
                for columns in (slice(self.k_dim), slice(self.k_dim, None))
            )
            self.counted_new_tokens = True
        self.pool = torch_view(pool)
        keys_out.cache_write = KVWrite(self, keys, values, values_out, before)
        return keys_out, values_out

    def _write(self, name: str, new: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns a pool with new tokens stored.

        Args:
            name: Attribute with the pool.
            new: ``[batch, heads, num_new, width]``.
            positions: int32[num_new], with pages only: where they are stored, -1 for nowhere; None: behind the others.
        """
        before = jax_view(getattr(self, name))
        if self.table is None:
            return write_at(before, new, jax_view(self.offset))
        if positions is None:
            steps = jnp.arange(new.shape[2], dtype=jnp.int32)
            positions = jnp.where(steps < jax_view(self.num_valid), jax_view(self.offset) + steps, -1)
        tokens, scales, dtype = jnp.swapaxes(new[0], 0, 1), self.kv_scales(name), before.dtype
        k_dim = self.k_dim if name == "pool" else new.shape[3]
        tokens = tokens.astype(dtype) if scales is None else rounded(tokens, k_dim, scales, dtype)
        return write_row(before, jax_view(self.table), positions.astype(jnp.int32), tokens)

    def _seen(
        self, name: str, pool: jax.Array, dtype: Any, columns: slice = slice(None), *, has_new: bool = True
    ) -> jax.Array:
        """Returns what model code sees of a pool, ``[batch, heads, capacity, columns]``.

        Args:
            name: Attribute of the pool.
            pool: The pool.
            dtype: Of the result, if the pool is in 8 bits.
            columns: Columns of the pool.
            has_new: Whether the new tokens are stored.
        """
        if self.table is None:
            return pool[..., columns]
        length = jax_view(self.offset) + (jax_view(self.num_valid) if has_new else 0)
        read = functools.partial(read_row, pool, jax_view(self.table), jnp.asarray(length, jnp.int32))
        if (scales := self.kv_scales(name)) is None:
            return read(columns)[None]
        k_dim = self.k_dim if name == "pool" else pool.shape[3]
        return widened(read(), k_dim, scales, dtype)[None, ..., columns]

    def _with_new(self, name: str, pool: jax.Array, new: jax.Array, columns: slice) -> jax.Array:
        """Returns `_seen` with the new tokens as they are, though a pool in 8 bits has rounded them."""
        dense = self._seen(name, pool, new.dtype, columns)
        return dense if name not in self.scales else write_at(dense, new[..., columns], jax_view(self.offset))

    def _stored(self, columns: slice) -> torch.Tensor:
        """Returns columns of what is stored, [batch, kv_heads, capacity, columns]."""
        pool = jax_view(self.pool)
        return torch_view(self._seen("pool", pool, jnp.float32, columns, has_new=self.counted_new_tokens))

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
        dense = self._store("index_pool", new)
        return indexer_key_states if is_first else torch_view(self._right_aligned(dense)[:, 0])

    def get_seq_length(self) -> Any:
        """Returns the number of tokens stored, with those of this forward once their index keys are."""
        length = super().get_seq_length()
        return length + self.num_indexed if self.num_indexed and self.right_align_len is None else length

    def _store(self, name: str, new: jax.Array) -> jax.Array:
        """Stores ``new[batch, 1, num_new, width]`` in a pool at the offset.

        Returns what model code sees of the pool, ``[batch, 1, capacity, width]``.
        """
        if getattr(self, name) is None:
            pool = dense = jnp.pad(new, ((0, 0), (0, 0), (0, self.capacity - new.shape[2]), (0, 0)))
        else:
            pool = self._write(name, new)
            dense = self._seen(name, pool, new.dtype)
        setattr(self, name, torch_view(pool))
        return dense

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions int[axes, batch, past] before the new tokens; None at first.

        Model code appends the positions of the new tokens.
        """
        if self.position_pool is None:
            return None
        if self.right_align_len is None:
            raise UnsupportedModelError("an indexer that stores positions needs a right-aligned cache")
        pool = jax_view(self.position_pool)
        stored = self._seen("position_pool", pool, pool.dtype, has_new=False)
        past = self._right_aligned(stored)[:, 0, : self.capacity - self.right_align_len]
        return torch_view(jnp.moveaxis(past, 2, 0))

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        new = jnp.moveaxis(jax_view(positions), 0, 2)[:, None]
        if self.position_pool is not None:
            assert self.right_align_len is not None
            new = new[:, :, -self.right_align_len :]
        self._store("position_pool", new)


for _layer in (AttentionLayer, HybridLayer, IndexedLayer):
    pytree_registry.register(_layer)
