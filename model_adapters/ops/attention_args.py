"""Arguments of the attention ops besides queries, keys, values and pages: `AttentionArgs`.

A new feature of attention is one optional field of `AttentionArgs` and the implementations that take it. Each
implementation names the fields that it takes in its ``SUPPORTED_ARGS``; a call with any other field is passed to
another implementation, at last to the reference, which takes them all. ``tests/ops/test_attention_args.py`` checks
every field against every registered implementation.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, fields

import jax
import jax.numpy as jnp

STATIC = {"static": True}
"""Metadata of a field that is part of the traced program rather than an input of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Scales of a pool in 8 bits, which holds ``x / scale`` rounded to int8 or float8_e4m3fn.

    Attributes:
        k: Scale of the keys of each kv head, ``float32[kv_heads]``.
        v: Scale of the values of each kv head, ``float32[kv_heads]``.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistanceBiases:
    """Biases of scores by distance, which each query mixes of a few profiles.

    Distances are those from a query back to a key. From 0 to E - 1, the bias is
    ``weights[t, h] @ profiles[:, distance]``; any other key has none.

    Attributes:
        weights: ``[T, query_heads, R]``, of the tokens of a step.
        profiles: ``[R, E]``.
    """

    weights: jax.Array
    profiles: jax.Array

    def of(self, distance: jax.Array) -> jax.Array:
        """Returns the biases ``float32[T, query_heads, S]`` of keys at ``distance int32[T, S]``."""
        exact, (weights, profiles) = jax.lax.Precision.HIGHEST, (self.weights, self.profiles)
        by_distance = jnp.einsum(
            "thr,re->the", weights.astype(jnp.float32), profiles.astype(jnp.float32), precision=exact
        )
        last = profiles.shape[1] - 1
        found = jnp.take_along_axis(by_distance, jnp.clip(distance, 0, last)[:, None], axis=2)
        return jnp.where(((distance >= 0) & (distance <= last))[:, None], found, 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionArgs:
    """Scale and features of an attention call; a feature that is not used is None.

    Attributes:
        scale: Factor of the products of queries and keys. Static: kernels are compiled with it.
        window: Number of last positions that a query sees, its own among them; None for all. Static: the number of
            splits depends on it.
        softcap: Scores ``s`` become ``softcap * tanh(s / softcap)``. Static: without it there is no tanh in the
            program.
        sinks: Logits ``[query_heads]`` that take part in the softmax and carry no value.
        alibi_slopes: Slopes ``float32[query_heads]``: ``slope * (key position - query position)`` is added to the
            scaled scores (Press et al., arXiv 2108.12409). Not together with `softcap`.
        prefix_lens: Length ``int32[num_seqs]`` of the beginning that all queries of a sequence see (prefix language
            models, images that are read in both directions).
        kv_scales: Scales of a pool in 8 bits (int8, float8_e4m3fn); given with such a pool and with no other.
        sees_until: Last position ``int32[T]`` that each query sees if that is behind its own: the last token of the
            image that it belongs to, where those see each other. A window counts from its own position.
        value_begin: Column of a key at which the values of its token begin, where they are columns of keys (latent
            attention); None: they stand behind the keys. Then rows of the pool are keys alone, the op reads no more of
            `v` than its shape, and the scales of keys are those of values. Static: it is an offset in the kernels.
        distance_biases: Added to the scaled scores. Not together with `softcap`.
        position_biases: Added to the scaled scores by the key's position, ``float32[T, query_heads, S]``; keys from S
            on have none. Masks and relative positions that a model's code has computed. Not together with `softcap`.
        token_sinks: As `sinks`, of each token of a step by itself, ``[T, query_heads]``. Not together with `sinks`.
    """

    scale: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    softcap: float | None = field(default=None, metadata=STATIC)
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    prefix_lens: jax.Array | None = None
    kv_scales: KVScales | None = None
    sees_until: jax.Array | None = None
    value_begin: int | None = field(default=None, metadata=STATIC)
    distance_biases: DistanceBiases | None = None
    position_biases: jax.Array | None = None
    token_sinks: jax.Array | None = None

    @property
    def k_scale(self) -> jax.Array | None:
        """Scale of the keys of each kv head, ``float32[kv_heads]``, of a pool in 8 bits."""
        return None if self.kv_scales is None else self.kv_scales.k

    @property
    def v_scale(self) -> jax.Array | None:
        """Scale of the values of each kv head, ``float32[kv_heads]``, of a pool in 8 bits."""
        return None if self.kv_scales is None else self.kv_scales.v

    def value_columns(self, dim: int, value_dim: int) -> slice:
        """Returns the columns of values in a row of the pool.

        Keys have `dim` numbers, values `value_dim`.
        """
        begin = dim if self.value_begin is None else self.value_begin
        return slice(begin, begin + value_dim)

    def written_values(self, v: jax.Array) -> jax.Array:
        """Returns what is written behind keys: ``v[..., H, Dv]``, or none of its columns."""
        return v if self.value_begin is None else v[..., :0]


def added_biases(scores: jax.Array, biases: jax.Array) -> jax.Array:
    """Returns scores with biases ``[T, query_heads, n]`` of the first n keys added.

    `scores` are ``[T, query_heads, S]``, or the same with its heads on several axes.
    """
    size = min(scores.shape[-1], biases.shape[2])
    biases = biases[..., :size].astype(scores.dtype)
    return scores.at[..., :size].add(biases.reshape(*scores.shape[:-1], size))


OPTIONAL_FIELDS = tuple(each.name for each in fields(AttentionArgs) if each.name != "scale")
"""Names of the features that a call may have or not."""


def last_seen(args: AttentionArgs, begin: jax.Array, end: jax.Array) -> jax.Array | None:
    """Returns the last position that tokens of ``[begin, end)`` see ahead, ``int32[n]``.

    `begin` and `end` are ``int32[n]``, tokens of n runs. -1 for a run of which no token does; None without
    `sees_until`. All tokens are compared with all runs: one reduction, where a scatter is a loop on accelerators.
    """
    if args.sees_until is None:
        return None
    token = jnp.arange(args.sees_until.shape[0], dtype=jnp.int32)
    inside = (token >= begin[:, None]) & (token < end[:, None])
    return jnp.max(jnp.where(inside, args.sees_until, -1), axis=1, initial=-1)


def unsupported_field(args: AttentionArgs, supported: Set[str]) -> str | None:
    """Returns the reason if `args` has a field that is not in `supported`, else None."""
    for name in OPTIONAL_FIELDS:
        if name not in supported and getattr(args, name) is not None:
            return f"{name} is not implemented"
    return None
