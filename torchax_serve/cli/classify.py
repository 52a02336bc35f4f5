"""``torchax-serve classify``: labels of images or sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import complete_model
from torchax_serve.cli.shared.result_files import check_files, model_with, print_rows


@option_groups
def classify(
    model: Annotated[str, typer.Argument(help="Hub id or folder.", autocompletion=complete_model)],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images, or wav, flac, ogg or mp3.")],
    *,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Labels of each file.")] = 5,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", show_default=False, help="Text to choose, for a model such as CLIP; once for each text."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a line for each label.")] = False,
    load: LoadOptions,
) -> None:
    """Label images or sound, the best label first.

    torchax-serve classify google/vit-base-patch16-224 cat.png dog.jpg
    """
    check_files(files)
    with model_with(("classify_images", "classify_audio"), "classify", model, load) as (served, method):
        labels = {} if label is None or method == "classify_audio" else {"labels": label}
        if label is not None and not labels:
            from model_adapters.errors import InvalidArgumentError

            raise InvalidArgumentError("--label: expected with a model of images, got one of sound; leave it out")
        found = getattr(served, method)([str(path) for path in files], top_k=top_k, **labels)
    rows = [{"file": str(path), "labels": [vars(each) for each in row]} for path, row in zip(files, found, strict=True)]
    lines = [f"{path}: {each.label} {each.score:.4f}" for path, row in zip(files, found, strict=True) for each in row]
    print_rows(rows, lines, as_json=as_json)


COMMAND = Command("classify", classify, position=21, examples=(("classify ./vit cat.png", "labels of an image"),))
