"""Images that callers give: files, PIL images and arrays, as upright RGB images."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError
from torchax_serve.multimodal.images import checked_image, eight_bits, upright
from torchax_serve.validation.extras import require_package

logger = logging.getLogger("torchax_serve")

MAX_PIXELS = 50_000_000
"""Most pixels of an image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of files; none of them names other files or runs code."""

ImageLike = Any
"""A path, a PIL image, or pixels uint8[height, width, channels]."""


def is_single(images: Any) -> bool:
    """Returns whether a caller's value is one image, rather than a list of them."""
    return not isinstance(images, list | tuple)


def images_of(images: Any) -> list[Any]:
    """Returns the caller's images, one or a list, as PIL images in RGB.

    Raises:
        InvalidArgumentError: none, or one that is no image, damaged, or too large.
    """
    require_package("PIL", "images", extra="images")
    given: Sequence[Any] = [images] if is_single(images) else images
    if not given:
        raise InvalidArgumentError("images: expected at least one image, got none")
    return [image_of(each, "images" if is_single(images) else f"images[{i}]") for i, each in enumerate(given)]


def image_of(value: ImageLike, where: str) -> Any:
    """Returns an upright PIL image in RGB of `value`; errors as of `images_of`.

    They name it `where`. Of an animation it is the first frame, which the log says.
    """
    from PIL import Image

    if isinstance(value, str | os.PathLike):
        return _read(Path(value).expanduser(), where)
    if isinstance(value, Image.Image):
        return _checked(value, where)
    if not hasattr(value, "__array__"):
        raise InvalidArgumentError(
            f"{where}: expected a path, a PIL image or an array of pixels, got {type(value).__name__}"
        )
    pixels = np.asarray(checked_image(value))
    if pixels.dtype != np.uint8 or (pixels.ndim == 3 and pixels.shape[-1] not in (3, 4)):
        raise InvalidArgumentError(
            f"{where}: expected pixels uint8[height, width, 3], got {pixels.dtype}{list(pixels.shape)}; convert them, "
            "or make an image by PIL.Image.fromarray"
        )
    return _checked(Image.fromarray(pixels), where)


def _read(path: Path, where: str) -> Any:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the number of pixels is checked here
            with Image.open(path, formats=FORMATS) as image:
                return _checked(image, where)
    except InvalidArgumentError:  # which is a ValueError as well
        raise
    except FileNotFoundError as error:
        raise InvalidArgumentError(f"{where}: expected a file that is there, got {path}; correct the path") from error
    except Image.UnidentifiedImageError as error:
        raise InvalidArgumentError(
            f"{where}: expected an image as {', '.join(FORMATS)}, got {path}, which is something else"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidArgumentError(
            f"{where}: expected at most {MAX_PIXELS:,} pixels, got several times as many; make it smaller"
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidArgumentError(
            f"{where}: expected an image, got {path}, which is damaged or cut off ({error}); get it again"
        ) from error


def _checked(image: Any, where: str) -> Any:
    from PIL import Image

    width, height = image.size
    if not 1 <= width * height <= MAX_PIXELS:
        raise InvalidArgumentError(
            f"{where}: expected 1 to {MAX_PIXELS:,} pixels, got {width} x {height}; make it smaller"
        )
    if (num_frames := getattr(image, "n_frames", 1)) > 1:
        logger.warning("%s: the first of %d frames of an animation is read", where, num_frames)
        image.seek(0)
    converted = eight_bits(upright(image)).convert("RGB")
    return Image.fromarray(np.asarray(converted))  # without tags, by which others would turn it again
