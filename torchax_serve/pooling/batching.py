"""Batches texts of many lengths into few shapes."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from torchax_serve.pooling.layers import TokenRows
from torchax_serve.pooling.queue import check_wanted
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_tokenizer import IDS, MASK, Row, TextEncoder
from torchax_serve.validation.argument_checks import short_repr

TOKENS_PER_BATCH = 4096  # padding included; larger batches are not faster and take more memory
SMALLEST_STEP = 8  # tokens between two sizes of rows; smaller ones are not faster

Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one forward.

    Attributes:
        indices: Indices of the texts in the order of the rows; further rows are padding.
        tokens: Of which rows the tokens are, those of padded texts one row after the other.
        begins: First token of each text.
        fields: Output of the forward by name, on the device: [rows, len, ...] of padded texts, else [tokens, ...].
    """

    indices: list[int]
    tokens: TokenRows
    begins: np.ndarray
    fields: dict[str, Any]


def checked_texts(texts: str | Sequence[Text]) -> list[Text]:
    """Returns `texts`, one or several, as a checked list.

    Raises:
        InvalidArgumentError: no text, a blank one, or something else than text or token ids.
    """
    if not isinstance(texts, str) and (isinstance(texts, bytes) or not isinstance(texts, Iterable)):
        raise InvalidArgumentError(f"texts: expected a text or several, got {texts!r:.80}")
    requested: list[Text] = [texts] if isinstance(texts, str) else list(texts)
    if not requested:
        raise InvalidArgumentError("texts: expected at least one text, got none")
    for index, text in enumerate(requested):
        if isinstance(text, str):
            if not text.strip():
                raise InvalidArgumentError(f"texts[{index}]: expected some text, got an empty one; leave it out")
            if surrogate := _surrogate_in(text):
                raise InvalidArgumentError(
                    f"texts[{index}]: expected Unicode text, got {surrogate!r}, half of a character; decode its bytes "
                    "with errors='replace'"
                )
        elif isinstance(text, bytes) or not isinstance(text, Iterable) or not all(map(_is_id, text)):
            raise InvalidArgumentError(f"texts[{index}]: expected text or a list of token ids, got {text!r:.80}")
    return requested


