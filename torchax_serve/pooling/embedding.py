"""Embeddings of texts: the model's hidden states, pooled on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.loading.checkpoint import PICKLE_FILE, SAFE_FILE, Checkpoint, pickle_only
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.pooling.batching import Text, checked_texts, limit_of, rows_of, run
from torchax_serve.pooling.layers import ANY_POOLING, Layer, PoolingOptions, embeddings
from torchax_serve.pooling.sentence_transformers import POOLINGS, EmbeddingRule, LayerFiles, rule_in
from torchax_serve.pooling.text_rule import TextRule
from torchax_serve.pooling.text_tokenizer import TextTokenizer
from torchax_serve.runtime.model_runtime import ModelRuntime

_CHOICES = ", ".join(f'"{name}"' for name in POOLINGS)
_READS_NO_PROMPT = {"hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl"}
"""Checkpoints that are older than the setting; sentence-transformers has them by name."""

_BY_ENCODER = {"blenderbot", "blenderbot-small", "longt5", "m2m_100", "marian", "mt5", "pegasus", "pegasus_x", "t5"}
_BY_ENCODER |= {"prophetnet", "switch_transformers", "t5gemma", "t5gemma2", "udop", "umt5"}
"""Encoder-decoder types of which sentence-transformers runs the encoder only."""


def embed(
    loaded: LoadedModel,
    runtime: ModelRuntime,
    texts: str | Sequence[Text],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate: bool | None = None,
    truncate_dim: int | None = None,
) -> np.ndarray:
    """Returns embeddings of texts.

    Args:
        loaded: the model.
        runtime: of the complete model.
        texts: one text or several; a list of token ids may replace a text and gets no prompt.
        pooling: one of `POOLINGS`; None follows the checkpoint's ``modules.json``, with its further layers.
        normalize: scale to length 1; None follows the checkpoint's files, and does not without them.
        prompt: text in front of each text.
        prompt_name: name of one of the checkpoint's prompts, in place of `prompt`.
        truncate: cut texts that are too long (True), or raise (False). None cuts them and logs a warning if the
            checkpoint has files of sentence-transformers, and raises otherwise.
        truncate_dim: number of leading values of each embedding to return; None follows the checkpoint's files.

    Returns:
        float32[dim] of one text, float32[num_texts, dim] of several, in their order.

    Raises:
        InvalidArgumentError: no pooling given or in the checkpoint; an empty or too long text; an unknown prompt.
        CheckpointError: files about embeddings that are not readable.
        UnsupportedModelError: a model without hidden states of tokens, or a setting in the checkpoint's files that is
            not supported.
    """
    embedder = own_embedder(loaded, runtime) if pooling is None else any_embedder(loaded, runtime)
    text = embedder.rule.text
    chosen = _prompt(text, prompt, prompt_name)
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
    return found[0] if isinstance(texts, str) else found


class Embedder:
    """A model with its pooling rule, weights and tokenizer; made once per model and rule.

    Attributes:
        rule: From hidden states to embeddings.
        part: Submodule that computes the hidden states.
        pad_id: Padding token.
        max_len: Most tokens of a text; None for any number.
        tokenizer: Of the texts.
    """

    def __init__(self, loaded: LoadedModel, runtime: ModelRuntime, rule: EmbeddingRule) -> None:
        self.rule = rule
        self._name, self.part = loaded.source.name, runtime.submodule(part_of(runtime))
        self.pad_id = pad_id_of(loaded, runtime)
        self.max_len = limit_of(loaded, self.part, rule.text.max_len)
        self.tokenizer = TextTokenizer(loaded, lower_case=rule.text.lower_case)
        self._weights = tuple(_weights_of(files, allow_pickle=loaded.allow_pickle) for files in rule.files)
        cache = self.part.steps.executables  # on a mesh hidden states come to one device
        pools = ExecutableCache(cache.folder, cache.identity) if cache.mesh is None else ExecutableCache()
        self._pool = CachedFunction(pools, f"pool_{'any' if ANY_POOLING in rule.layers else 'own'}", self._pooled)

    def _pooled(self, _: Any, *args: Any, spec: tuple[Layer, ...]) -> jax.Array:
        return embeddings(spec, *args)

    def compile_pooling(self, hidden: Any, mask: Any) -> None:
        """Compiles the layers behind the model for abstract `hidden` [rows, len, width] and `mask` [rows, len]."""
        lens, options = np.zeros(hidden.shape[0], np.int32), _options(0, 1, None)
        self._pool.compiled({}, self._weights, hidden, mask, lens, options, spec=self.rule.layers)

    def embeddings(
        self,
        requested: Sequence[Text],
        prompt: str,
        *,
        truncate: bool,
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
                f"{self._name}: texts are cut to {max_len} tokens, as its files say; {len(cut)} of {len(rows)} are "
                "longer"
            )
        layers = self.rule.layers
        skips_prompt = prompt and any(layer.kind == "pooling" and not layer.reads_prompt for layer in layers)
        prompt_len = self.tokenizer.prompt_len(prompt, max_len) if skips_prompt else 0
        lens = [prompt_len if isinstance(each, str) else 0 for each in requested]
        found: list[Any] = [None] * len(rows)
        for batch in run(self.part, rows, self.tokenizer.arguments, pad_id=self.pad_id):
            hidden = batch.fields.get("last_hidden_state")
            if hidden is None:
                raise UnsupportedModelError(
                    f"expected hidden states of tokens from {type(self.part.program.target).__name__}, got "
                    f"{', '.join(batch.fields)}"
                )
            of_rows = np.zeros(hidden.shape[0], np.int32)
            of_rows[: len(batch.indices)] = [lens[index] for index in batch.indices]
            num_values = self._num_values(hidden.shape[-1], truncate_dim)
            options = _options(pooling, num_values, normalize)
            made = self._pool({}, self._weights, hidden, batch.mask, of_rows, options, spec=layers)
            values = np.asarray(made)[:, :num_values]
            for number, index in enumerate(batch.indices):
                found[index] = values[number]
        return np.stack(found)

    def _num_values(self, width: int, requested: Any) -> int:
        """Returns the number of leading values to return; `width` is that of the hidden states."""
        for layer, tensors in zip(self.rule.layers, self._weights, strict=True):
            width = max(1, len(layer.poolings)) * width if layer.kind == "pooling" else width
            width = tensors["linear.weight"].shape[0] if layer.kind == "dense" else width
        if requested is None:
            return width if self.rule.text.truncate_dim is None else min(width, self.rule.text.truncate_dim)
        if isinstance(requested, bool) or not isinstance(requested, int) or not 1 <= requested <= width:
            raise InvalidArgumentError(f"truncate_dim: expected a number from 1 to {width}, got {requested!r}")
        return requested


class _AnyEmbedder(Embedder):
    """An embedder without the checkpoint's files: each request chooses the pooling."""


