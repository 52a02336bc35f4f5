"""The operators of this project as torch operators, ``torch.ops.torchax_serve.*``.

They are lowered to the JAX ops of `model_adapters.ops`. They have no eager implementation: unmodified model code
reaches them while it is traced, through transformers' attention interface.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters import ops
from model_adapters.bridge.views import set_lowering
from model_adapters.errors import InvalidArgumentError
from model_adapters.once import once
from model_adapters.ops.attention_args import AttentionArgs, DistanceBiases, KVScales

_FEATURES = (
    "*, float scale, int? window=None, float? softcap=None, Tensor? alibi_slopes=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, int? value_begin=None, Tensor? distance_weights=None, Tensor? distance_profiles=None, "
    "Tensor? token_sinks=None"
)
_SCHEMAS = (
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor pool, Tensor page_table, Tensor kv_lens, "
    f"Tensor? sinks=None, {_FEATURES}) -> (Tensor, Tensor)",
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor pool, Tensor page_table, Tensor kv_lens, "
    f"Tensor cu_q_lens, Tensor? sinks=None, {_FEATURES}, Tensor? prefix_lens=None, Tensor? sees_until=None) -> "
    "(Tensor, Tensor)",
)


def _args_of(
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    prefix_lens: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sees_until: jax.Array | None = None,
    value_begin: int | None = None,
    distance_weights: jax.Array | None = None,
    distance_profiles: jax.Array | None = None,
    token_sinks: jax.Array | None = None,
) -> AttentionArgs:
    """Returns the flat arguments of the torch operators as `AttentionArgs`."""
    biases = None
    if distance_weights is not None and distance_profiles is not None:
        biases = DistanceBiases(distance_weights, distance_profiles)
    if (k_scale is None) != (v_scale is None):
        raise InvalidArgumentError("expected k_scale and v_scale, or neither; got one of them")
    kv_scales = None if k_scale is None or v_scale is None else KVScales(k_scale, v_scale)
    return AttentionArgs(
        scale,
        window,
        softcap,
        sinks,
        alibi_slopes,
        prefix_lens=prefix_lens,
        kv_scales=kv_scales,
        sees_until=sees_until,
        value_begin=value_begin,
        distance_biases=biases,
        token_sinks=token_sinks,
    )


def _decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *sinks: jax.Array | None,
    **features: Any,
) -> tuple[jax.Array, jax.Array]:
    args = _args_of(*sinks, **features)
    return ops.decode_attention(q, k, v, pool, page_table, kv_lens, jnp.zeros_like(kv_lens), args)


def _paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *sinks: jax.Array | None,
    **features: Any,
) -> tuple[jax.Array, jax.Array]:
    return ops.paged_attention(q, k, v, pool, page_table, kv_lens, cu_q_lens, _args_of(*sinks, **features))


@once
def install() -> torch.library.Library:
    """Defines the operators and their lowerings."""
    library = torch.library.Library("torchax_serve", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    set_lowering(torch.ops.torchax_serve.decode_attention.default, _decode_attention)
    set_lowering(torch.ops.torchax_serve.paged_attention.default, _paged_attention)
    return library
