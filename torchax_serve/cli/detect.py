"""``torchax-serve detect``: objects in images, with boxes."""

from __future__ import annotations

import dataclasses
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
    with_boxes,
)
from torchax_serve.validation.extras import require_package


@option_groups
def detect(
    model: Annotated[str, typer.Argument(help="Hub id or folder.", autocompletion=complete_model)],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images.")],
    *,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0, max=1, show_default=False, help="Least score; 0.5 without.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", show_default=False, help="Text to look for, for a model such as OWL-ViT; once for each text."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="Picture with the boxes; a folder for several files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a line for each object.")] = False,
    load: LoadOptions,
) -> None:
    """Find objects in images: label, score and box of each.

    torchax-serve detect facebook/detr-resnet-50 street.jpg --output boxes.png
    """
    require_package("PIL", "detect", extra="images", package="pillow")
    check_files(files)
    check_output(output, len(files), PICTURES)
    from torchax_serve.cli.shared.terminal import print_note

    with model_with(("detect",), "detect", model, load) as (served, _):
        from torchax_serve.tasks.images import images_of

        images = images_of([str(path) for path in files])
        found = served.detect(images, threshold=threshold, labels=label)
    rows = [
        {"file": str(path), "objects": [dataclasses.asdict(each) for each in row]}
        for path, row in zip(files, found, strict=True)
    ]
    lines = [
        f"{path}: {each.label} {each.score:.4f} {each.box.xmin},{each.box.ymin},{each.box.xmax},{each.box.ymax}"
        for path, row in zip(files, found, strict=True)
        for each in row
    ]
    print_rows(rows, lines, as_json=as_json)
    if output is None:
        return
    for path, image, row in zip(files, images, found, strict=True):
        save(with_boxes(image, row), written := output_of(output, path, PICTURES[0]))
        print_note(f"{len(row)} objects in {written}")


COMMAND = Command("detect", detect, position=22)
