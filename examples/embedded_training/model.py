"""The shape of the embedded model, and its loss as a pure function through the bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, PreTrainedTokenizerFast

from embedded_training.packing import Batch
from embedded_training.tokenizer import END_OF_TURN
from model_adapters.bridge.extract import extract_jax

Params = dict[str, jax.Array]
Loss = Callable[[Params, Batch], jax.Array]
_LEARNED_EMBEDDING, _TIED_EMBEDDING = "model.embed_tokens.weight", "lm_head.weight"


def embedded_config(tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Gemma3TextConfig:
    """Gemma 3's architecture at about 2.3 million parameters; `overrides` make it smaller for tests."""
    shape: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 64,
        "max_position_embeddings": 1024,
    } | overrides
    every_third_sees_all = ["sliding_attention", "sliding_attention", "full_attention"] * shape["num_hidden_layers"]
    return Gemma3TextConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        dtype="float32",
        **({"layer_types": every_third_sees_all[: shape["num_hidden_layers"]]} | shape),
    )


def fresh_model(config: Gemma3TextConfig, seed: int) -> Gemma3ForCausalLM:
    """A model with random weights of `seed`."""
    torch.manual_seed(seed)
    return Gemma3ForCausalLM(config).eval()


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Greedy; an answer ends with the turn."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=64,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)],
    )


def params_and_loss(model: Gemma3ForCausalLM) -> tuple[Params, Loss]:
    """Returns the trainable arrays of `model` and ``loss(params, batch)``, float32, pure.

    The bridge gives tied weights under both names and buffers beside parameters: one copy of the embedding is
    trained and put back under its second name; buffers are constants.
    """
    weights, forward = extract_jax(model)
    trainable = {name for name, _ in model.named_parameters()}
    if _LEARNED_EMBEDDING not in trainable or weights[_LEARNED_EMBEDDING] is not weights[_TIED_EMBEDDING]:
        raise ValueError("expected a model with tied embeddings; set tie_word_embeddings=True in its config")
    # copied, for the training step donates them while torch still owns the memory of the originals
    params = {name: jnp.array(array, copy=True) for name, array in weights.items() if name in trainable}
    buffers = {n: jnp.array(a) for n, a in weights.items() if n not in trainable and n != _TIED_EMBEDDING}
    window = model.config.sliding_window
    if window is None:
        raise ValueError("expected a model with a sliding window; set sliding_window in its config")

    def loss(params: Params, batch: Batch) -> jax.Array:
        full, sliding = _masks(batch, window)
        weights = {**buffers, **params, _TIED_EMBEDDING: params[_LEARNED_EMBEDDING]}
        logits = forward(
            weights,
            (),
            {
                "input_ids": batch.tokens,
                "position_ids": batch.position,
                "attention_mask": {"full_attention": full, "sliding_attention": sliding},
                "use_cache": False,
                "return_dict": False,
            },
        )[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch.tokens[:, 1:])
        learned = batch.learned[:, 1:]
        return jnp.sum(losses * learned) / jnp.maximum(jnp.sum(learned), 1)

    return params, loss


def _masks(batch: Batch, window: int) -> tuple[jax.Array, jax.Array]:
    """Additive masks ``float32[num_rows, 1, row_len, row_len]``: the past of the own segment, all of it or a window."""
    index = jnp.arange(batch.tokens.shape[1])
    behind = index[:, None] - index[None, :]
    same = batch.segment[:, :, None] == batch.segment[:, None, :]
    full = same & (behind >= 0)
    sliding = full & (behind < window)
    lowest = jnp.finfo(jnp.float32).min
    full_mask, sliding_mask = (jnp.where(seen, 0.0, lowest).astype(jnp.float32)[:, None] for seen in (full, sliding))
    return full_mask, sliding_mask


def load_params(model: Gemma3ForCausalLM, params: Mapping[str, jax.Array]) -> None:
    """Puts trained arrays into `model` in place."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.from_numpy(jax.device_get(params[name]).copy()))
