"""The cache layer of attention over compressed keys, in fixed shapes.

It has a window of tokens, and one entry for each block.

DeepSeek-V4 (https://huggingface.co/deepseek-ai) attends to the last tokens directly, and to older ones by entries that
compress `rate` tokens each. Its code stores three things in addition to keys and values, by the name of the submodule
that makes them: a buffer with the tokens of the incomplete block, the entries, and, if blocks overlap, half of the last
complete block. In transformers they grow; here an entry is in a pool at the position of the last token of its block.
Pools then have one row per token as in other layers, and the number of entries follows from the number of tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

import pytree_registry
from model_adapters.bridge.views import jax_view, to_jax_array, to_torch_tensor, torch_view
from model_adapters.caches.layers import AttentionLayer

# Values in the configuration's ``layer_types``.
LAYER_TYPES = frozenset({"heavily_compressed_attention", "compressed_sparse_attention"})


class CompressedLayer(AttentionLayer):
    """Keys, values and compressed entries of one layer.

    The methods are those of transformers' growing layers.

    Args:
        capacity: Number of tokens that fit.
        window: Number of tokens attended to directly.
        rate: Number of tokens per block, which one entry compresses.
        overlaps: Whether an entry also covers half of the previous block.
    """

    POOLS = ("pool", "compressor_pool", "indexer_pool")

    def __init__(self, capacity: int, window: int, rate: int, *, overlaps: bool) -> None:
        super().__init__(capacity, window)
        self.rate, self.overlaps = rate, overlaps
        self.compressor_pool: Any = None  # [batch, 1, capacity, dim]
        self.indexer_pool: Any = None
        self.buffers: dict[str, Any] = {}  # by name: tokens [batch, rate, dim] and gates of the incomplete block
        self.overlap: dict[str, Any] = {}  # by name: half [batch, rate, dim] of the last complete block, and gates
        self.num_new = 0  # number of tokens of this forward

    def clear_trace_state(self) -> None:
        """Clears what holds for one forward only."""
        super().clear_trace_state()
        self.num_new = 0

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Buffers new tokens and gates [batch, num_new, dim], and returns the blocks to compress.

        Also returns the position of the first block. The blocks may include incomplete ones at the end, whose entries
        are not stored.
        """
        new = (jax_view(kv), jax_view(gate))
        self.num_new = new[0].shape[1]
        is_first = name not in self.buffers
        if is_first:
            end = self.num_new // self.rate * self.rate
            missing = ((0, 0), (0, self.rate - self.num_new + end), (0, 0))
            self.buffers[name] = tuple(torch_view(jnp.pad(x[:, end:], missing)) for x in new)
            if self.overlaps:
                self.overlap[name] = tuple(map(torch_view, self._no_half(new[0])))
            return torch_view(new[0][:, :end]), torch_view(new[1][:, :end]), 0
        room = (self.rate - 1 + self.num_new) // self.rate * self.rate
        joined = [self._joined(jax_view(old), x, room) for old, x in zip(self.buffers[name], new, strict=True)]
        start = self._num_closed() * self.rate
        self.buffers[name] = tuple(torch_view(jax.lax.dynamic_slice_in_dim(x, start, self.rate, 1)) for x in joined)
        first = jax_view(self.offset) // self.rate * self.rate
        return torch_view(joined[0][:, :room]), torch_view(joined[1][:, :room]), torch_view(first)

    def _no_half(self, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the overlap before the first block: zeros, with gates of -inf (no weight)."""
        shape = (kv.shape[0], self.rate, kv.shape[-1] // 2)
        return jnp.zeros(shape, kv.dtype), jnp.full(shape, -jnp.inf, jnp.float32)

    def _new_pool(self, entries: jax.Array) -> jax.Array:
        """Returns a pool with the first `entries` [batch, blocks, dim]."""
        pool = jnp.zeros((entries.shape[0], 1, self.capacity, entries.shape[2]), entries.dtype)
        return pool.at[:, 0, (jnp.arange(entries.shape[1]) + 1) * self.rate - 1].set(entries)

    def _joined(self, old: jax.Array, new: jax.Array, room: int) -> jax.Array:
        """Returns buffered tokens followed by new ones, zero-padded to `room` and one more block."""
        shape = (new.shape[0], room + self.rate, new.shape[2])
        padded = jnp.zeros(shape, old.dtype).at[:, : self.rate].set(old)
        return jax.lax.dynamic_update_slice_in_dim(
            padded, new.astype(old.dtype), jax_view(self.offset) % self.rate, axis=1
        )

    def _num_closed(self) -> jax.Array:
        """Returns int32[], the number of blocks that the new tokens complete."""
        return (jax_view(self.offset) % self.rate + self.num_new) // self.rate

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the overlap before the blocks `chunk_kv` [batch, blocks, rate, dim].

        The overlap is half of the block before; that of the last block is stored. A first forward has no block before.
        """
        chunks = (jax_view(chunk_kv)[..., :head_dim], jax_view(chunk_gate)[..., :head_dim])
        before = self.overlap[name]
        is_first = getattr(self, f"{name}_pool") is None
        stored = []
        for old, chunk in zip(map(jax_view, before), chunks, strict=True):
            if is_first:
                last = chunk[:, -1]
            else:
                closed = self._num_closed()
                last = jnp.where(closed > 0, jnp.take(chunk, jnp.maximum(closed - 1, 0), axis=1), old)
            stored.append(torch_view(last.astype(old.dtype)))
        self.overlap[name] = tuple(stored)
        return (None, None) if is_first else before

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Stores the entries [batch, blocks, dim] of complete blocks; returns all of the pool.

        Entries without tokens must be masked: by model code, or by `mask_of_open`.
        """
        new = jax_view(compressed)
        pool_name = f"{name}_pool"
        if (before := getattr(self, pool_name)) is None:
            setattr(self, pool_name, torch_view(self._new_pool(new)))
            return compressed
        index = jnp.arange(new.shape[1])
        places = (jax_view(self.offset) // self.rate + index + 1) * self.rate - 1
        is_closed = index < self._num_closed()
        if self.table is None:
            places = jnp.where(is_closed, places, self.capacity)  # out of bounds, hence dropped
            stored = jax_view(before)
            pool = dense = stored.at[:, 0, places].set(new.astype(stored.dtype), mode="drop")
        else:
            pool = self._write(pool_name, new[:, None], jnp.where(is_closed, places, -1))
            dense = self._seen(pool_name, pool, new.dtype)
        setattr(self, pool_name, torch_view(pool))
        return torch_view(dense[:, 0, self.rate - 1 :: self.rate])

    def mask_of_open(self, num_entries: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a mask [num_entries]: 0 for an entry of a full block and -inf for the others."""
        closed = (jax_view(self.offset) + self.num_new) // self.rate
        return torch_view(jnp.where(jnp.arange(num_entries) < closed, 0.0, -jnp.inf)).to(dtype)

    def take(self, theirs: Any) -> None:
        """Copies what transformers' own layer stores in addition to keys and values."""
        for name, buffer in theirs.buffer_kv.items():
            if buffer is None:
                continue
            missing = ((0, 0), (0, self.rate - buffer.shape[1]), (0, 0))
            pair = (buffer, theirs.buffer_gate[name])
            self.buffers[name] = tuple(jnp.pad(to_jax_array(x), missing) for x in pair)
            setattr(self, f"{name}_pool", self._new_pool(to_jax_array(theirs.compressed_kv[name])))
            if self.overlaps and theirs.overlap_kv[name] is None:
                self.overlap[name] = self._no_half(self.buffers[name][0])
            elif self.overlaps:
                gates = to_jax_array(theirs.overlap_gate[name]).astype(jnp.float32)
                self.overlap[name] = (to_jax_array(theirs.overlap_kv[name]), gates)

    def fill(self, theirs: Any, length: int) -> None:
        """Copies the state beyond keys and values into transformers' own layer.

        The state is that after `length` tokens.
        """
        num_entries = length // self.rate
        for name, (kv, gate) in self.buffers.items():
            end = length % self.rate
            theirs.buffer_kv[name], theirs.buffer_gate[name] = (
                to_torch_tensor(kv[:, :end]),
                to_torch_tensor(gate[:, :end]),
            )
            entries = getattr(self, f"{name}_pool")[:, 0, self.rate - 1 :: self.rate]
            theirs.compressed_kv[name] = to_torch_tensor(entries[:, :num_entries])
            theirs.entry_count[name] = num_entries
            if self.overlaps and num_entries:
                theirs.overlap_kv[name], theirs.overlap_gate[name] = map(to_torch_tensor, self.overlap[name])


pytree_registry.register(CompressedLayer)
