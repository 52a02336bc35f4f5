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
    is_of_heads: bool = False  # [heads or channels, ...], of a recurrence in a packed step

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
    batches_prompts: bool = False  # chunks of several prompts, too, may run so
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

    def stored_shape(self, row: SlotStateSpec) -> tuple[int, ...]:
        """Returns the shape of a slot's state.

        Keys and values of encoder outputs on one device are as pages, ``[heads, len, dim]``: of these a part is written
        in place. A view of another form XLA would copy whole.
        """
        is_page = row.is_of_source and row.stored_dtype is None and not self.is_on_mesh
        return row.shape[1:] if is_page else row.shape

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

    def reads_sources_in_place(self) -> bool:
        """Returns whether a query reads keys and values of encoder outputs where they are stored."""
        of_source = [row for row in self.rows if row.is_of_source]
        is_plain = all(row.stored_dtype is None for row in of_source)
        return bool(of_source) and is_plain and has_copy_kernels(self.is_on_mesh)

    def gather_slots(
        self,
        states: SlotStates,
        slots: jax.Array,
        source_len: int,
        source_lens: jax.Array | None = None,
        *,
        in_place: bool = False,
    ) -> Leaves:
        """Gathers the states ``[S, ...]`` at `slots` int32[S], cut to the encoder length.

        `source_lens` int32[S] are the lengths of the encoder outputs without padding; None without an encoder. With
        `in_place`, those of encoder outputs are returned as they are stored, of all slots.
        """
        has_kernels = has_copy_kernels(self.is_on_mesh)

        def gathered(row: SlotStateSpec, state: jax.Array | ScaledState) -> jax.Array:
            if in_place and row.is_of_source:
                assert not isinstance(state, ScaledState)
                return state
            if isinstance(state, ScaledState):
                return state.gather(slots, source_len, row.dtype)
            if not row.is_of_source:
                return state[slots]
            if has_kernels and source_lens is not None:
                return pages.read_tokens(state, slots[:, None], source_lens, slice(None), source_len)[:, None]
            kept = state[..., :source_len, :][slots]
            return kept if self.is_on_mesh else kept[:, None]

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
                new = new if self.is_on_mesh or not row.is_of_source else new[:, 0]
                place = (slots, ..., slice(new.shape[-2]), slice(None)) if row.is_of_source else (slots,)
                return state.at[place].set(new)
            if row.is_of_source:
                return _with_source(state, slots, new[:, 0], source_lens, after)
            room = [(0, full - size) for full, size in zip(state.shape[1:], new.shape[1:], strict=True)]
            return pages.write_pages(state, slots, jnp.pad(new, [(0, 0), *room]).astype(state.dtype), after)

        return tuple(written(*each) for each in zip(self.rows, states, news, strict=True))

    def without_sources(self, rows: Leaves) -> tuple[Leaves, Leaves]:
        """Splits leaves by slot into those of encoder outputs and the others."""
        flags = [row.is_of_source for row in self.rows]
        of_source = tuple(leaf for leaf, is_source in zip(rows, flags, strict=True) if is_source)
        return of_source, tuple(leaf for leaf, is_source in zip(rows, flags, strict=True) if not is_source)

    def with_sources(self, of_source: Leaves, others: Leaves) -> Leaves:
        """Merges what `without_sources` has split."""
        by_kind = {True: iter(of_source), False: iter(others)}
        return tuple(next(by_kind[row.is_of_source]) for row in self.rows)

    def partition(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """Splits leaves into those in pages and those by slot."""
        kinds = [isinstance(leaf, PagedLayerSpec) for leaf in self.leaves]
        pages = tuple(leaf for leaf, is_pages in zip(leaves, kinds, strict=True) if is_pages)
        return pages, tuple(leaf for leaf, is_pages in zip(leaves, kinds, strict=True) if not is_pages)


def _with_source(
    pool: jax.Array, slots: jax.Array, new: jax.Array, lens: jax.Array, after: Sequence[jax.Array]
) -> jax.Array:
    """Returns states of encoder outputs with those of `slots` replaced.

    Only the first `lens` positions are written: a slot has room for the longest input.

    Args:
        pool: ``[num_slots + 1, heads, room, dim]``.
        slots: int32[S].
        new: ``[S, heads, len, dim]``.
        lens: int32[S].
        after: As for `scatter_slots`.
    """
    num_rows, heads, length, dim = new.shape
    tokens = jnp.swapaxes(new, 1, 2).reshape(num_rows * length, heads, dim).astype(pool.dtype)
    places = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.where(places < lens[:, None], places, -1).reshape(-1)
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), length)
    return pages.write_tokens(pool, slots[:, None], rows, positions, tokens, after)
