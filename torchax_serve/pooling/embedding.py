"""Embeddings of texts: the model's hidden states, pooled on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.pooling.batching import Batch, Text, batch_arguments, checked_texts, rows_of, run
from torchax_serve.pooling.layers import ANY_POOLING, Layer, PoolingOptions, TokenRows, Weights, embeddings
from torchax_serve.pooling.methods import POOLINGS
from torchax_serve.pooling.packing import run_packed
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_rule import TextRule
from torchax_serve.pooling.text_tokenizer import IDS, MASK, Row, TextEncoder
from torchax_serve.pooling.token_rule import VectorTokens

HIDDEN = "last_hidden_state"
"""Output of a forward with the hidden states of tokens."""
CHOICES = ", ".join(f'"{name}"' for name in POOLINGS)


def embed(
    embedder: Embedder,
    texts: str | Sequence[Text],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate: bool | int | None = None,
    truncate_dim: int | None = None,
    max_active_dims: int | None = None,
) -> np.ndarray:
    """Returns embeddings of texts; sparse ones with their zeros.

    Args:
        embedder: the model; with `pooling` one whose requests choose it.
        texts: one text or several; a list of token ids may replace a text and gets no prompt.
        pooling: one of `POOLINGS`; None follows the checkpoint's ``modules.json``, with its further layers.
        normalize: scale to length 1; None follows the checkpoint's files, and does not without them.
        prompt: text in front of each text.
        prompt_name: name of one of the checkpoint's prompts, in place of `prompt`.
        truncate: cut texts that are too long (True), or raise (False); a number: cut to so many tokens. None cuts them
            and logs a warning if the checkpoint has files of sentence-transformers, and raises otherwise.
        truncate_dim: number of leading values of each embedding to return; None follows the checkpoint's files.
        max_active_dims: most values of a sparse embedding that are not 0; None follows the checkpoint's files.

    Returns:
        float32[dim] of one text, float32[num_texts, dim] of several, in their order.

    Raises:
        InvalidArgumentError: an unknown pooling; an empty or too long text; an unknown prompt.
        UnsupportedModelError: a model without hidden states of tokens.
    """
    text = embedder.rule
    if embedder.tokens is not None:
        raise UnsupportedModelError(
            f"embed: expected a model with one embedding for a text, got {embedder.name}, which has one for each "
            "token; call embed_tokens(), or pass pooling="
        )
    chosen = chosen_prompt(text, prompt, prompt_name)
    requested = checked_texts(texts)
    found = embedder.embeddings(
        requested,
        chosen,
        truncate=text.has_files if truncate is None else truncate,
        is_explicit=truncate is not None,
        truncate_dim=truncate_dim,
        normalize=normalize,
        pooling=_pooling_index(pooling),
    )
    most = text.max_active_dims if max_active_dims is None else max_active_dims
    if embedder.is_sparse and most is not None:
        found = _most_active(found, most)
    return found[0] if isinstance(texts, str) else found


class Embedder:
    """A model with its pooling rule, weights and tokenizer; made once per model and rule.

    Attributes:
        name: Name of the model, for messages.
        program: Computes the hidden states.
        layers: From hidden states to embeddings.
        weights: Weights of each layer.
        rule: How texts are read.
        tokenizer: Of the texts.
        pad_id: Padding token.
        max_len: Most tokens of a text; None for any number.
        field: Output of the forward that the layers read.
        tokens: Which tokens have an embedding, of a multi-vector model; None: each text has one.
        is_sparse: Whether embeddings are sparse: few of their values, one for each token of the vocabulary, are not 0.

    Args:
        name: As above, and so the others.
    """

    def __init__(
        self,
        name: str,
        program: TextProgram,
        layers: tuple[Layer, ...],
        weights: Weights,
        rule: TextRule,
        tokenizer: TextEncoder,
        pad_id: int,
        max_len: int | None,
        tokens: VectorTokens | None = None,
    ) -> None:
        self.name, self.program, self.layers, self.weights = name, program, layers, weights
        self.rule, self.tokenizer, self.pad_id, self.max_len = rule, tokenizer, pad_id, max_len
        self.tokens = tokens
        self.is_sparse = any(layer.kind == "splade" for layer in layers)
        self.field = "logits" if self.is_sparse else HIDDEN
        kind = "any" if ANY_POOLING in layers else "own"
        self._pool = CachedFunction(program.pools, f"pool_{kind}", self._pooled, is_pure=True)

    def _pooled(self, _: Any, *args: Any, spec: tuple[Layer, ...]) -> jax.Array:
        return embeddings(spec, *args)

    @property
    def packs(self) -> bool:
        """Whether texts stand in one row, without padding."""
        may_hide = self.tokens is not None and self.tokens.rule.expansion is not None  # tokens that others do not see
        return not may_hide and self.program.packs(batch_arguments(self.program, self.tokenizer.arguments))

    def compile_pooling(self, hidden: Any, tokens: TokenRows) -> None:
        """Compiles the layers behind the model for `hidden` [..., width] of `tokens`."""
        lens, options = np.zeros(tokens.num_rows, np.int32), _options(0, 1, None)
        self._pool.compiled({}, self.weights, hidden, tokens, lens, options, spec=self.layers)

    def batches(self, rows: Sequence[Row]) -> Iterator[Batch]:
        """Runs forwards over all `rows`, and yields their batches."""
        if self.packs and not any(MASK in row for row in rows):
            with contextlib.suppress(NotPackableError):  # texts are padded from now on
                yield from run_packed(self.program, rows, self.tokenizer.arguments)
                return
        yield from run(self.program, rows, self.tokenizer.arguments, pad_id=self.pad_id)

    def embeddings(
        self,
        requested: Sequence[Text],
        prompt: str,
        *,
        truncate: bool | int,
        is_explicit: bool,
        truncate_dim: int | None,
        normalize: bool | None,
        pooling: int,
    ) -> np.ndarray:
        """Returns float32[num_texts, dim]; with `is_explicit` no warning about cut texts is logged."""
        max_len = self.max_len
        prompted = [prompt + each if isinstance(each, str) else each for each in requested]
        rows, cut = rows_of(self.tokenizer, prompted, None, max_len=max_len, truncate=truncate)
        if cut and not is_explicit:
            self.tokenizer.warn_once(
                f"{self.name}: texts are cut to {max_len} tokens, as its files say; {len(cut)} of {len(rows)} are "
                "longer"
            )
        layers = self.layers
        skips_prompt = prompt and any(layer.kind == "pooling" and not layer.reads_prompt for layer in layers)
        prompt_len = self.tokenizer.prompt_len(prompt, max_len) if skips_prompt else 0
        lens = [prompt_len if isinstance(each, str) else 0 for each in requested]
        found: list[Any] = [None] * len(rows)
        for batch in self.batches(rows):
            hidden = self._read(batch)
            of_rows = np.zeros(batch.tokens.num_rows, np.int32)
            of_rows[: len(batch.indices)] = [lens[index] for index in batch.indices]
            num_values = self._num_values(hidden.shape[-1], truncate_dim)
            options = _options(pooling, num_values, normalize)
            made = self._pool({}, self.weights, hidden, batch.tokens, of_rows, options, spec=layers)
            values = np.asarray(made)[:, :num_values]
            for number, index in enumerate(batch.indices):
                found[index] = values[number]
        return np.stack(found)

    def token_values(self, rows: Sequence[Row], *, normalize: bool | None) -> list[np.ndarray]:
        """Returns the embedding of each token of rows, float32[len, dim] each.

        It is what the layers make of the hidden states in a multi-vector model, else the hidden states.
        """
        found: list[Any] = [None] * len(rows)
        for batch in self.batches(rows):
            hidden = self._read(batch)
            if self.tokens is None:
                values = np.asarray(hidden).astype(np.float32).reshape(-1, hidden.shape[-1])
                values = values / np.linalg.norm(values, axis=-1, keepdims=True).clip(1e-12) if normalize else values
            else:
                no_prompts = np.zeros(batch.tokens.num_rows, np.int32)
                options = _options(0, self._num_values(hidden.shape[-1], None), normalize)
                pooled = self._pool({}, self.weights, hidden, batch.tokens, no_prompts, options, spec=self.layers)
                values = np.asarray(pooled, np.float32)
            for begin, index in zip(batch.begins, batch.indices, strict=True):
                found[index] = values[begin : begin + len(rows[index][IDS])]
        return found

    def _read(self, batch: Batch) -> jax.Array:
        """Returns what the layers read of a batch, [..., width]."""
        found: jax.Array | None = batch.fields.get(self.field)
        if found is None or found.ndim < 2 or found.size // found.shape[-1] != len(batch.tokens.rows):
            what = "logits" if self.is_sparse else "hidden states"
            raise UnsupportedModelError(
                f"expected {what} of tokens from {self.program.class_name}, got {', '.join(batch.fields)}"
            )
        return found

    def _num_values(self, width: int, requested: Any) -> int:
        """Returns the number of leading values to return; `width` is that of the hidden states."""
        for layer, tensors in zip(self.layers, self.weights, strict=True):
            width = max(1, len(layer.poolings)) * width if layer.kind == "pooling" else width
            width = tensors["linear.weight"].shape[0] if layer.kind == "dense" else width
        if requested is None:
            return width if self.rule.truncate_dim is None else min(width, self.rule.truncate_dim)
        if self.is_sparse:
            raise InvalidArgumentError(
                f"truncate_dim: expected none for sparse embeddings, whose values are those of the vocabulary, got "
                f"{requested!r}; call embed_sparse(max_active_dims=)"
            )
        if isinstance(requested, bool) or not isinstance(requested, int) or not 1 <= requested <= width:
            raise InvalidArgumentError(f"truncate_dim: expected a number from 1 to {width}, got {requested!r}")
        return requested


def _most_active(rows: np.ndarray, most: int) -> np.ndarray:
    """Returns float32[num_texts, dim] with all but the `most` largest values of a row at 0."""
    if most >= rows.shape[1]:
        return rows
    largest = np.argpartition(-rows, most - 1, axis=1)[:, :most]
    kept = np.zeros_like(rows)
    np.put_along_axis(kept, largest, np.take_along_axis(rows, largest, 1), 1)
    return kept


def _options(pooling: int, num_values: int, normalize: bool | None) -> PoolingOptions:
    return PoolingOptions(
        np.asarray(pooling, np.int32),
        np.asarray(num_values, np.int32),
        np.asarray(normalize is not False),
        np.asarray(bool(normalize)),
    )


def _pooling_index(pooling: str | None) -> int:
    """Returns the index of a pooling, 0 for that of the checkpoint."""
    if pooling is None:
        return 0
    if pooling not in POOLINGS:
        raise InvalidArgumentError(f"pooling: expected one of {CHOICES}, got {pooling!r}")
    return POOLINGS.index(pooling)


def chosen_prompt(text: TextRule, prompt: str | None, name: str | None) -> str:
    """Returns the text in front of each text: `prompt`, that of a name, or the default.

    Raises:
        InvalidArgumentError: both are given, or an unknown name.
    """
    if prompt is not None:
        if name is not None:
            raise InvalidArgumentError("prompt and prompt_name: expected one of them, got both; leave one out")
        if not isinstance(prompt, str):
            raise InvalidArgumentError(f"prompt: expected a text, got {prompt!r:.80}")
        return prompt
    if name is None:
        name = text.default_prompt
    if name is None:
        return ""
    if name not in text.prompts:
        raise InvalidArgumentError(
            f"prompt_name: expected one of {', '.join(map(repr, text.prompts)) or 'none, for there are none'}, got "
            f"{name!r}"
        )
    return text.prompts[name]
