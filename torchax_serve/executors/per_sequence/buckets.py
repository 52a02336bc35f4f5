"""Bucket sizes of the per-sequence executor: rows, tokens, pages, and encoder lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torchax_serve.buckets import bucket_for, bucket_sizes
from torchax_serve.executors.media_slots import MediaSpec

Kind = Literal["decode", "begin", "extend"]
SMALLEST_GATHER_LEN = 256
MAX_GATHERED_LEN = 1 << 16
"""Maximum number of tokens that a decode program of several rows gathers from pages, all rows together: it bounds the
temporary bytes of a step."""
PROMPT_ROWS = (1, 4, 8)
"""Numbers of prompts in one program: of few, since each is compiled; of no more, since eight have enough tokens."""
MAX_ENCODED_LEN = 512
"""Maximum number of encoder positions of a program of several prompts, where no single one has more."""


@dataclasses.dataclass(frozen=True)
class PerSequenceSpec:
    """Static arguments of a per-sequence step."""

    kind: Kind
    num_tokens: int  # T, of each row
    num_rows: int  # S
    num_pages: int  # of each row; 0 if nothing is stored in pages
    block_len: int  # tokens of one forward
    source_len: int = 0  # padded length of the encoder output; 0 without an encoder
    all_logits: bool = False
    has_rope_lens: bool = False  # rotary frequencies depend on lengths
    lora: str = ""  # form of the adapters' matrices; empty: there are none
    media: MediaSpec | None = None  # of a chunk
    has_deltas: bool = False  # of a decode step: positions for rotary embeddings are others

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of a step's int32 array, in order."""
        rows = self.num_rows
        tables, rope_lens = rows * self.num_pages, rows if self.has_rope_lens else 0
        source_lens, deltas = rows if self.source_len else 0, rows if self.has_deltas else 0
        return (rows * self.num_tokens, rows, rows, rows, tables, rope_lens, source_lens, deltas)

    @property
    def how(self) -> dict[str, Any]:
        """Options of the computation of a chunk."""
        return {"block_len": self.block_len, "all_logits": self.all_logits}


