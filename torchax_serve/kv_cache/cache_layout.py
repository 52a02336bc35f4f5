"""Layout of what a request stores: keys and values by token, and states by slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import pages
from model_adapters.ops.kv_pool import has_copy_kernels
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.kv_cache.scaled_state import ScaledState

Leaves = tuple[jax.Array, ...]
SlotStates = tuple[jax.Array | ScaledState, ...]
UNBOUNDED = 1 << 30


@dataclasses.dataclass(frozen=True)
class SlotStateSpec:
    """State of one request: of a convolution, a recurrence or cross attention."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_of_source: bool = False  # [1, heads, source_len, dim], made once of an encoder's output
    stored_dtype: np.dtype | None = None  # of 8 bits, with a scale by head; None: as the model has it

    @property
    def num_bytes(self) -> int:
        """Bytes of one request's."""
        num_numbers = int(np.prod(self.shape))
        if self.stored_dtype is None:
            return num_numbers * self.dtype.itemsize
        return num_numbers * self.stored_dtype.itemsize + self.shape[1] * np.dtype(np.float32).itemsize


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Layout of a request's cache by leaf: keys and values by token, or a state."""

    leaves: tuple[PagedLayerSpec | SlotStateSpec, ...]
    is_vectorised: bool = False  # rows run side by side under vmap; else one after the other in one program
    block_len: int = UNBOUNDED  # tokens of one forward that make a program of sensible size
    is_on_mesh: bool = False  # pools and states may be divided among devices

    @property
    def pages(self) -> tuple[PagedLayerSpec, ...]:
        """Leaves that are stored in pages."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, PagedLayerSpec))

    @property
    def rows(self) -> tuple[SlotStateSpec, ...]:
        """Leaves that are stored by slot."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, SlotStateSpec))

    @property
    def has_states(self) -> bool:
        """Whether tokens change a state, which cannot be taken back."""
        return any(not leaf.is_of_source for leaf in self.rows)

    def merge(self, pages: Leaves, rows: Leaves) -> Leaves:
        """Merges leaves in pages and leaves by slot into all leaves, in their order."""
        by_kind = {True: iter(pages), False: iter(rows)}
        return tuple(next(by_kind[isinstance(leaf, PagedLayerSpec)]) for leaf in self.leaves)

    def with_encoder_len(self, max_len: int) -> CacheLayout:
        """Returns the layout with room for `max_len` encoder positions."""

        def sized(leaf: PagedLayerSpec | SlotStateSpec) -> PagedLayerSpec | SlotStateSpec:
            if isinstance(leaf, PagedLayerSpec) or not leaf.is_of_source:
                return leaf
            return dataclasses.replace(leaf, shape=(*leaf.shape[:2], max_len, leaf.shape[3]))

        return dataclasses.replace(self, leaves=tuple(map(sized, self.leaves)))

    def with_encoder_in(self, dtype: np.dtype) -> CacheLayout:
        """Returns the layout with keys and values of encoder outputs stored in `dtype`, of 8 bits."""

        def stored(leaf: PagedLayerSpec | SlotStateSpec) -> PagedLayerSpec | SlotStateSpec:
            if isinstance(leaf, PagedLayerSpec) or not leaf.is_of_source:
                return leaf
            return dataclasses.replace(leaf, stored_dtype=dtype)

        return dataclasses.replace(self, leaves=tuple(map(stored, self.leaves)))

    def gather_slots(
        self, states: SlotStates, slots: jax.Array, source_len: int, source_lens: jax.Array | None = None
    ) -> Leaves:
        """Gathers the states ``[S, ...]`` at `slots` int32[S], cut to the encoder length.

        `source_lens` int32[S] are the lengths of the encoder outputs without padding; None without an encoder.
        """
        has_kernels = has_copy_kernels(self.is_on_mesh)

        def gathered(row: SlotStateSpec, state: jax.Array | ScaledState) -> jax.Array:
            if isinstance(state, ScaledState):
                return state.gather(slots, source_len, row.dtype)
            if not row.is_of_source:
                return state[slots]
            if has_kernels and source_lens is not None:
                return pages.read_tokens(state[:, 0], slots[:, None], source_lens, slice(None), source_len)[:, None]
            return state[:, :, :, :source_len][slots]

        return tuple(gathered(row, state) for row, state in zip(self.rows, states, strict=True))

    def scatter_slots(
        self,
        states: SlotStates,
        slots: jax.Array,
        news: Leaves,
        *,
        is_first: bool,
        source_lens: jax.Array,
        after: Sequence[jax.Array] = (),
    ) -> SlotStates:
        """Writes `news` at `slots` int32[S]; states of the encoder output in the first step only.

        `source_lens` int32[S] are the lengths of the encoder outputs without padding; `after` are results of all reads
        of the states, so that these need not be copied.
        """

        def written(row: SlotStateSpec, state: jax.Array | ScaledState, new: jax.Array) -> jax.Array | ScaledState:
            if row.is_of_source and not is_first:
                return state
            if isinstance(state, ScaledState):
                return state.scatter(slots, new, source_lens)
            if not has_copy_kernels(self.is_on_mesh):
                return state.at[slots, :, :, : new.shape[3]].set(new) if row.is_of_source else state.at[slots].set(new)
            room = [(0, full - size) for full, size in zip(state.shape[1:], new.shape[1:], strict=True)]
            return pages.write_pages(state, slots, jnp.pad(new, [(0, 0), *room]).astype(state.dtype), after)

        return tuple(written(*each) for each in zip(self.rows, states, news, strict=True))

    def partition(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """Splits leaves into those in pages and those by slot."""
        kinds = [isinstance(leaf, PagedLayerSpec) for leaf in self.leaves]
        pages = tuple(leaf for leaf, is_pages in zip(leaves, kinds, strict=True) if is_pages)
        return pages, tuple(leaf for leaf, is_pages in zip(leaves, kinds, strict=True) if not is_pages)
