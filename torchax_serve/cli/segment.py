"""``torchax-serve segment``: masks of labelled parts, or at points and in boxes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import complete_model
from torchax_serve.cli.shared.result_files import (
    PICTURES,
    check_files,
    check_output,
    model_with,
    output_of,
    print_rows,
    save,
    with_masks,
)
from torchax_serve.validation.extras import require_package


class Subtask(StrEnum):
    """What the parts of an image are."""

    semantic = "semantic"
    instance = "instance"
    panoptic = "panoptic"


@option_groups
def segment(
    model: Annotated[str, typer.Argument(help="Hub id or folder.", autocompletion=complete_model)],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images.")],
    *,
    point: Annotated[
        list[str] | None,
        typer.Option(
            "--point", metavar="X,Y", show_default=False, help="Pixel of the object, for a model such as SAM; several."
        ),
    ] = None,
    outside: Annotated[
        list[str] | None,
        typer.Option("--outside", metavar="X,Y", show_default=False, help="Pixel beside the object; several."),
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(
            "--box", metavar="LEFT,TOP,RIGHT,BOTTOM", show_default=False, help="Box around an object; once for each."
        ),
    ] = None,
    subtask: Annotated[
        Subtask | None,
        typer.Option("--subtask", show_default=False, help="What parts are; the last of these that the model has."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0, max=1, show_default=False, help="Least score; 0.9 without.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="Picture with the masks; a folder for several files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a line for each part.")] = False,
    load: LoadOptions,
) -> None:
    """Segment images: label, score and share of the pixels of each part.

    torchax-serve segment nvidia/segformer-b0-finetuned-ade-512-512 street.jpg --output masks.png

    torchax-serve segment facebook/sam-vit-base street.jpg --point 320,240 --output masks.png
    """
    require_package("PIL", "segment", extra="images", package="pillow")
    check_files(files)
    check_output(output, len(files), PICTURES)
    prompts = _prompts(point or [], outside or [], box or [])
    from torchax_serve.cli.shared.terminal import print_note

    with model_with(("segment", "masks"), "segment", model, load) as (served, method):
        from torchax_serve.tasks.images import images_of

        _check_options(served.name, method, prompts, {"--subtask": subtask, "--threshold": threshold})
        images = images_of([str(path) for path in files])
        if method == "segment":
            found = served.segment(images, subtask=subtask and subtask.value, threshold=threshold)
        else:
            found = [_objects(served.masks(each, **prompts)) for each in images]
    rows, lines = [], []
    for path, parts in zip(files, found, strict=True):
        shown = [{"label": e.label, "score": e.score, "share": float(e.mask.mean())} for e in parts]
        rows.append({"file": str(path), "segments": shown})
        for each in shown:
            score = "-" if each["score"] is None else f"{each['score']:.4f}"
            lines.append(f"{path}: {each['label']} {score} {each['share']:.1%}")
    print_rows(rows, lines, as_json=as_json)
    if output is None:
        return
    for path, image, parts in zip(files, images, found, strict=True):
        save(with_masks(image, parts), written := output_of(output, path, PICTURES[0]))
        print_note(f"{len(parts)} parts in {written}")


def _prompts(points: list[str], outside: list[str], boxes: list[str]) -> dict[str, Any]:
    """Returns the points and boxes of the options, as `VisionModel.masks` takes them."""
    found: dict[str, Any] = {}
    if outside and not (points or boxes):
        raise InvalidArgumentError("--outside: expected with --point or --box, got it alone; add one of them")
    if points or outside:
        found["points"] = [
            *(_numbers("--point", "X,Y", each) for each in points),
            *(_numbers("--outside", "X,Y", each) for each in outside),
        ]
        found["labels"] = [1] * len(points) + [0] * len(outside)
    if boxes:
        found["boxes"] = [_numbers("--box", "LEFT,TOP,RIGHT,BOTTOM", each) for each in boxes]
    return found


def _numbers(option: str, form: str, text: str) -> list[float]:
    parts = text.split(",")
    try:
        found = [float(part) for part in parts]
    except ValueError:
        found = []
    if len(found) != form.count(",") + 1:
        raise InvalidArgumentError(f"{option}: expected {form} in pixels, got {text!r}; correct it")
    return found


def _check_options(name: str, method: str, prompts: dict[str, Any], of_labels: dict[str, Any]) -> None:
    """Raises InvalidArgumentError for options of the other kind of model, and without a prompt."""
    if method == "segment" and prompts:
        raise InvalidArgumentError(
            f"--point, --box: expected none for {name}, which finds parts by its labels, got some; leave them out"
        )
    given = [flag for flag, value in of_labels.items() if value is not None]
    if method == "masks" and given:
        raise InvalidArgumentError(
            f"{given[0]}: expected none for {name}, which finds masks at points and in boxes, got one; leave it out"
        )
    if method == "masks" and not prompts:
        raise InvalidArgumentError(
            f"--point: expected a point or a box for {name}, which finds masks there, got none; add --point X,Y"
        )


def _objects(found: Any) -> list[Any]:
    """Returns the best mask of each prompted object, with a number as its label."""
    from torchax_serve.tasks.results import Segment

    return [Segment(f"object {index}", masks[0].score, masks[0].mask) for index, masks in enumerate(found, 1)]


COMMAND = Command("segment", segment, position=23)
