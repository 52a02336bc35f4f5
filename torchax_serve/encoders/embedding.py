"""Embeddings of texts: the model's hidden states, pooled on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.trace_config import torch_promotion
from torchax_serve.encoders.batches import Text, checked_texts, limit_of, rows_of, run
from torchax_serve.encoders.rules import POOLINGS, Dense, EmbeddingRule, rule_in
from torchax_serve.runtime import Runtime

_CHOICES = ", ".join(f'"{name}"' for name in POOLINGS)


def embed(
    loaded: LoadedModel,
    runtime: Runtime,
    texts: str | Sequence[Text],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
    truncate: bool = False,
) -> np.ndarray:
    """Embeddings of texts.

    Args:
        loaded: the model.
        runtime: of the whole model.
        texts: one text, or several; token ids may stand in a text's place.
        pooling: one of `POOLINGS`; None: as the checkpoint's ``modules.json`` says, with its further layers.
        normalize: to length 1; None: as the checkpoint says, and not where it says nothing.
        prompt_name: of the checkpoint's prompts, the one that stands before each text.
        truncate: cut texts that are too long, in place of an error.

    Returns:
        float32[dim] of one text, float32[num_texts, dim] of several, in their order.

    Raises:
        InvalidArgumentError: no rule of pooling where none is given; an empty or too long text; an unknown prompt.
        UnsupportedModelError: a model whose output has no hidden states of tokens.
    """
    rule = _rule(loaded, pooling)
    prompt = _prompt(rule, prompt_name)
    asked = checked_texts(texts)
    if rule.lower_case:
        asked = [text.lower() if isinstance(text, str) else text for text in asked]
    asked = [prompt + text if isinstance(text, str) else text for text in asked]
    part = runtime.part(part_of(runtime))
    limits = [x for x in (rule.max_len, limit_of(loaded, part)) if x is not None]
    rows = rows_of(loaded, asked, None, max_len=min(limits, default=None), truncate=truncate)
    layers = tuple(_weights_of(dense) for dense in rule.dense)
    is_unit = rule.normalize if normalize is None else normalize
    found: list[Any] = [None] * len(rows)
    for batch in run(part, rows, pad_id=pad_id_of(loaded, runtime)):
        hidden = batch.fields.get("last_hidden_state")
        if hidden is None:
            raise UnsupportedModelError(
                f"expected hidden states of tokens from {type(part.program.called).__name__}, got "
                f"{', '.join(batch.fields)}"
            )
        pooled = np.asarray(_finished(hidden, batch.mask, layers, rule.pooling, _activations(rule), is_unit))
        for number, index in enumerate(batch.indices):
            found[index] = pooled[number]
    return found[0] if isinstance(texts, str) else np.stack(found)


def part_of(runtime: Runtime) -> str:
    """The part of a model that makes hidden states of tokens: its encoder, or what is under its head."""
    if runtime.encoder is not None:
        return runtime.encoder.name
    module = runtime.program.module
    base = module.base_model
    return next((name for name, child in module.named_modules() if child is base), "")


def pad_id_of(loaded: LoadedModel, runtime: Runtime) -> int:
    """What rows are filled up with; masked, so any token does."""
    for holder in (runtime.config.get_text_config(), loaded.tokenizer()):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int) and 0 <= found < runtime.limits.vocab_size:
            return found
    return 0


def _rule(loaded: LoadedModel, pooling: str | None) -> EmbeddingRule:
    if pooling is not None:
        if pooling not in POOLINGS:
            raise InvalidArgumentError(f"pooling: expected one of {_CHOICES}, got {pooling!r}")
        return EmbeddingRule((pooling,))
    rule = rule_in(loaded.files_folder)
    if rule is None:
        raise InvalidArgumentError(
            f"embed: {loaded.source.name} has no modules.json that says how its tokens become one embedding; pass "
            f"pooling, one of {_CHOICES}"
        )
    return rule


def _prompt(rule: EmbeddingRule, name: str | None) -> str:
    if name is None:
        name = rule.default_prompt
    if name is None:
        return ""
    if name not in rule.prompts:
        raise InvalidArgumentError(
            f"prompt_name: expected one of {', '.join(map(repr, rule.prompts)) or 'none, for there are none'}, got "
            f"{name!r}"
        )
    return rule.prompts[name]


def _weights_of(dense: Dense) -> tuple[jax.Array, jax.Array | None]:
    tensors = load_file(dense.folder / "model.safetensors")
    weight = next((array for name, array in tensors.items() if name.endswith("weight")), None)
    if weight is None:
        raise CheckpointError(
            f"{dense.folder / 'model.safetensors'}: expected a tensor linear.weight, got {list(tensors)}"
        )
    bias = next((array for name, array in tensors.items() if name.endswith("bias")), None)
    return jnp.asarray(weight, jnp.float32), None if bias is None else jnp.asarray(bias, jnp.float32)


def _activations(rule: EmbeddingRule) -> tuple[str | None, ...]:
    return tuple(dense.activation for dense in rule.dense)


_FUNCTIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "sigmoid": jax.nn.sigmoid,
}


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
@torch_promotion()
def _finished(
    hidden: jax.Array,
    mask: jax.Array,
    layers: tuple[tuple[jax.Array, jax.Array | None], ...],
    pooling: tuple[str, ...],
    activations: tuple[str | None, ...],
    normalize: bool,
) -> jax.Array:
    """float32[rows, dim] of `hidden` [rows, len, width] and `mask` int32[rows, len]."""
    out = jnp.concatenate([pooled(hidden.astype(jnp.float32), mask, name) for name in pooling], -1)
    for (weight, bias), activation in zip(layers, activations, strict=True):
        out = jnp.dot(out, weight.T, precision="highest")
        out = _FUNCTIONS[activation](out if bias is None else out + bias)
    return out / jnp.maximum(jnp.linalg.norm(out, axis=-1, keepdims=True), 1e-12) if normalize else out


def pooled(hidden: jax.Array, mask: jax.Array, name: str) -> jax.Array:
    """One of `POOLINGS` over the real tokens: [rows, width] of `hidden` [rows, len, width], `mask` int32[rows, len]."""
    if name == "cls":
        return hidden[:, 0]
    if name == "last":
        return jnp.take_along_axis(hidden, (mask.sum(1) - 1)[:, None, None], 1)[:, 0]
    real = mask[..., None].astype(hidden.dtype)
    if name == "max":
        return jnp.where(real > 0, hidden, -jnp.inf).max(1)
    if name == "weighted_mean":
        real = real * jnp.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[None, :, None]
    total, count = (jnp.where(real > 0, hidden, 0) * real).sum(1), real.sum(1)
    return total / (jnp.sqrt(count) if name == "mean_sqrt_len" else count)
