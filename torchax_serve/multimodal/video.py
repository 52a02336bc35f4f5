"""Videos in conversations: frames of one size as one array, and their rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError

MOST_PIXELS = 100_000_000
"""Most pixels of all frames of a video; they are converted to floats before they are resized, 12 bytes per pixel."""
FRAMES_PER_S = 2.0
"""Frames per second where nothing is said: that at which processors of transformers sample videos."""


def checked_frames(video: Any) -> np.ndarray:
    """Returns the frames of a video, uint8[num_frames, height, width, 3].

    Args:
        video: Such an array, or a list of PIL images of one size.

    Raises:
        InvalidArgumentError: it is neither, or it has no frames or too many pixels.
    """
    if isinstance(video, list | tuple):
        video = _stacked(video)
    if not isinstance(video, np.ndarray) or video.ndim != 4 or video.shape[3] != 3 or video.dtype != np.uint8:
        got = f"{video.dtype}{list(video.shape)}" if isinstance(video, np.ndarray) else type(video).__name__
        raise InvalidArgumentError(
            f"video: expected a list of PIL images or an array uint8[num_frames, height, width, 3], got {got}; decode "
            "the file first, and choose frames of it"
        )
    num_pixels = video.size // 3
    if not 1 <= num_pixels <= MOST_PIXELS:
        raise InvalidArgumentError(
            f"video: expected frames of 1 to {MOST_PIXELS:,} pixels together, got {num_pixels:,} in {len(video)} "
            "frames; choose fewer of them, or make them smaller"
        )
    return video


def _stacked(frames: Any) -> np.ndarray:
    """Returns images of one size as an array."""
    for frame in frames:
        if not hasattr(frame, "convert"):
            raise InvalidArgumentError(
                f"video: expected frames that are PIL images, got {type(frame).__name__}; open the files first"
            )
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        named = ", ".join(f"{width}x{height}" for width, height in sizes)
        raise InvalidArgumentError(f"video: expected frames of one size, got {named}; resize them")
    if not sizes:
        return np.zeros((0, 1, 1, 3), np.uint8)
    width, height = sizes[0]
    if len(frames) * width * height > MOST_PIXELS:  # refused before they are decoded
        return np.broadcast_to(np.uint8(0), (len(frames), height, width, 3))
    return np.stack([np.asarray(frame.convert("RGB")) for frame in frames])


def metadata_of(frames: np.ndarray, fps: Any) -> dict[str, Any]:
    """Returns what transformers' processors read about the frames of a video.

    Args:
        frames: What `checked_frames` returned.
        fps: Frames per second; None for `FRAMES_PER_S`.

    Raises:
        InvalidArgumentError: `fps` is no positive number.
    """
    fps = FRAMES_PER_S if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise InvalidArgumentError(
            f"fps: expected the frames per second, a positive number, got {fps!r}; leave it out for {FRAMES_PER_S:g}"
        )
    num_frames, height, width, _ = frames.shape
    return {
        "total_num_frames": num_frames,
        "fps": float(fps),
        "duration": num_frames / fps,
        "frames_indices": list(range(num_frames)),
        "height": height,
        "width": width,
    }
