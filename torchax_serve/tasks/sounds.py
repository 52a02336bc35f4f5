"""Sound that callers give, files or samples, as samples at the model's rate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError
from torchax_serve.multimodal.audio import MOST_SAMPLES, check_rate, checked_samples, resampled
from torchax_serve.validation.extras import require_package

SoundLike = str | os.PathLike[str] | np.ndarray
"""A path, or samples float[num_samples] of one channel."""


def is_single_sound(audio: Any) -> bool:
    """Returns whether a caller's value is one sound, rather than a list of them."""
    return not isinstance(audio, list | tuple)


def sounds_of(audio: SoundLike | Sequence[SoundLike], sampling_rate: int | None, wanted: int) -> list[np.ndarray]:
    """Returns the caller's sounds, each float32[num_samples], at the model's rate.

    Files may have any rate and number of channels: the mean of the channels is resampled.

    Args:
        audio: Of the caller.
        sampling_rate: Rate of arrays (Hz); None: all are files.
        wanted: The model's rate (Hz).

    Raises:
        InvalidArgumentError: none, no sound, not finite numbers, or arrays of another or an unknown rate.
    """
    given: Sequence[Any] = [audio] if is_single_sound(audio) else audio  # type: ignore[assignment]
    if not given:
        raise InvalidArgumentError("audio: expected at least one file or array, got none")
    found = []
    for index, each in enumerate(given):
        where = "audio" if is_single_sound(audio) else f"audio[{index}]"
        if isinstance(each, str | os.PathLike):
            samples, rate = read_sound(Path(each).expanduser(), where)
            found.append(resampled(checked_samples(samples, where), rate, wanted))
            continue
        samples = checked_samples(each, where)
        if sampling_rate is None:
            raise InvalidArgumentError(
                f"sampling_rate: expected the rate of an array, which the model needs at {wanted} samples per second, "
                "got none; give sampling_rate"
            )
        check_rate(wanted, sampling_rate)
        found.append(samples)
    return found


def read_sound(path: Path, where: str) -> tuple[np.ndarray, int]:
    """Returns the samples of a file, float32[num_samples], and their rate (Hz).

    Channels are averaged.

    Raises:
        InvalidArgumentError: no file, one that libsndfile does not read, or one that is too long.
    """
    require_package("soundfile", "audio", package="soundfile")
    import soundfile

    if not path.is_file():
        raise InvalidArgumentError(f"{where}: expected a file that is there, got {path}; correct the path")
    try:
        with soundfile.SoundFile(path) as file:
            if file.frames * file.channels > MOST_SAMPLES:
                raise InvalidArgumentError(
                    f"{where}: expected at most {MOST_SAMPLES:,} samples, got {file.frames:,} of {file.channels} "
                    "channels; cut the audio into pieces"
                )
            samples = file.read(dtype="float32", always_2d=True)
            return samples.mean(axis=1, dtype=np.float32), int(file.samplerate)
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"{where}: expected audio as wav, flac, ogg or mp3, got {path}, which is something else or damaged"
        ) from error