def own_embedder(loaded: LoadedModel, runtime: ModelRuntime) -> Embedder:
    """Returns the embedder by the checkpoint's files of sentence-transformers.

    Raises:
        InvalidArgumentError: there are none.
        CheckpointError: files that are not readable.
        UnsupportedModelError: a setting in them that is not supported.
    """
    return loaded.once(Embedder, lambda: Embedder(loaded, runtime, _own_rule(loaded)))


def any_embedder(loaded: LoadedModel, runtime: ModelRuntime) -> Embedder:
    """Returns the embedder for requests that choose their pooling."""
    rule = EmbeddingRule((ANY_POOLING,), (None,))
    return loaded.once(_AnyEmbedder, lambda: _AnyEmbedder(loaded, runtime, rule))


def _options(pooling: int, num_values: int, normalize: bool | None) -> PoolingOptions:
    return PoolingOptions(
        np.asarray(pooling, np.int32),
        np.asarray(num_values, np.int32),
        np.asarray(normalize is not False),
        np.asarray(bool(normalize)),
    )


def part_of(runtime: ModelRuntime) -> str:
    """Returns the name of the submodule that computes hidden states of tokens.

    It is the encoder, or the model under its head.
    """
    if runtime.encoder is not None:
        return runtime.encoder.name
    module = runtime.program.module
    base = module.base_model
    return next((name for name, child in module.named_modules() if child is base), "")


def pad_id_of(loaded: LoadedModel, runtime: ModelRuntime) -> int:
    """Returns the padding token; it is masked, so any token of the vocabulary does."""
    for holder in (runtime.config.get_text_config(), loaded.tokenizer()):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int) and 0 <= found < runtime.limits.vocab_size:
            return found
    return 0


def _pooling_index(pooling: str | None) -> int:
    """Returns the index of a pooling, 0 for that of the checkpoint."""
    if pooling is None:
        return 0
    if pooling not in POOLINGS:
        raise InvalidArgumentError(f"pooling: expected one of {_CHOICES}, got {pooling!r}")
    return POOLINGS.index(pooling)


def _own_rule(loaded: LoadedModel) -> EmbeddingRule:
    rule = rule_in(loaded.files_folder)
    if rule is None:
        raise InvalidArgumentError(
            f"embed: {loaded.source.name} has no modules.json that says how its tokens become one embedding; pass "
            f"pooling, one of {_CHOICES}"
        )
    if loaded.config.is_encoder_decoder and loaded.config.model_type not in _BY_ENCODER:
        raise UnsupportedModelError(
            f"embed: sentence-transformers embeds by the decoder of a model of type {loaded.config.model_type}, which "
            f"is not done here; pass pooling, one of {_CHOICES}, to embed by its encoder"
        )
    if loaded.source.hub_id in _READS_NO_PROMPT:
        layers = tuple(dataclasses.replace(layer, reads_prompt=False) for layer in rule.layers)
        rule = dataclasses.replace(rule, layers=layers)
    return rule


def _prompt(text: TextRule, prompt: str | None, name: str | None) -> str:
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


def _weights_of(files: LayerFiles | None, *, allow_pickle: bool) -> dict[str, jax.Array]:
    if files is None:
        return {}
    there = [files.folder / name for name in (SAFE_FILE, PICKLE_FILE) if (files.folder / name).is_file()]
    if not there:
        raise CheckpointError(f"{files.folder} holds no {SAFE_FILE}, which the weights of its layer are expected in")
    if there[0].name == PICKLE_FILE and not allow_pickle:
        raise pickle_only(str(files.folder))
    with Checkpoint.of(there[:1]).readers(lambda amount: None) as readers:
        tensors = {name: reader[...].to(torch.float32).numpy() for name, reader in readers.items()}
    if set(tensors) != set(files.shapes):
        raise CheckpointError(
            f"{there[0]}: expected tensors {', '.join(sorted(files.shapes))}, got {', '.join(sorted(tensors))}"
        )
    for name, shape in files.shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{there[0]}: {name} is {list(tensors[name].shape)}, expected {list(shape)} by the config.json next "
                "to it"
            )
    return {name: jnp.asarray(array) for name, array in tensors.items()}
