"""Scales of keys and values in 8 bits, by layer and head; which chips and kernels take them.

A scale is fixed before the first request, so that what a token's keys and values become depends on nothing but the
token and what came before it. It is found as static activation scales are (Jacob et al., 2018, section 3.1): a prompt
is computed, the largest numbers are taken, and what is larger later is clipped. Tokens are drawn at random, since
no text of users is available.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from model_adapters.caches.layers import AttentionLayer
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.kv_pool import LARGEST
from model_adapters.program.model_program import CallSpec
from model_adapters.quantization.device_layout import multiplies_fp8
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.kv_cache.pools import HeadScales
from torchax_serve.runtime.model_runtime import ModelRuntime

PAGES_IN_8_BITS: dict[str, np.dtype] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
"""Dtype of pages by the option `kv_cache_dtype`."""
FIRST_CAPABILITY_WITH_FP8 = (8, 9)
"""Compute capability of the first GPUs that convert float8 (Ada, Hopper)."""
TRIAL_ROWS, TRIAL_LEN = 4, 64
HEADROOM = 1.25
"""By how much the largest number may grow before it is clipped. A quarter costs a third of a bit."""


def dtype_of(name: str) -> np.dtype:
    """Returns the dtype of pages for a value of the option `kv_cache_dtype`.

    Raises:
        InvalidArgumentError: the chip has no float8.
    """
    if name == "fp8" and not _has_fp8():
        device = jax.local_devices()[0].device_kind
        raise InvalidArgumentError(
            f"kv_cache_dtype: expected 'int8' or None on {device}, which has no float8, got 'fp8'; use 'int8'"
        )
    return PAGES_IN_8_BITS[name]


def _has_fp8() -> bool:
    """Returns whether the chip converts float8; on a CPU the kernels do."""
    if registry.platform() == "cpu":
        return True
    if registry.platform() == "tpu":
        return multiplies_fp8()
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")
    return len(capability) < 2 or tuple(map(int, capability[:2])) >= FIRST_CAPABILITY_WITH_FP8


def calibrate_scales(runtime: ModelRuntime, dtype: np.dtype) -> tuple[HeadScales, ...]:
    """Computes scales of keys and values, float32[num_heads] each, of each layer that attends.

    They depend on the model only, not on options.

    Args:
        runtime: Model of which layers store keys and values.
        dtype: Dtype of the pages.

    Raises:
        InvalidArgumentError: the calibration prompt has keys or values that are not finite.
    """
    return scales_of_trial(runtime, packed_trial(runtime), _trial_len(runtime), dtype)


def packed_trial(runtime: ModelRuntime) -> CachedFunction:
    """Returns the function that `calibrate_scales` runs, for the other hosts of a model."""
    return trial_of(runtime, "int8_trial", _largest_of_packed(runtime, _trial_len(runtime)))


def _trial_len(runtime: ModelRuntime) -> int:
    return min(TRIAL_LEN, runtime.limits.learned_positions or TRIAL_LEN)


def _largest_of_packed(runtime: ModelRuntime, length: int) -> Callable[..., Any]:
    """Returns the function of weights and ids that computes each layer's `largest_by_head`."""

    def largest(weights: Weights, ids: jax.Array, spec: None) -> Any:
        inputs = {runtime.program.names.ids: ids}
        states = runtime.cache_support.new(length).states
        _, after = runtime.program.forward(weights, states, jnp.int32(0), inputs, CallSpec())
        assert after is not None
        attending = (layer for layer in after if isinstance(layer, AttentionLayer) and layer.pool is not None)
        return [_largest_of_layer(layer) for layer in attending]

    return largest


def _largest_of_layer(layer: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `largest_by_head` of a layer, as the packed executor stores its keys and values."""
    keys, values = largest_by_head(layer.pool, layer.k_dim)
    if layer.keeps_latents:  # which are stored once, as keys: these are latent and rotated part
        keys = values = jnp.maximum(keys, values)
    return keys, values


def scales_of_trial(
    runtime: ModelRuntime, trial: CachedFunction, length: int, dtype: np.dtype, source: tuple[Any, ...] = ()
) -> tuple[HeadScales, ...]:
    """Computes scales from the largest magnitudes in prompts of random tokens.

    Args:
        runtime: The model.
        trial: Result of `trial_of`.
        length: Number of tokens of a prompt.
        dtype: Dtype of the pages.
        source: Further arguments of `trial`: an encoder's output and its length.
    """
    ids = np.random.default_rng(0).integers(0, runtime.limits.vocab_size, (TRIAL_ROWS, length))
    (found,) = trial(runtime.weights, to_device(ids, np.int32), *source, spec=None)
    return tuple((scale_of(keys, dtype), scale_of(values, dtype)) for keys, values in found)


def trial_of(runtime: ModelRuntime, name: str, largest: Callable[..., Any]) -> CachedFunction:
    """Returns `largest` as a program whose one result all hosts have.

    Args:
        runtime: The model.
        name: Name of the program, by which other hosts find it.
        largest: Function of weights, ids int32[TRIAL_ROWS, length] and an encoder's output and its length, if there is
            one; returns `largest_by_head` of each layer.
    """

    @functools.wraps(largest)
    def only(*args: Any, spec: None) -> tuple[Any]:
        return (largest(*args, spec=spec),)

    facts = runtime.program
    return CachedFunction(
        runtime.steps.executables, name, only, facts=facts.trace_facts, restore_facts=facts.restore_facts
    )


def largest_by_head(pool: jax.Array, k_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest magnitudes float32[heads] of keys and of values of a dense pool."""
    by_head = jnp.abs(pool.astype(jnp.float32)).max(axis=(0, 2))
    keys, values = by_head[:, :k_dim], by_head[:, k_dim:]
    return keys.max(axis=1), values.max(axis=1, initial=0.0)


def scale_of(largest: jax.Array, dtype: np.dtype) -> np.ndarray:
    """Returns scales float32[heads] of pages in `dtype` for a trial's largest magnitudes.

    Raises:
        InvalidArgumentError: they are not finite.
    """
    numbers = np.asarray(largest, np.float32)
    if not np.isfinite(numbers).all():
        raise InvalidArgumentError(
            "kv_cache_dtype: expected keys and values that are numbers for a trial prompt, got some that are not; "
            "leave it out"
        )
    return np.where(numbers > 0, numbers * np.float32(HEADROOM / LARGEST[str(dtype)]), np.float32(1))


def check_kernels(name: str, own_fallbacks: Sequence[str], fallbacks: Sequence[str]) -> None:
    """Refuses pages in 8 bits where kernels take the model's own dtype and not this one.

    Args:
        name: Value of the option.
        own_fallbacks: why the kernels refuse the calls of a packed step in the model's dtype, if they do.
        fallbacks: the same on pages in 8 bits.

    Raises:
        InvalidArgumentError: with the kernels' reason.
    """
    if fallbacks and not own_fallbacks:
        raise InvalidArgumentError(
            f"kv_cache_dtype: expected None or other pages, got {name!r}, which no kernel here takes so "
            f"({'; '.join(dict.fromkeys(fallbacks))}); change page_size, or leave it out"
        )
