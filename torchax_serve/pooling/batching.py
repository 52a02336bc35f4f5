"""Batches texts of many lengths into few shapes."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.views import to_jax_array
from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import LoadedModel
from model_adapters.program.model_program import CallSpec
from model_adapters.program.padding_safety import can_batch_padded
from torchax_serve.pooling.queue import check_wanted
from torchax_serve.pooling.text_tokenizer import IDS, MASK, Row, TextTokenizer
from torchax_serve.runtime.model_runtime import ModelRuntime

TOKENS_PER_BATCH = 4096  # padding included; larger batches are not faster and take more memory
MAX_ROWS = 32  # of a batch; a power of two
SMALLEST_STEP = 8  # tokens between two sizes of rows; smaller ones are not faster

Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one forward.

    Attributes:
        indices: Indices of the texts in the order of the rows; further rows are padding.
        mask: int32[rows, len], 1 for tokens of the text.
        fields: Output of the forward by name, on the device.
    """

    indices: list[int]
    mask: jax.Array
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
    tokenizer: TextTokenizer,
    texts: Sequence[Text],
    pairs: Sequence[str] | None,
    *,
    max_len: int | None,
    truncate: bool,
    remedy: str = "shorten it, or pass truncate=True",
) -> tuple[list[Row], list[int]]:
    """Returns the rows of texts, or of pairs of texts, and the indices of those cut.

    Texts that are too long are cut to `max_len` tokens.

    Raises:
        InvalidArgumentError: an empty text, text for a model without a tokenizer; without `truncate`, more than
            `max_len` tokens.
    """
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


def run(runtime: ModelRuntime, rows: Sequence[Row], names: Iterable[str], *, pad_id: int | None) -> Iterator[Batch]:
    """Runs forwards over all `rows`, the longest first, and yields their batches.

    Args:
        runtime: of the submodule that is called.
        rows: token ids and other arguments of texts of any lengths.
        names: arguments that the tokenizer makes of a text; a row that lacks some has zeros there, whichever rows are
            in its batch.
        pad_id: padding token; None for a model that does not recognise padding: each batch has one row then.
    """
    may_pad = pads_texts(runtime, pad_id)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][IDS]))
    while order:
        longest = len(rows[order[0]][IDS])
        width = _width(runtime, longest) if may_pad else longest
        most = _most_rows(width) if pad_id is not None else 1
        taken = [index for index in order[:most] if may_pad or len(rows[index][IDS]) == longest]
        taken = taken[: _num_rows(len(taken))]
        order = order[len(taken) :]
        check_wanted()
        yield _forward(runtime, [rows[index] for index in taken], taken, names, width, pad_id or 0)


def pads_texts(runtime: ModelRuntime, pad_id: int | None) -> bool:
    """Returns whether texts are padded; else each length has programs of its own."""
    may_pad = pad_id is not None and runtime.program.accepts(MASK) and can_batch_padded(runtime.program.target)
    return may_pad and runtime.program.rope is None  # its frequencies depend on the padded length


def batch_shapes(runtime: ModelRuntime, max_len: int) -> list[tuple[int, int]]:
    """Returns rows and length of every batch that padded texts of up to `max_len` tokens can have."""
    widths = sorted({_width(runtime, length) for length in range(1, max_len + 1)})
    shapes = []
    for width in widths:
        texts = range(1, _most_rows(width) + 1)
        shapes += [(rows, width) for rows in sorted({_next_power(min(n, _num_rows(n))) for n in texts})]
    return shapes


def batch_arguments(runtime: ModelRuntime, names: Iterable[str]) -> list[str]:
    """Returns the arguments of a batch of texts, of which the tokenizer makes `names`; each is int32[rows, len]."""
    found = {name for name in names if runtime.program.accepts(name)} | {IDS}
    return sorted(found | {MASK} if runtime.program.accepts(MASK) else found)


def _most_rows(width: int) -> int:
    return max(1, min(MAX_ROWS, TOKENS_PER_BATCH // width))


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _width(runtime: ModelRuntime, length: int) -> int:
    """Returns the bucket size for rows of `length` tokens, within the model's positions."""
    step = max(SMALLEST_STEP, (1 << (length - 1).bit_length()) // 8)  # padding is less than a quarter
    bucket, limit = -(-length // step) * step, runtime.limits.max_positions
    return bucket if limit is None else max(length, min(bucket, limit))


def _num_rows(num_texts: int) -> int:
    """Returns the most rows of the next forward, a power of two; padding is at most a quarter of them."""
    rows = _next_power(num_texts)
    return rows if 4 * num_texts >= 3 * rows else rows // 2


def _forward(
    runtime: ModelRuntime, rows: list[Row], indices: list[int], names: Iterable[str], width: int, pad_id: int
) -> Batch:
    num_rows = _next_power(len(rows))
    ids = np.full((num_rows, width), pad_id, np.int32)
    mask = np.zeros((num_rows, width), np.int32)
    mask[:, 0] = 1  # padding rows see one token, since a softmax over none is nan
    arguments = batch_arguments(runtime, names)
    given = {name: np.zeros((num_rows, width), np.int32) for name in arguments} | {IDS: ids}
    for number, row in enumerate(rows):
        mask[number, : len(row[IDS])] = 1
        for name in given.keys() & row.keys():
            given[name][number, : len(row[name])] = row[name]
    runtime.limits.check_ids(torch.from_numpy(ids[: len(rows)]))
    if MASK in given:
        given[MASK] = mask
    fields = runtime.forward_unpadded({name: torch.from_numpy(array) for name, array in given.items()}, CallSpec())
    return Batch(indices, to_jax_array(torch.from_numpy(mask)), fields)


def limit_of(loaded: LoadedModel, runtime: ModelRuntime, file_limit: int | None = None) -> int | None:
    """Returns the most tokens of a text; None if nothing limits them.

    Args:
        loaded: the model.
        runtime: of the submodule that is called.
        file_limit: limit in the checkpoint's files, in place of the tokenizer's; the model's positions always count.
    """
    limit = runtime.limits.max_positions
    padding_idx = getattr(runtime.config, "pad_token_id", None)
    tables = [m for m in runtime.program.target.modules() if isinstance(m, torch.nn.Embedding)]
    if (
        limit is not None
        and padding_idx is not None
        and any(t.padding_idx is not None and t.num_embeddings == limit for t in tables)
    ):
        limit -= padding_idx + 1  # RoBERTa's positions start after the padding index
    tokenizer_limit = getattr(loaded.tokenizer(), "model_max_length", None) if file_limit is None else file_limit
    limits = [x for x in (limit, tokenizer_limit) if x is not None and x < 10**9]
    return min(limits, default=None)
