"""Images in requests: still pictures, bounded in pixels before they are decoded."""

from __future__ import annotations

import io
from typing import Any

from torchax_serve.multimodal.images import eight_bits, upright
from torchax_serve.server import require_packages
from torchax_serve.server.errors import bad_request

MAX_PIXELS = 50_000_000
"""Most pixels of an image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; none of them names other files or runs code."""
_BEGINS = {"PNG": b"\x89PNG", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF8", "BMP": b"BM"}
"""First bytes of files."""


def decode_image(data: bytes, where: str) -> Any:
    """Returns an image as a PIL image in RGB, upright.

    It is turned as its EXIF orientation says, as transformers turns an image that it reads from a file or a URL.

    Args:
        data: Bytes of the file.
        where: Field of the request, for errors.

    Raises:
        ApiError: 400 for bytes that are no image, an animation, or too many pixels.
    """
    require_packages("PIL")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise bad_request(
                    f"{where}: expected at most {MAX_PIXELS} pixels, got {width} x {height}", where, "invalid_value"
                )
            if getattr(image, "n_frames", 1) > 1:
                raise bad_request(f"{where}: expected a still image, got an animation", where, "invalid_value")
            return eight_bits(upright(image)).convert("RGB")
    except Image.DecompressionBombError as error:
        raise bad_request(
            f"{where}: expected at most {MAX_PIXELS} pixels, got several times as many", where, "invalid_value"
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        kind = next((name for name, begin in _BEGINS.items() if data.startswith(begin)), None)
        got = "something else" if kind is None else f"a file that begins as {kind} and is damaged or cut off"
        raise bad_request(
            f"{where}: expected an image as {', '.join(FORMATS)}, got {got}", where, "invalid_value"
        ) from error
