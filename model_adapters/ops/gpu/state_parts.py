"""Parts of states that programs of GPU kernels have, and segments of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops.segments import Segments


@dataclass(frozen=True)
class Part:
    """Some indices of an axis: their numbers, and which of them there are."""

    index: jax.Array
    mask: jax.Array

    @classmethod
    def of(cls, begin: Any, size: int, end: Any) -> Part:
        """Returns `size` indices from `begin` on, of which those below `end` are there."""
        index = begin + lax.iota(jnp.int32, size)
        return cls(index, index < end)


@dataclass(frozen=True)
class StatePart:
    """The part of a head's states that a program has, and how it is read and written.

    Attributes:
        head: Its head.
        parts: Rows and columns.
    """

    head: Any
    parts: tuple[Part, Part]

    def _there(self, pool: Any, row: Any) -> tuple[Any, jax.Array]:
        rows, columns = self.parts
        return pool.at[row, self.head, rows.index[:, None], columns.index[None]], rows.mask[:, None] & columns.mask

    def read(self, pool: Any, row: Any) -> jax.Array:
        """Reads the state of a row; zeros if it is below zero."""
        at, mask = self._there(pool, jnp.maximum(row, 0))
        return plgpu.load(at, mask=mask & (row >= 0), other=0.0)

    def write(self, pool: Any, row: Any, state: jax.Array) -> None:
        """Writes the state of a row, unless it is below zero."""
        at, mask = self._there(pool, jnp.maximum(row, 0))
        plgpu.store(at, state, mask=mask & (row >= 0))


class SegmentTable(NamedTuple):
    """What programs read of R segments.

    Attributes:
        cu: int32[R + 1], where they begin.
        read: int32[R], the row that each begins with; -1 where nothing is held.
        write: int32[R], the row that takes its state; -1 where that is dropped.
        counts: int32[R], segments of a sequence for its first one, whose program goes through them; else 0.
    """

    cu: jax.Array
    read: jax.Array
    write: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, segments: Segments, num_rows: int) -> SegmentTable:
        """Returns the table of `segments` of a pool of `num_rows`."""
        number = jnp.arange(len(segments.read))
        has_tokens = segments.lens > 0
        last = jnp.max(jnp.where(segments.is_same_sequence, number, -1), axis=1)
        is_first = has_tokens & ~jnp.any(segments.is_same_sequence & (number < number[:, None]), axis=1)
        read = jnp.where(segments.held, segments.read, -1)
        is_kept = has_tokens & (segments.write < num_rows - segments.drops_last)
        counts = jnp.where(is_first, last - number + 1, 0)
        return cls(segments.cu, read, jnp.where(is_kept, segments.write, -1), counts.astype(jnp.int32))
