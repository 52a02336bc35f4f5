"""Samples of wav, flac, ogg and mp3 by libsndfile, bounded in seconds before decoding."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from torchax_serve.server import require_packages
from torchax_serve.server.errors import bad_request

MIN_RATE, MAX_RATE = 1000, 384_000
"""Sampling rates that are taken, in Hz."""
MAX_CHANNELS = 16
_BLOCK_FRAMES = 1 << 16
DEFAULT_MAX_S = 1800.0
"""Longest audio where nothing else is said, in seconds."""


def decode_audio(data: bytes, max_s: float = DEFAULT_MAX_S, where: str = "file") -> tuple[np.ndarray, int]:
    """Returns the samples of an audio file, float32[num_samples], and their rate in Hz.

    They have one channel.

    Channels are averaged. No more than `max_s` seconds are ever decoded, whatever the file's header says. Errors name
    the field `where` of the request.

    Raises:
        ApiError: 400 for a file that is no audio, has no samples, or is too long.
    """
    require_packages("soundfile")
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _samples(file, max_s, where), int(file.samplerate)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise bad_request(
            f"{where}: expected audio as wav, flac, ogg or mp3, got something else", where, "invalid_value"
        ) from error


def _samples(file: Any, max_s: float, where: str) -> np.ndarray:
    if not MIN_RATE <= file.samplerate <= MAX_RATE or file.channels > MAX_CHANNELS:
        raise bad_request(
            f"{where}: expected a rate of {MIN_RATE} to {MAX_RATE} Hz and at most {MAX_CHANNELS} channels, got "
            f"{file.samplerate} Hz and {file.channels}",
            where,
            "invalid_value",
        )
    most = int(max_s * file.samplerate)
    if file.frames > most and file.frames < 2**62:  # an unknown length is that of the blocks
        raise _too_long(max_s, where)
    blocks, num_frames = [], 0
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        num_frames += len(block)
        if num_frames > most:
            raise _too_long(max_s, where)
        blocks.append(block.mean(axis=1, dtype=np.float32))
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    if not len(samples) or not np.isfinite(samples).all():
        raise bad_request(
            f"{where}: expected samples that are finite numbers, got others or none", where, "invalid_value"
        )
    return samples


def _too_long(max_s: float, where: str) -> Exception:
    return bad_request(f"{where}: expected audio of at most {max_s:g} s, got more; cut it", where, "invalid_value")
