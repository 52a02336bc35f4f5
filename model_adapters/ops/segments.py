"""Segments of a packed step: the rows of state pools that its tokens begin with and leave.

A recurrent layer has a pool of states, a row for each running sequence, rows for snapshots, and a last row that nobody
reads. A sequence of a step is one segment, or several in a chain: one that ends where a snapshot is kept, or one whose
state is dropped, as that behind drafts is.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from model_adapters.ops.searchsorted import num_at_most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of the new tokens of a packed step, in their order.

    Segments of one sequence follow each other, and each but the first reads what the one before it has written. No row
    is written by one sequence and read or written by another one in the same step; a row that nobody writes may be
    read by several. A segment without tokens, as unused ones at the end are, neither reads nor writes its rows.
    Tokens behind the last segment are padding: they give zeros, and change no state.

    Attributes:
        cu: int32[R + 1], where each begins, and the number of tokens in use.
        read: int32[R], row of the state pools that it begins with.
        write: int32[R], row that takes the state behind it; the last row of a pool drops it (`drops_last`).
        held: bool[R], whether `read` holds anything; else the state is zero, as a sequence begins.
        first: int32[R], first segment of the same sequence.
        drops_last: Whether the pool's last row is one that drops states; else it is a sequence's as the others.
    """

    cu: jax.Array
    read: jax.Array
    write: jax.Array
    held: jax.Array
    first: jax.Array
    drops_last: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def of(cls, cu: jax.Array, slots: jax.Array, held: jax.Array) -> Segments:
        """Returns one segment for each sequence, each on its own row."""
        return cls(cu, slots, slots, held, jnp.arange(len(slots), dtype=jnp.int32))

    @classmethod
    def kept(
        cls, cu: jax.Array, slots: jax.Array, held: jax.Array, kept_lens: jax.Array, num_rows: int | jax.Array
    ) -> Segments:
        """Returns two segments for each sequence, of which the first alone leaves a state.

        Args:
            cu: int32[S + 1], where each sequence begins, and the number of tokens in use.
            slots: int32[S], the row of each.
            held: bool[S], whether a sequence begins with a state.
            kept_lens: int32[S], tokens of the first segment.
            num_rows: Rows of a state pool.
        """
        first = 2 * jnp.arange(len(slots), dtype=jnp.int32)
        nowhere = jnp.full_like(slots, num_rows - 1)
        return cls(
            jnp.concatenate([_pairs(cu[:-1], jnp.minimum(cu[:-1] + kept_lens, cu[1:])), cu[-1:]]),
            _pairs(slots, slots),
            _pairs(slots, nowhere),
            _pairs(held, held | (kept_lens > 0)),
            _pairs(first, jnp.where(kept_lens > 0, first, first + 1)),
        )

    @classmethod
    def cut(
        cls, cu: jax.Array, slots: jax.Array, held: jax.Array, snapshots: jax.Array, num_rows: int | jax.Array
    ) -> Segments:
        """Returns two segments for each sequence, between which its state may be kept.

        Args:
            cu: int32[S + 1], where each sequence begins, and the number of tokens in use.
            slots: int32[S], the row of each.
            held: bool[S], whether a sequence begins with a state.
            snapshots: int32[3, S]: the snapshot that it begins with, 0 for its own row; the tokens in front of the cut,
                0 for none; the snapshot that takes the state there. Snapshot i is row ``num_rows - 1 - i``.
            num_rows: Rows of a state pool.
        """
        source, num_tokens, target = snapshots
        is_cut, last = num_tokens > 0, num_rows - 1
        index = 2 * jnp.arange(len(slots), dtype=jnp.int32)
        own = jnp.where(source > 0, last - source, slots)
        return cls(
            jnp.concatenate([_pairs(cu[:-1], cu[:-1] + num_tokens), cu[-1:]]),
            _pairs(own, jnp.where(is_cut, last - target, own)),
            _pairs(last - target, slots),
            _pairs(held, held | is_cut),
            _pairs(index, jnp.where(is_cut, index, index + 1)),
        )

    @classmethod
    def of_batch(cls, batch: int, length: int, *, are_held: bool) -> Segments:
        """Returns segments of `length` tokens of `batch` sequences, whose states are the pool."""
        rows = jnp.arange(batch, dtype=jnp.int32)
        cu = jnp.arange(batch + 1, dtype=jnp.int32) * length
        return cls(cu, rows, rows, jnp.full(batch, are_held), rows, drops_last=False)

    @property
    def lens(self) -> jax.Array:
        """int32[R], number of tokens of each."""
        return jnp.diff(self.cu)

    @property
    def is_single(self) -> jax.Array:
        """bool[R], whether it is one token, with nothing of the same sequence in front of it."""
        return (self.lens == 1) & (self.first == jnp.arange(len(self.read)))

    @property
    def is_same_sequence(self) -> jax.Array:
        """bool[R, R], whether two segments with tokens belong to the same sequence."""
        has_tokens = self.lens > 0
        return (self.first[:, None] == self.first) & has_tokens[:, None] & has_tokens

    def of_token(self, num_tokens: int) -> jax.Array:
        """Returns the segment of each of `num_tokens`, int32; R for padding."""
        return num_at_most(self.cu[1:], jnp.arange(num_tokens, dtype=jnp.int32))


def _pairs(before: jax.Array, behind: jax.Array) -> jax.Array:
    """Returns the entries of both in turns."""
    return jnp.stack([before, behind], axis=1).reshape(-1)
