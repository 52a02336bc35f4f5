"""Checks of audio inputs: one channel, finite floats, the model's sampling rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError

MOST_SAMPLES = 1 << 28
"""Most samples of one audio input: 4.5 hours at 16 kHz. They take 1 GiB as float32, and the features as much again."""
MOST_AMPLITUDE = 1 << 15
"""Largest sample, of 16 bits as floats; models compute no numbers of far larger ones."""


def checked_samples(audio: Any, name: str) -> np.ndarray:
    """Checks audio and returns it as float32[num_samples].

    Args:
        audio: the caller's value.
        name: name of the argument, for errors.

    Raises:
        InvalidArgumentError: no numpy array, no samples or too many, more than one channel, nan or infinite values.
    """
    if not isinstance(audio, np.ndarray):
        raise InvalidArgumentError(f"{name}: expected a numpy array of samples, got {type(audio).__name__}")
    if audio.ndim != 1:
        raise InvalidArgumentError(
            f"{name}: expected one channel, float[num_samples], got shape {list(audio.shape)}; take the mean of the "
            "channels"
        )
    if audio.size == 0:
        raise InvalidArgumentError(f"{name}: expected samples, got none; leave out audio of zero length")
    if audio.size > MOST_SAMPLES:
        raise InvalidArgumentError(
            f"{name}: expected at most {MOST_SAMPLES:,} samples, got {audio.size:,}; cut the audio into pieces"
        )
    if not np.issubdtype(audio.dtype, np.floating) or not np.isfinite(audio).all():
        raise InvalidArgumentError(
            f"{name}: expected floating-point samples from -1 to 1, got {audio.dtype}"
            + ("" if not np.issubdtype(audio.dtype, np.floating) else " with values that are no numbers")
            + "; divide integers by the largest one"
        )
    if (largest := float(np.abs(audio).max())) > MOST_AMPLITUDE:
        raise InvalidArgumentError(
            f"{name}: expected samples from -1 to 1, got {largest:.1e} among them; divide by the largest one"
        )
    return audio.astype(np.float32)


def check_rate(wanted: int | None, got: Any) -> None:
    """Raises InvalidArgumentError unless `got` is the model's sampling rate `wanted` (Hz).

    None allows any rate.
    """
    if wanted is not None and got != wanted:
        raise InvalidArgumentError(
            f"sampling_rate: expected {wanted} samples per second, the rate of this model, got {got!r}; "
            "resample the audio first"
        )


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Returns float32 samples at another rate, by a polyphase filter (scipy)."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // divisor, rate // divisor), np.float32)
