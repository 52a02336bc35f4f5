"""Layers from hidden states to embeddings, on the device: pooling, dense layers, norms.

They follow sentence-transformers (Reimers and Gurevych, 2019). Layers in front of the pooling run on each token, layers
after it on the pooled vector.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from torchax_serve.pooling.methods import POOLINGS

Weights = tuple[Mapping[str, jax.Array], ...]
"""Weights of each layer by name, in the order of the layers; empty for a layer without weights."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "ReLU6": jax.nn.relu6,
    "GELU": functools.partial(jax.nn.gelu, approximate=False),
    "SiLU": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
    "LogSigmoid": jax.nn.log_sigmoid,
    "LeakyReLU": functools.partial(jax.nn.leaky_relu, negative_slope=0.01),
    "ELU": jax.nn.elu,
    "CELU": jax.nn.celu,
    "SELU": jax.nn.selu,
    "Mish": jax.nn.mish,
    "Softplus": jax.nn.softplus,
    "Softsign": jax.nn.soft_sign,
    "Hardtanh": jax.nn.hard_tanh,
    "Hardswish": jax.nn.hard_swish,
}
"""Activations by the name of their ``torch.nn`` class, with its default arguments."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer; hashable, since it is a static argument of the program.

    Attributes:
        kind: Kind of the layer.
        poolings: Poolings of a "pooling" layer, whose results are concatenated in this order; "max" or "sum" of a
            "splade" layer.
        reads_prompt: Whether a "pooling" layer counts the tokens of the prompt.
        activation: Activation of a "dense" layer, one of `ACTIVATIONS`; "relu" or "log1p_relu" of a "splade" layer.
        has_residual: Whether a "dense" layer adds its input to its output.
    """

    kind: Literal["pooling", "splade", "dense", "layer_norm", "normalize"]
    poolings: tuple[str, ...] = ()
    reads_prompt: bool = True
    activation: str = "Identity"
    has_residual: bool = False


ANY_POOLING = Layer("pooling")
"""Layer whose pooling each request chooses (`PoolingOptions.pooling`)."""


class PoolingOptions(NamedTuple):
    """Options of a request; arrays, so that no request compiles a program.

    Attributes:
        pooling: int32[], index of the pooling of `ANY_POOLING` in `POOLINGS`.
        num_values: int32[], number of leading values that are not zero.
        keeps_norms: bool[], whether the checkpoint's layers that normalize do so.
        normalize: bool[], whether embeddings are scaled to length 1 at the end.
    """

    pooling: Any
    num_values: Any
    keeps_norms: Any
    normalize: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Which text each of N tokens belongs to.

    Attributes:
        rows: int32[N], ascending but for padding; `num_rows`: none.
        places: int32[N], place of each token in its text.
        num_rows: Number of texts, those of padding among them.
    """

    rows: Any
    places: Any
    num_rows: int = dataclasses.field(metadata={"static": True})


def embeddings(
    layers: tuple[Layer, ...],
    weights: Weights,
    hidden: jax.Array,
    tokens: TokenRows,
    prompt_lens: jax.Array,
    options: PoolingOptions,
) -> jax.Array:
    """Returns embeddings float32[num_rows, dim]; of a model that does not pool float32[N, dim].

    Args:
        layers: the layers, of which one pools.
        weights: weights of the layers.
        hidden: [..., width], hidden states of N tokens; logits for a "splade" layer.
        tokens: of which texts they are.
        prompt_lens: int32[num_rows], number of prompt tokens at the start of each text.
        options: of the request.
    """
    out = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
    for layer, tensors in zip(layers, weights, strict=True):
        if layer.kind == "pooling":
            counted = tokens if layer.reads_prompt else _without_prompts(tokens, prompt_lens)
            if layer == ANY_POOLING:
                methods = [functools.partial(pooled, name=name) for name in POOLINGS]
                out = jax.lax.switch(options.pooling, methods, out, counted)
            else:
                out = jnp.concatenate([pooled(out, counted, name) for name in layer.poolings], -1)
        elif layer.kind == "splade":
            out = _splade(layer, out, tokens)
        elif layer.kind == "dense":
            out = _dense(layer, tensors, out)
        elif layer.kind == "layer_norm":
            centred = out - out.mean(-1, keepdims=True)
            spread = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            out = centred * spread * tensors["norm.weight"] + tensors["norm.bias"]
        else:
            out = jnp.where(options.keeps_norms, _unit(out), out)
    out = jnp.where(jnp.arange(out.shape[-1]) < options.num_values, out, 0)
    return jnp.where(options.normalize, _unit(out), out)


def _without_prompts(tokens: TokenRows, prompt_lens: jax.Array) -> TokenRows:
    lens = jnp.append(prompt_lens, 0)[tokens.rows]
    return dataclasses.replace(tokens, rows=jnp.where(tokens.places >= lens, tokens.rows, tokens.num_rows))


def pooled(hidden: jax.Array, tokens: TokenRows, name: str) -> jax.Array:
    """Returns one pooling [num_rows, width] of `hidden` [N, width].

    Texts without tokens give zeros.
    """
    rows, number = tokens.rows, tokens.num_rows + 1  # the last takes what counts nowhere

    def total(x: jax.Array) -> jax.Array:
        # Not a product with ones and zeros, through which NaN of one text would reach the others.
        return jax.ops.segment_sum(x, rows, number)[:-1]

    if name in ("cls", "last"):
        index = jnp.arange(len(rows), dtype=jnp.int32)
        at = jax.ops.segment_min(index, rows, number) if name == "cls" else jax.ops.segment_max(index, rows, number)
        found = jnp.take(hidden, at[:-1], axis=0, mode="clip")
        return jnp.where((total(jnp.ones_like(index)) > 0)[:, None], found, 0)
    if name == "max":
        return jax.ops.segment_max(hidden, rows, number)[:-1]
    share = (tokens.places + 1 if name == "weighted_mean" else jnp.ones_like(rows)).astype(hidden.dtype)
    count = jnp.maximum(total(share), 1e-9)[:, None]
    return total(hidden * share[:, None]) / (jnp.sqrt(count) if name == "mean_sqrt_len" else count)


def _splade(layer: Layer, logits: jax.Array, tokens: TokenRows) -> jax.Array:
    """Returns weights of the vocabulary [num_rows, vocab_size] by SPLADE (Formal et al., 2021)."""
    weights = jnp.log1p(jax.nn.relu(logits))
    weights = jnp.log1p(weights) if layer.activation == "log1p_relu" else weights
    pool = jax.ops.segment_max if layer.poolings == ("max",) else jax.ops.segment_sum
    return jnp.maximum(pool(weights, tokens.rows, tokens.num_rows + 1)[:-1], 0)  # the smallest weight is 0


def _dense(layer: Layer, tensors: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    out = jnp.dot(x, tensors["linear.weight"].T, precision="highest")
    if "linear.bias" in tensors:
        out = out + tensors["linear.bias"]
    out = ACTIVATIONS[layer.activation](out)
    if not layer.has_residual:
        return out
    residual: Any = tensors.get("residual.weight")
    return out + (x if residual is None else jnp.dot(x, residual.T, precision="highest"))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