class PerSequenceBuckets:
    """Shapes of the steps of a `PerSequenceExecutor`.

    Args:
        num_slots: Maximum number of rows of a step.
        chunk_sizes: Lengths that a prefill chunk may have.
        is_exact: Whether a chunk must have one of these lengths; otherwise it is padded to the next one.
        block_len: Maximum number of tokens of one forward of a chunk.
        page_size: Number of tokens in a page.
        pages_per_seq: Maximum number of pages of a sequence; 0 if nothing is stored in pages.
        source_buckets: Padded lengths of the encoder output, ascending; empty without an encoder.
        first_source_buckets: The same for the first chunk of a prompt.
        has_rope_lens: Whether rotary frequencies depend on lengths.
        lora: Form of the adapters' matrices; empty: there are none.
        batches_prompts: Whether chunks of several prompts may share a program.
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
        first_source_buckets: Sequence[int] = (),
        has_rope_lens: bool = False,
        lora: str = "",
        batches_prompts: bool = False,
    ) -> None:
        self.needs_exact_chunks, self._block_len, self._page_size = is_exact, block_len, page_size
        self._has_rope_lens, self._lora = has_rope_lens, lora
        # Two rows cost what four do: products of fewer are slow, or no faster.
        self._row_buckets = (1, *bucket_sizes(num_slots, 2, 4)) if num_slots > 1 else (1,)
        self._chunk_buckets = tuple(sorted(chunk_sizes))
        most = pages_per_seq + (0 if is_exact else -(-self._chunk_buckets[-1] // page_size))
        self.page_buckets = bucket_sizes(most, 2, max(1, SMALLEST_GATHER_LEN // page_size)) if pages_per_seq else (0,)
        self._source_buckets = tuple(source_buckets) or (0,)
        self._first_source_buckets = tuple(first_source_buckets) or (0,)
        self._prompt_rows = tuple(rows for rows in PROMPT_ROWS if rows == 1 or (batches_prompts and rows <= num_slots))

    def rows(self, number: int) -> int:
        """Returns the bucket of `number` rows of logits."""
        return bucket_for(self._row_buckets, number)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Buckets of rows of the logits, ascending."""
        return self._row_buckets

    def _pages(self, num_tokens: int) -> int:
        return bucket_for(self.page_buckets, -(-num_tokens // self._page_size)) if self.page_buckets[-1] else 0

    def _most_rows(self, num_pages: int, source_len: int) -> int:
        """Returns the largest bucket of rows that a decode program may have at these lengths."""
        each = num_pages * self._page_size + source_len
        fitting = [number for number in self._row_buckets if number * each <= MAX_GATHERED_LEN]
        return fitting[-1] if fitting else 1

    def decode(self, num_rows: int, num_tokens: int, source_len: int) -> PerSequenceSpec | int:
        """Returns the decode step of `num_rows` rows, or the number of rows that fit.

        Args:
            num_rows: Number of rows of the step.
            num_tokens: Number of tokens of the longest row, the new one included.
            source_len: Length of the longest encoder output.
        """
        num_pages, source_len = self._pages(num_tokens), bucket_for(self._source_buckets, source_len)
        most = self._most_rows(num_pages, source_len)
        return most if num_rows > most else self._decode(self.rows(num_rows), num_pages, source_len)

    def _decode(self, num_rows: int, num_pages: int, source_len: int) -> PerSequenceSpec:
        return PerSequenceSpec("decode", 1, num_rows, num_pages, 1, source_len, lora=self._lora)

    def chunk(self, num_tokens: int, start: int, source_len: int, all_logits: bool = False) -> PerSequenceSpec:
        """Returns the step of a prefill chunk that begins at token `start`."""
        padded_len = bucket_for(self._chunk_buckets, num_tokens)
        assert not self.needs_exact_chunks or padded_len == num_tokens
        num_pages = self._pages(start + padded_len)
        if start == 0 and num_pages:
            num_pages = -(-padded_len // self._page_size)  # nothing to gather
        kind: Kind = "extend" if start else "begin"
        source_len = bucket_for(self._source_buckets if start else self._first_source_buckets, source_len)
        return PerSequenceSpec(
            kind, padded_len, 1, num_pages, self._block_len, source_len, all_logits, self._has_rope_lens, self._lora
        )

    def with_rows(self, spec: PerSequenceSpec, num_rows: int) -> PerSequenceSpec:
        """Returns `spec`, of one prompt, for as many of `num_rows` prompts as a program takes.

        A program of several has no more tokens and encoder positions than one of a long prompt.
        """
        return dataclasses.replace(spec, num_rows=max(rows for rows in self._rows_of(spec) if rows <= num_rows))

    def _rows_of(self, spec: PerSequenceSpec) -> list[int]:
        if spec.all_logits or spec.media is not None:
            return [1]
        of_pages = spec.num_pages * self._page_size if spec.kind == "extend" else 0
        limits = (
            (spec.num_tokens, self._chunk_buckets[-1]),
            (spec.source_len, max(MAX_ENCODED_LEN, self._source_buckets[-1])),
            (of_pages + spec.source_len, MAX_GATHERED_LEN),
        )
        return [rows for rows in self._prompt_rows if rows == 1 or all(rows * each <= most for each, most in limits)]

    def all(self) -> Iterator[PerSequenceSpec]:
        """Yields every step that mixed traffic can meet."""
        for spec in self._all():
            if spec.kind == "decode":
                yield spec
            else:
                yield from (dataclasses.replace(spec, num_rows=rows) for rows in self._rows_of(spec))

    def _all(self) -> Iterator[PerSequenceSpec]:
        """Yields every decode step, and every chunk of one prompt."""
        for source_len in self._first_source_buckets:
            for num_tokens in self._chunks_behind(0):
                yield self.chunk(num_tokens, 0, source_len)
        for source_len in self._source_buckets:
            for num_pages in self.page_buckets:
                for num_rows in self._row_buckets:
                    if num_rows <= self._most_rows(num_pages, source_len):
                        yield self._decode(num_rows, num_pages, source_len)
            for num_tokens in self._chunks_behind(1):
                behind = self.chunk(num_tokens, 1, source_len)
                for num_pages in self.page_buckets:
                    if num_pages >= behind.num_pages:
                        yield dataclasses.replace(behind, num_pages=num_pages)

    def largest_decode(self) -> PerSequenceSpec:
        """Returns the decode step with the most full-length requests."""
        longest, source_len = self.page_buckets[-1], self._source_buckets[-1]
        return self._decode(self._most_rows(longest, source_len), longest, source_len)

    def final_chunk(self, num_tokens: int) -> PerSequenceSpec:
        """Returns the last chunk, of at most `num_tokens` tokens, of a full-length request."""
        room = self._chunks_behind(1)
        fitting = [size for size in room if size <= num_tokens] if self.needs_exact_chunks else []
        size = fitting[-1] if fitting else min(num_tokens, room[-1])
        return dataclasses.replace(self.chunk(size, 1, self._source_buckets[-1]), num_pages=self.page_buckets[-1])

    def largest(self) -> tuple[PerSequenceSpec, ...]:
        """Returns the steps among which is the one with the most temporary bytes."""
        first = self.chunk(self._chunks_behind(0)[-1], 0, self._source_buckets[-1])
        return (self.largest_decode(), self.final_chunk(self._chunk_buckets[-1]), first)

    def _chunks_behind(self, start: int) -> list[int]:
        """Returns the lengths of chunks that fit into a sequence after `start` tokens, ascending."""
        capacity = self.page_buckets[-1] * self._page_size or start + self._chunk_buckets[-1]
        return [num_tokens for num_tokens in self._chunk_buckets if start + num_tokens <= capacity]
