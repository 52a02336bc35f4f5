"""What is asked of a sound: samples of one channel, as numbers, at the rate that the model hears."""

from __future__ import annotations

from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError

MOST_SAMPLES = 1 << 28
"""Of one sound, four and a half hours at 16 kHz: a gigabyte of samples, and as much again of features."""


def checked_samples(sound: Any, name: str) -> np.ndarray:
    """`sound` as float32[num_samples].

    Args:
        sound: what a caller gave.
        name: of the argument, for the error.

    Raises:
        InvalidArgumentError: no array, no samples or too many, more than one channel, values that are no numbers.
    """
    if not isinstance(sound, np.ndarray):
        raise InvalidArgumentError(f"{name}: expected a numpy array of samples, got {type(sound).__name__}")
    if sound.ndim != 1:
        raise InvalidArgumentError(
            f"{name}: expected one channel, float[num_samples], got shape {list(sound.shape)}; take the mean of the "
            "channels"
        )
    if sound.size == 0:
        raise InvalidArgumentError(f"{name}: expected samples, got none; leave out sounds of zero length")
    if sound.size > MOST_SAMPLES:
        raise InvalidArgumentError(
            f"{name}: expected at most {MOST_SAMPLES:,} samples, got {sound.size:,}; cut the sound into pieces"
        )
    if not np.issubdtype(sound.dtype, np.floating) or not np.isfinite(sound).all():
        raise InvalidArgumentError(
            f"{name}: expected floating-point samples from -1 to 1, got {sound.dtype}"
            + ("" if not np.issubdtype(sound.dtype, np.floating) else " with values that are no numbers")
            + "; divide integers by the largest one"
        )
    return sound.astype(np.float32)


def check_rate(wanted: int | None, got: Any) -> None:
    """Raises InvalidArgumentError for another sampling rate than the model's; None: it does not say."""
    if wanted is not None and got != wanted:
        raise InvalidArgumentError(
            f"sampling_rate: expected {wanted} samples per second, which this model hears, got {got!r}; "
            "resample the audio first"
        )
