"""``torchax-serve segment``: labelled parts of images, with masks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
    """
    require_package("PIL", "segment", extra="images", package="pillow")
    check_files(files)
    check_output(output, len(files), PICTURES)
    from torchax_serve.cli.shared.terminal import print_note

    with model_with(("segment",), "segment", model, load) as (served, _):
        from torchax_serve.tasks.images import images_of

        images = images_of([str(path) for path in files])
        found = served.segment(images, subtask=subtask and subtask.value, threshold=threshold)
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


COMMAND = Command("segment", segment, position=23)
