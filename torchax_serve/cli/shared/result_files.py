"""Commands of further tasks: their checks, their model, and what is drawn of results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.cli.shared.load_options import LoadOptions
from torchax_serve.cli.shared.model_name import check_model, refuse_bundle

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_COLOURS = ((230, 57, 70), (29, 120, 200), (42, 157, 80), (240, 160, 20), (131, 56, 200), (0, 150, 160), (120, 80, 40))
"""Of boxes and masks, by the place of a label among those of an image."""


def check_files(files: Sequence[Path]) -> None:
    """Raises InvalidArgumentError, before a model is loaded, for a file that is not there."""
    for path in files:
        if not path.expanduser().is_file():
            raise InvalidArgumentError(f"FILE: expected a file that is there, got {path}; correct the path")


def check_output(output: Path | None, num_files: int, endings: Sequence[str]) -> None:
    """Raises InvalidArgumentError, before a model is loaded, if results cannot be written.

    Those of one file go into a file with one of `endings`, those of several into a folder.
    """
    if output is None:
        return
    if num_files > 1:
        if not output.is_dir():
            raise InvalidArgumentError(
                f"--output: expected a folder for {num_files} files, got {output}; make it first"
            )
        return
    if output.suffix.lower() not in endings:
        raise InvalidArgumentError(f"--output: expected a name that ends with {', '.join(endings)}, got {output}")
    if not output.parent.is_dir():
        raise InvalidArgumentError(f"--output: expected a folder that is there, got {output.parent}; make it first")


def output_of(output: Path, file: Path, ending: str) -> Path:
    """Returns where the result of a file is written."""
    return output / f"{file.stem}{ending}" if output.is_dir() else output


@contextlib.contextmanager
def model_with(names: Sequence[str], command: str, model: str, load: LoadOptions) -> Iterator[tuple[Any, str]]:
    """Yields a loaded model and the first of the methods `names` that it has; Ctrl-C ends it.

    Raises:
        UnsupportedModelError: it has none of them; the message says what it has.
    """
    from torchax_serve.cli.chat.interrupts import prompt_interrupts
    from torchax_serve.cli.shared.load_model import loaded_model

    check_model(model, load.revision)
    refuse_bundle(model, "name the model that it was exported from")
    with loaded_model(model, load) as served, prompt_interrupts(leave_at=1):
        methods = getattr(served, "methods", ())
        found = next((name for name in names if name in methods), None)
        if found is None:
            known = ", ".join(methods) or "those of a model of texts"
            raise UnsupportedModelError(
                f"{command}: expected a model with {' or '.join(names)}, got {served.name}, whose methods are {known}"
            )
        yield served, found


def print_rows(rows: Sequence[dict[str, Any]], lines: Sequence[str], *, as_json: bool) -> None:
    """Prints results: one JSON list, or a line for each."""
    if as_json:
        print(json.dumps(list(rows), ensure_ascii=False))
        return
    for line in lines:
        print(line)


def save(picture: Any, path: Path) -> None:
    """Writes a PIL image; raises InvalidArgumentError if that is not possible."""
    try:
        picture.save(path)
    except OSError as error:
        raise InvalidArgumentError(f"--output: {path} cannot be written ({error}); choose another file") from error


def with_boxes(image: Any, found: Sequence[Any]) -> Any:
    """Returns a copy of a PIL image with the boxes of `Detection`s and their labels."""
    from PIL import ImageDraw, ImageFont

    drawn = image.copy()
    pen, colours = ImageDraw.Draw(drawn), _colours(found)
    size = max(10, min(image.size) // 40)
    font, width = ImageFont.load_default(size), max(1, size // 5)
    for each in found:
        box, text = each.box, f"{each.label} {each.score:.2f}"
        left, right = sorted((box.xmin, box.xmax))
        top, bottom = sorted((box.ymin, box.ymax))
        pen.rectangle((left, top, right, bottom), outline=colours[each.label], width=width)
        at = (left + width, max(0, top - size - 2 * width))
        pen.rectangle(pen.textbbox(at, text, font=font), fill=colours[each.label])
        pen.text(at, text, fill="white", font=font)
    return drawn


def with_masks(image: Any, found: Sequence[Any]) -> Any:
    """Returns a copy of a PIL image with the masks of `Segment`s in colours."""
    from PIL import Image

    drawn, colours = image.copy(), _colours(found)
    for each in found:
        half = Image.fromarray(each.mask).convert("L").point(lambda value: value // 2)
        drawn.paste(Image.new("RGB", image.size, colours[each.label]), (0, 0), half)
    return drawn


def _colours(found: Sequence[Any]) -> dict[str, tuple[int, int, int]]:
    labels = dict.fromkeys(each.label for each in found)
    return {label: _COLOURS[index % len(_COLOURS)] for index, label in enumerate(labels)}
