"""Videos in requests: animations and single frames, bounded before they are decoded.

Files of video codecs are refused: no decoder for them is a dependency.
"""

from __future__ import annotations

import io
from typing import Any

from torchax_serve.server import require_packages
from torchax_serve.server.errors import bad_request
from torchax_serve.server.image_files import MAX_PIXELS

FORMATS = ("GIF", "WEBP", "PNG")
"""Formats of animations that are read."""
MAX_FRAMES = 32
"""Most frames that a model is shown; of longer animations as many, at equal distances, as in vLLM."""
MAX_DECODED_PIXELS = 20 * MAX_PIXELS
"""Most pixels of all frames of an animation, which are decoded one after the other to get at a later one."""


def decode_animation(data: bytes, where: str) -> tuple[list[Any], float | None]:
    """Returns frames of an animation as PIL images in RGB, and their number for a second.

    None where the file does not say how long its frames are shown.

    Args:
        data: Bytes of the file.
        where: Field of the request, for errors.

    Raises:
        ApiError: 400 for bytes that are no animation, or too many pixels.
    """
    require_packages("PIL")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            num_frames = getattr(image, "n_frames", 1)
            check_pixels(image.size, min(num_frames, MAX_FRAMES), where)
            if num_frames * image.width * image.height > MAX_DECODED_PIXELS:
                raise bad_request(
                    f"{where}: expected at most {MAX_DECODED_PIXELS} pixels in all frames, got {num_frames} of "
                    f"{image.width} x {image.height}",
                    where,
                    "invalid_value",
                )
            return _frames(image, num_frames)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise bad_request(
            f"{where}: expected an animation as {', '.join(FORMATS)}, or frames as data:video/jpeg;base64,FRAME,FRAME, "
            "got something else; other files are not decoded, send frames of them",
            where,
            "invalid_value",
        ) from error


def _frames(image: Any, num_frames: int) -> tuple[list[Any], float | None]:
    num_chosen = min(num_frames, MAX_FRAMES)
    chosen = {index * num_frames // num_chosen for index in range(num_chosen)}
    frames, shown_ms = [], 0.0
    for index in range(num_frames):
        image.seek(index)
        image.load()  # WEBP says how long a frame is shown when it is decoded
        shown_ms += image.info.get("duration", 0)
        if index in chosen:
            frames.append(image.convert("RGB"))
    return frames, 1000 * num_chosen / shown_ms if shown_ms else None


def check_pixels(size: tuple[int, int], num_frames: int, where: str) -> None:
    """Raises ApiError for frames with more than `MAX_PIXELS` together."""
    width, height = size
    if num_frames * width * height > MAX_PIXELS:
        raise bad_request(
            f"{where}: expected at most {MAX_PIXELS} pixels in {num_frames} frames, got {width} x {height} in each",
            where,
            "invalid_value",
        )
