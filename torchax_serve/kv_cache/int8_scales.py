"""Scales of keys and values in int8, by layer and head; checks for kernels.

A scale is fixed before the first request, so that what a token's keys and values become depends on nothing but the
token and what came before it. It is found as static activation scales are (Jacob et al., 2018, section 3.1): a prompt
is computed, the largest numbers are taken, and what is larger later is clipped. Tokens are drawn at random, since
no text of users is available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.kv_pool import INT8_LARGEST
from model_adapters.program.model_program import CallSpec
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.kv_cache.pools import HeadScales
from torchax_serve.runtime.model_runtime import ModelRuntime

TRIAL_ROWS, TRIAL_LEN = 4, 64
HEADROOM = 1.25
"""By how much the largest number may grow before it is clipped. A quarter costs a third of a bit."""


def calibrate_int8_scales(runtime: ModelRuntime) -> tuple[HeadScales, ...]:
    """Computes the scales of keys and of values, float32[num_heads] each, for every layer.

    They depend on the model only, not on options.

    Args:
        runtime: Model of which every layer stores keys and values.

    Raises:
        InvalidArgumentError: the calibration prompt has keys or values that are not finite.
    """
    length = min(TRIAL_LEN, runtime.limits.learned_positions or TRIAL_LEN)

    def largest(weights: Weights, ids: jax.Array, spec: None) -> Any:
        inputs = {runtime.program.names.ids: ids}
        states = runtime.cache_support.new(length).states
        _, after = runtime.program.forward(weights, states, jnp.int32(0), inputs, CallSpec())
        assert after is not None
        return [largest_by_head(layer.pool, layer.k_dim) for layer in after]

    return scales_of_trial(runtime, largest, length)


def scales_of_trial(runtime: ModelRuntime, largest: Callable[..., Any], length: int) -> tuple[HeadScales, ...]:
    """Computes scales from the largest magnitudes in prompts of random tokens.

    Args:
        runtime: The model.
        largest: Function of weights and ids int32[TRIAL_ROWS, length]; returns `largest_by_head` of each layer.
        length: Number of tokens of a prompt.
    """
    facts = runtime.program
    kept = CachedFunction(
        runtime.steps.executables, "int8_trial", largest, facts=facts.trace_facts, recall=facts.restore_facts
    )
    ids = np.random.default_rng(0).integers(0, runtime.limits.vocab_size, (TRIAL_ROWS, length))
    found = kept(runtime.weights, to_device(ids, np.int32), spec=None)
    return tuple((scale_of(keys), scale_of(values)) for keys, values in found)


def largest_by_head(pool: jax.Array, k_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest magnitudes float32[heads] of keys and of values of a dense pool."""
    by_head = jnp.abs(pool.astype(jnp.float32)).max(axis=(0, 2))
    keys, values = by_head[:, :k_dim], by_head[:, k_dim:]
    return keys.max(axis=1), values.max(axis=1, initial=0.0)


def scale_of(largest: jax.Array) -> np.ndarray:
    """Returns the scales float32[heads] for the largest magnitudes of a trial, float32[heads].

    Raises:
        InvalidArgumentError: they are not finite.
    """
    numbers = np.asarray(largest, np.float32)
    if not np.isfinite(numbers).all():
        raise InvalidArgumentError(
            "kv_cache_dtype: expected keys and values that are numbers for a trial prompt, got some that are not; "
            "leave it out"
        )
    return np.where(numbers > 0, numbers * np.float32(HEADROOM / INT8_LARGEST), np.float32(1))


def check_int8_kernels(float_fallbacks: Sequence[str], int8_fallbacks: Sequence[str]) -> None:
    """Refuses int8 where kernels take the model's own dtype and not this one.

    Args:
        float_fallbacks: why the kernels refuse the calls of a packed step in the model's dtype, if they do.
        int8_fallbacks: the same on pages in int8.

    Raises:
        InvalidArgumentError: with the kernels' reason.
    """
    if int8_fallbacks and not float_fallbacks:
        raise InvalidArgumentError(
            f"kv_cache_dtype: expected None or other pages, got 'int8', which no kernel here takes so "
            f"({'; '.join(dict.fromkeys(int8_fallbacks))}); change page_size, or leave it out"
        )
