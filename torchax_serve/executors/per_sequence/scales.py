"""Scales of keys and values in 8 bits for per-sequence models, and who cannot have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.buckets import bucket_for
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.executors.encoder_inputs import EncoderInputs
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.kv_cache.cache_layout import CacheLayout
from torchax_serve.kv_cache.pools import HeadScales
from torchax_serve.kv_cache.scales import TRIAL_LEN, largest_by_head, scales_of_trial, trial_of
from torchax_serve.runtime.model_runtime import ModelRuntime

TRIAL = "sequence_int8_trial"
"""Name of the program that computes a trial prompt, by which other hosts find it."""


def check_layout(name: str, layout: CacheLayout) -> None:
    """Raises InvalidArgumentError for a model whose cache cannot be in 8 bits.

    `name` is the option's value.
    """
    if not layout.pages:
        raise InvalidArgumentError(
            "kv_cache_dtype: expected None for a model that stores states in place of keys and values, got "
            f"{name!r}; leave it out"
        )


def calibrate_by_sequence(
    runtime: ModelRuntime,
    forward: SequenceForward,
    layout: CacheLayout,
    block_len: int,
    dtype: np.dtype,
    sources: EncoderInputs | None = None,
) -> tuple[HeadScales, ...]:
    """Computes the scales of keys and values, float32[num_heads] each, for leaves in pages.

    As `calibrate_scales` does, with the model's forward of one request. With an encoder all prompts are behind the
    output of its probe input.

    Args:
        runtime: The model.
        forward: Its forward of one request.
        layout: What a request stores.
        block_len: Maximum number of tokens of one forward.
        dtype: Dtype of the pages.
        sources: Encoder inputs by slot; None for a model without an encoder.

    Raises:
        InvalidArgumentError: the calibration prompt has keys or values that are not finite.
    """
    source: tuple[Any, ...] = ()
    if sources is not None:
        sources.assign(0, sources.probe_input)
        source_len = sources.length(0)
        source = (sources.encoder_output([0], bucket_for(sources.buckets, source_len)), jnp.int32(source_len))
    trial = sequence_trial(runtime, forward, layout, block_len)
    return scales_of_trial(runtime, trial, _trial_len(runtime), dtype, source)


def sequence_trial(
    runtime: ModelRuntime, forward: SequenceForward, layout: CacheLayout, block_len: int
) -> CachedFunction:
    """Returns the function that `calibrate_by_sequence` runs, for the other hosts of a model."""
    return trial_of(runtime, TRIAL, _largest_by_sequence(forward, layout, block_len, _trial_len(runtime)))


def _trial_len(runtime: ModelRuntime) -> int:
    most = min(TRIAL_LEN, runtime.limits.learned_positions or TRIAL_LEN)
    return 1 << most.bit_length() - 1  # blocks of tokens are powers of two


def _largest_by_sequence(
    forward: SequenceForward, layout: CacheLayout, block_len: int, length: int
) -> Callable[..., Any]:
    """Returns a function of weights and ids: `largest_by_head` of each leaf in pages."""

    def largest(weights: Weights, ids: jax.Array, *source: Any, spec: None) -> Any:
        def of_row(row: jax.Array) -> Any:
            _, news = forward.prefill(weights, row, length, layout, *source, block_len=block_len)
            pages, _ = layout.partition(news)
            return [
                largest_by_head(jnp.swapaxes(new, 0, 1)[None], leaf.k_dim)
                for new, leaf in zip(pages, layout.pages, strict=True)
            ]

        return jax.tree.map(lambda found: found.max(axis=0), jax.lax.map(of_row, ids))

    return largest
