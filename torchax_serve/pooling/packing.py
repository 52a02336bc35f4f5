"""Packs texts of many lengths into one row.

Hardly anything is padded, and few programs are compiled: padded batches need one for each number of rows and each
length, a row needs one for each size. Its texts fill it one after the other, and attention sees each by itself
(`varlen_attention`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from model_adapters.device_arrays import to_device
from torchax_serve.pooling.batching import Batch, batch_arguments, bucket_of, check_ids, next_power
from torchax_serve.pooling.layers import TokenRows
from torchax_serve.pooling.queue import check_wanted
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_tokenizer import IDS, MASK, Row

TOKENS_PER_ROW = 4096
"""Most tokens of a row, unless one text alone has more; longer ones are not faster and take more memory."""
SMALLEST_ROW = 16
MAX_TEXTS = 64
"""Most texts of a row."""


def run_packed(program: TextProgram, rows: Sequence[Row], names: Iterable[str]) -> Iterator[Batch]:
    """Runs forwards over all `rows`, the longest first, and yields their batches.

    Args:
        program: Of the submodule that is called; it packs texts with these arguments.
        rows: Token ids and other arguments of texts of any lengths, all of whose tokens are seen.
        names: Arguments that the tokenizer makes of a text; a row that lacks some has zeros there.
    """
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][IDS]))
    while order:
        taken: list[int] = []
        left: list[int] = []
        num_tokens = 0
        for index in order:
            length = len(rows[index][IDS])
            most = max(TOKENS_PER_ROW, num_tokens)
            fits = not taken or (num_tokens + length <= most and len(taken) < num_texts(num_tokens + length))
            (taken if fits else left).append(index)
            num_tokens += length if fits else 0
        order = left
        check_wanted()
        yield _forward(program, [rows[index] for index in taken], taken, names)


def packed_arguments(program: TextProgram, names: Iterable[str]) -> list[str]:
    """Returns arguments `names` of texts in one row, each int32[T]: all but the mask."""
    return [name for name in batch_arguments(program, names) if name != MASK]


def packed_sizes(max_len: int) -> list[int]:
    """Returns the sizes of all rows of texts of up to `max_len` tokens."""
    longest = max(max_len, min(TOKENS_PER_ROW, MAX_TEXTS * max_len))
    return sorted({row_size(length) for length in range(1, longest + 1)})


def row_size(num_tokens: int) -> int:
    """Returns the size of the row that `num_tokens` are computed in."""
    return bucket_of(num_tokens, SMALLEST_ROW)


def num_texts(num_tokens: int) -> int:
    """Returns the most texts of a row of `num_tokens`, a power of two."""
    return min(MAX_TEXTS, next_power(row_size(num_tokens)) // 2)


def tokens_of(cu_seqlens: np.ndarray, size: int) -> TokenRows:
    """Returns of which texts the tokens of a row are."""
    number = len(cu_seqlens) - 1
    lens = np.diff(cu_seqlens)
    rows = np.full(size, number, np.int32)
    rows[: cu_seqlens[-1]] = np.repeat(np.arange(number, dtype=np.int32), lens)
    places = np.arange(size, dtype=np.int32)
    places[: cu_seqlens[-1]] -= np.repeat(cu_seqlens[:-1], lens)
    return TokenRows(to_device(rows, np.int32), to_device(places, np.int32), number)


def abstract_tokens(size: int, sharding: Any) -> TokenRows:
    """Returns `tokens_of` a row of this size as shapes, placed by `sharding`."""
    array = jax.ShapeDtypeStruct((size,), np.int32, sharding=sharding)
    return TokenRows(array, array, num_texts(size))


def _forward(program: TextProgram, rows: list[Row], indices: list[int], names: Iterable[str]) -> Batch:
    ends = np.cumsum([0, *(len(row[IDS]) for row in rows)], dtype=np.int32)
    size = row_size(int(ends[-1]))
    cu_seqlens = np.full(num_texts(size) + 1, ends[-1], np.int32)
    cu_seqlens[: len(ends)] = ends
    given = {name: np.zeros(size, np.int32) for name in packed_arguments(program, names)}
    for begin, end, row in zip(ends, ends[1:], rows, strict=False):
        check_ids(row[IDS], program.vocab_size)
        for name in given.keys() & row.keys():
            given[name][begin:end] = row[name]
    return Batch(indices, tokens_of(cu_seqlens, size), ends[:-1], program.forward_packed(given, cu_seqlens))