def _surrogate_in(text: str) -> str | None:
    """Returns the first code point that UTF-8 cannot encode; None if there is none.

    Tokenizers refuse such code points.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _is_id(token: Any) -> bool:
    return type(token) is int or (isinstance(token, numbers.Integral) and not isinstance(token, bool))


def rows_of(
    tokenizer: TextEncoder,
    texts: Sequence[Text],
    pairs: Sequence[str] | None,
    *,
    max_len: int | None,
    truncate: bool | int,
    remedy: str = "shorten it, or pass truncate=True",
) -> tuple[list[Row], list[int]]:
    """Returns the rows of texts, or of pairs of texts, and the indices of those cut.

    Texts that are too long are cut to `max_len` tokens, or to `truncate` if that is a number.

    Raises:
        InvalidArgumentError: a number below 1; an empty text, text for a model without a tokenizer; without
            `truncate`, more than `max_len` tokens.
    """
    if not isinstance(truncate, bool):
        if truncate < 1:
            raise InvalidArgumentError(f"truncate: expected True, False or a number of tokens >= 1, got {truncate}")
        max_len, truncate = truncate if max_len is None else min(truncate, max_len), True
    rows: list[Row] = []
    cut: list[int] = []
    for index, text in enumerate(texts):
        check_wanted()
        if isinstance(text, str):
            row, length = tokenizer.rows_of(
                text, None if pairs is None else pairs[index], max_len if truncate else None
            )
        else:
            row = {IDS: [int(token) for token in text]}
            length = len(row[IDS])
        if length == 0:
            raise InvalidArgumentError(f"texts[{index}]: expected at least one token, got none; leave it out")
        if max_len is not None and length > max_len:
            if not truncate:
                raise InvalidArgumentError(f"texts[{index}]: expected at most {max_len} tokens, got {length}; {remedy}")
            cut.append(index)
            row = {name: _cut(values, max_len) for name, values in row.items()}
        rows.append(row)
    return rows, cut


def _cut(values: list[int], length: int) -> list[int]:
    """Returns the first tokens and the last one, which ends the text for the model."""
    return values if len(values) <= length else [*values[: length - 1], values[-1]]


def run(program: TextProgram, rows: Sequence[Row], names: Iterable[str], *, pad_id: int | None) -> Iterator[Batch]:
    """Runs forwards over all `rows`, the longest first, and yields their batches.

    Args:
        program: of the submodule that is called.
        rows: token ids and other arguments of texts of any lengths; the mask only where some tokens are not seen.
        names: arguments that the tokenizer makes of a text; a row that lacks some has zeros there, whichever rows are
            in its batch.
        pad_id: padding token; None for a model that does not recognise padding: each batch has one row then.
    """
    may_pad = pads_texts(program, pad_id)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][IDS]))
    while order:
        longest = len(rows[order[0]][IDS])
        width = _width(program, longest) if may_pad else longest
        most = _most_rows(program, width) if pad_id is not None else 1
        taken = [index for index in order[:most] if may_pad or len(rows[index][IDS]) == longest]
        taken = taken[: _num_rows(len(taken))]
        order = order[len(taken) :]
        check_wanted()
        yield _forward(program, [rows[index] for index in taken], taken, names, width, pad_id or 0)


def pads_texts(program: TextProgram, pad_id: int | None) -> bool:
    """Returns whether texts are padded; else each length has programs of its own."""
    return pad_id is not None and program.can_pad


def batch_shapes(program: TextProgram, max_len: int) -> list[tuple[int, int]]:
    """Returns rows and length of every batch of padded texts of up to `max_len` tokens."""
    widths = sorted({_width(program, length) for length in range(1, max_len + 1)})
    shapes = []
    for width in widths:
        texts = range(1, _most_rows(program, width) + 1)
        shapes += [(rows, width) for rows in sorted({next_power(min(n, _num_rows(n))) for n in texts})]
    return shapes


def batch_arguments(program: TextProgram, names: Iterable[str]) -> list[str]:
    """Returns arguments `names` of a batch of texts, each int32[rows, len]."""
    found = {name for name in names if program.accepts(name)} | {IDS}
    return sorted(found | {MASK} if program.accepts(MASK) else found)


def _most_rows(program: TextProgram, width: int) -> int:
    return max(1, min(program.max_rows, TOKENS_PER_BATCH // width))


def next_power(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def bucket_of(length: int, smallest: int = SMALLEST_STEP) -> int:
    """Returns the size in which `length` tokens are computed; less than a quarter is padding."""
    step = max(smallest, next_power(length) // 8)
    return -(-length // step) * step


def _width(program: TextProgram, length: int) -> int:
    """Returns the bucket size for rows of `length` tokens, within the model's positions."""
    bucket, limit = bucket_of(length), program.max_positions
    return bucket if limit is None else max(length, min(bucket, limit))


def _num_rows(num_texts: int) -> int:
    """Returns the most rows of the next forward, a power of two; at most a quarter is padding."""
    rows = next_power(num_texts)
    return rows if 4 * num_texts >= 3 * rows else rows // 2


def _forward(
    program: TextProgram, rows: list[Row], indices: list[int], names: Iterable[str], width: int, pad_id: int
) -> Batch:
    num_rows = next_power(len(rows))
    ids = np.full((num_rows, width), pad_id, np.int32)
    mask = np.zeros((num_rows, width), np.int32)
    mask[:, 0] = 1  # padding rows see one token, since a softmax over none is nan
    arguments = batch_arguments(program, names)
    given = {name: np.zeros((num_rows, width), np.int32) for name in arguments} | {IDS: ids}
    for number, row in enumerate(rows):
        mask[number, : len(row[IDS])] = row.get(MASK, 1)
        check_ids(row[IDS], program.vocab_size)
        for name in given.keys() & row.keys():
            given[name][number, : len(row[name])] = row[name]
    if MASK in given:
        given[MASK] = mask
    places = np.broadcast_to(np.arange(width, dtype=np.int32), mask.shape)
    numbers = np.where(mask > 0, np.arange(num_rows, dtype=np.int32)[:, None], num_rows)
    tokens = TokenRows(to_device(numbers.reshape(-1), np.int32), to_device(places.reshape(-1), np.int32), num_rows)
    return Batch(indices, tokens, np.arange(len(rows)) * width, program.forward(given))


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError for token ids, of any size, outside the vocabulary."""
    smallest, largest = min(ids), max(ids)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidArgumentError(
            f"expected token ids from 0 to {vocab_size - 1}, got {short_repr(wrong)}; encode with this model's own "
            "tokenizer"
        )
