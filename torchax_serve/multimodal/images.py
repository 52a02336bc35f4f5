"""Checks of images: still pictures of a reasonable size, 8 bits for each channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError

MOST_PIXELS = 100_000_000
"""Most pixels of one image; it is converted to floats before it is resized, 12 bytes per pixel."""
_ORIENTATION = 0x0112
"""EXIF tag."""
_TURNS = dict(
    enumerate(
        ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"), 2
    )
)
"""What makes an image upright, in PIL's words, by its orientation."""
_WITH_ORIENTATION = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""What of a file says how it is turned, by PIL's names."""
_WIDE_MODES = ("I", "F")
"""Modes of PIL whose values have no known range; their conversion to 8 bits cuts off what is above 255."""


def checked_image(image: Any) -> Any:
    """Returns an image of a conversation, one of 16 bits with 8; paths and URLs are not opened.

    Args:
        image: A PIL image, an array, a path or a URL.

    Raises:
        InvalidArgumentError: no pixels, too many, an animation, values that are not finite or of no known range.
    """
    if isinstance(image, str):
        return image
    if hasattr(image, "__array__") and not hasattr(image, "convert"):
        return _checked_array(image)
    size = getattr(image, "size", None)
    if not isinstance(size, tuple) or len(size) != 2:
        return image
    _check_pixels(*size)
    if (num_frames := getattr(image, "n_frames", 1)) > 1:
        raise InvalidArgumentError(
            f"image: expected a still image, got an animation of {num_frames} frames; choose one by image.seek(number) "
            'and image.copy(), or give them as {"type": "video", "video": frames}'
        )
    return eight_bits(image)


def eight_bits(image: Any) -> Any:
    """Returns a PIL image whose conversion to RGB loses nothing but the lower half of 16 bits.

    Raises:
        InvalidArgumentError: its values are 32-bit numbers, of no known range.
    """
    if image.mode.startswith("I;16"):
        from PIL import Image

        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in _WIDE_MODES:
        raise InvalidArgumentError(
            f"image: expected 8 or 16 bits for each channel, got an image of mode {image.mode!r}, whose values have no "
            "known range; scale them to 0 to 255 and convert it"
        )
    return image


def upright(image: Any) -> Any:
    """Returns an image turned as its EXIF orientation says; as it is where that cannot be read.

    `PIL.ImageOps.exif_transpose` also writes the other tags anew, and fails for tags that are damaged.
    """
    from PIL import Image

    image.load()  # what is read of a file next to its pixels is then there, and damaged pixels are an error
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION))
    except Exception:  # PIL's reader of TIFF tags raises whatever it likes
        turn = None
    if turn is None:
        return image
    turned = image.transpose(Image.Transpose[turn])
    for name in _WITH_ORIENTATION:  # or others would turn it again
        turned.info.pop(name, None)
    return turned


def _check_pixels(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise InvalidArgumentError(
            f"expected an image of 1 to {MOST_PIXELS:,} pixels, got {width}x{height}; make it smaller, models see "
            "a few thousand pixels a side at most"
        )


def _checked_array(image: Any) -> Any:
    """Checks pixels in an array, as transformers' processors take them, and returns it."""
    array = np.asarray(image)
    shape = array.shape[:2] if array.ndim == 2 or array.shape[-1:] in ((1,), (3,), (4,)) else array.shape[1:]
    if array.ndim not in (2, 3) or array.dtype.kind not in "uif":
        raise InvalidArgumentError(
            f"image: expected a PIL image, or numbers [height, width], [height, width, channels] or [channels, height, "
            f"width], got {array.dtype}{list(array.shape)}; convert it with PIL.Image.fromarray"
        )
    _check_pixels(shape[1], shape[0])
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgumentError("image: expected finite numbers, got nan or infinity among the pixels")
    return image
