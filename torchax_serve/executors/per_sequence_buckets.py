"""Bucket sizes of the per-sequence executor: rows, tokens, pages, and encoder lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torchax_serve.buckets import bucket_for, bucket_sizes

Kind = Literal["decode", "begin", "extend"]
SMALLEST_GATHER_LEN = 256
MAX_GATHERED_LEN = 1 << 16
"""Tokens that a decode program gathers, all rows together, where it has more than one row: it bounds what a step takes
beside the cache."""


@dataclasses.dataclass(frozen=True)
class GatheredSpec:
    """Static arguments of a per-sequence step."""

    kind: Kind
    num_tokens: int  # T, of each row
    num_rows: int  # S, more than 1 in a decode step only
    num_pages: int  # of each row; 0 where nothing is kept in pages
    block_len: int  # tokens of one forward
    source_len: int = 0  # of an encoder's output, padded; 0 where there is no encoder
    all_logits: bool = False
    has_rope_lens: bool = False  # rotary frequencies depend on lengths

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of a step's one array of integers, in order."""
        rows = self.num_rows
        tables, rope_lens = rows * self.num_pages, rows if self.has_rope_lens else 0
        return (rows * self.num_tokens, rows, rows, rows, tables, rope_lens, rows if self.source_len else 0)

    @property
    def how(self) -> dict[str, Any]:
        """How a chunk is computed."""
        return {"block_len": self.block_len, "all_logits": self.all_logits}


class PerSequenceBuckets:
    """Which steps there are.

    Args:
        num_slots: most rows of a step.
        chunk_sizes: lengths that a chunk of a prompt may have.
        needs_exact_chunks: whether a chunk has one of these lengths; else it is padded to the next.
        block_len: tokens of a chunk that are one forward.
        page_size: tokens of a page.
        pages_per_seq: pages of a sequence at the most; 0 where nothing is kept in pages.
        source_buckets: lengths that an encoder's output is padded to, ascending; none where there is no encoder.
        has_rope_lens: whether chunks are told the lengths that rotary frequencies are for.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        chunk_sizes: Sequence[int],
        is_exact: bool,
        block_len: int,
        page_size: int,
        pages_per_seq: int,
        source_buckets: Sequence[int] = (),
        has_rope_lens: bool = False,
    ) -> None:
        self.needs_exact_chunks, self._block_len, self._page_size = is_exact, block_len, page_size
        self._has_rope_lens = has_rope_lens
        # Two rows cost what four do: products of fewer are slow, or no faster.
        self._row_buckets = (1, *bucket_sizes(num_slots, 2, 4)) if num_slots > 1 else (1,)
        self._chunk_buckets = tuple(sorted(chunk_sizes))
        most = pages_per_seq + (0 if is_exact else -(-self._chunk_buckets[-1] // page_size))
        self.page_buckets = bucket_sizes(most, 2, max(1, SMALLEST_GATHER_LEN // page_size)) if pages_per_seq else (0,)
        self._source_buckets = tuple(source_buckets) or (0,)

    def rows(self, number: int) -> int:
        """What so many rows of logits are padded to."""
        return bucket_for(self._row_buckets, number)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """All numbers of rows that logits can have."""
        return self._row_buckets

    def _pages(self, num_tokens: int) -> int:
        return bucket_for(self.page_buckets, -(-num_tokens // self._page_size)) if self.page_buckets[-1] else 0

    def _most_rows(self, num_pages: int, source_len: int) -> int:
        """The highest bucket of rows that a decode program of so much each has."""
        each = num_pages * self._page_size + source_len
        fitting = [number for number in self._row_buckets if number * each <= MAX_GATHERED_LEN]
        return fitting[-1] if fitting else 1

    def decode(self, num_rows: int, num_tokens: int, source_len: int) -> GatheredSpec | int:
        """The decode step of so many rows, of `num_tokens` tokens at the most; if it is too large, the rows that fit.

        Args:
            num_rows: of the step.
            num_tokens: of the longest row, the new one included.
            source_len: of the longest encoder's output.
        """
        num_pages, source_len = self._pages(num_tokens), bucket_for(self._source_buckets, source_len)
        most = self._most_rows(num_pages, source_len)
        return most if num_rows > most else self._decode(self.rows(num_rows), num_pages, source_len)

    def _decode(self, num_rows: int, num_pages: int, source_len: int) -> GatheredSpec:
        return GatheredSpec("decode", 1, num_rows, num_pages, 1, source_len)

    def chunk(self, num_tokens: int, start: int, source_len: int, all_logits: bool = False) -> GatheredSpec:
        """The step of a chunk of a prompt behind `start` tokens."""
        padded_len = bucket_for(self._chunk_buckets, num_tokens)
        assert not self.needs_exact_chunks or padded_len == num_tokens
        num_pages = self._pages(start + padded_len)
        if start == 0 and num_pages:
            num_pages = -(-padded_len // self._page_size)  # nothing to gather
        kind: Kind = "extend" if start else "begin"
        source_len = bucket_for(self._source_buckets, source_len)
        return GatheredSpec(
            kind, padded_len, 1, num_pages, self._block_len, source_len, all_logits, self._has_rope_lens
        )

    def all(self) -> Iterator[GatheredSpec]:
        """Every step there can be, of those that mixed traffic meets."""
        for source_len in self._source_buckets:
            for num_pages in self.page_buckets:
                for num_rows in self._row_buckets:
                    if num_rows <= self._most_rows(num_pages, source_len):
                        yield self._decode(num_rows, num_pages, source_len)
            for num_tokens in self._chunks_behind(0):
                yield self.chunk(num_tokens, 0, source_len)
            for num_tokens in self._chunks_behind(1):
                behind = self.chunk(num_tokens, 1, source_len)
                for num_pages in self.page_buckets:
                    if num_pages >= behind.num_pages:
                        yield dataclasses.replace(behind, num_pages=num_pages)

    def largest_decode(self) -> GatheredSpec:
        """The decode step of the most requests that are of full length."""
        longest, source_len = self.page_buckets[-1], self._source_buckets[-1]
        return self._decode(self._most_rows(longest, source_len), longest, source_len)

    def final_chunk(self, num_tokens: int) -> GatheredSpec:
        """The last chunk of the prompt of a request of full length, of `num_tokens` tokens or the first of them."""
        room = self._chunks_behind(1)
        fitting = [size for size in room if size <= num_tokens] if self.needs_exact_chunks else []
        size = fitting[-1] if fitting else min(num_tokens, room[-1])
        return dataclasses.replace(self.chunk(size, 1, self._source_buckets[-1]), num_pages=self.page_buckets[-1])

    def largest(self) -> tuple[GatheredSpec, ...]:
        """Those that take the most beside the cache."""
        first = self.chunk(self._chunks_behind(0)[-1], 0, self._source_buckets[-1])
        return (self.largest_decode(), self.final_chunk(self._chunk_buckets[-1]), first)

    def _chunks_behind(self, start: int) -> list[int]:
        """Lengths of chunks that a sequence has room for behind `start` tokens, ascending."""
        capacity = self.page_buckets[-1] * self._page_size or start + self._chunk_buckets[-1]
        return [num_tokens for num_tokens in self._chunk_buckets if start + num_tokens <= capacity]
