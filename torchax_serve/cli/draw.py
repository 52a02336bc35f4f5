"""``torchax-serve draw``: an image of a prompt, by a diffusion pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError
from model_adapters.loading.file_names import PIPELINE_INDEX
from model_adapters.loading.model_source import HUB_ID
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import DTYPES, check_choice, complete_dtype, option_groups
from torchax_serve.validation.extras import require_package
from torchax_serve.validation.library_objects import is_pipeline_folder

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class DrawingOptions:
    """Options of the drawing; without one the pipeline's own default counts."""

    negative_prompt: Annotated[
        str | None, typer.Option("--negative-prompt", show_default=False, help="What not to draw.")
    ] = None
    num_inference_steps: Annotated[
        int | None,
        typer.Option("--num-inference-steps", "--steps", min=1, show_default=False, help="Denoising steps."),
    ] = None
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance-scale", show_default=False, help="Weight of the prompt.")
    ] = None
    width: Annotated[int | None, typer.Option("--width", min=1, show_default=False, help="In pixels.")] = None
    height: Annotated[int | None, typer.Option("--height", min=1, show_default=False, help="In pixels.")] = None
    seed: Annotated[int | None, typer.Option("--seed", show_default=False, help="Of the noise; random without.")] = None


@option_groups
def draw(
    model: Annotated[str, typer.Argument(help="Hub id of a diffusers pipeline, or its folder.")],
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help=f"File to write: a name that ends with {', '.join(ENDINGS)}.")
    ],
    drawing: DrawingOptions,
    mesh: Annotated[
        str | None, typer.Option("--mesh", show_default=False, help="Devices that share the transformer: model=4.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", autocompletion=complete_dtype, help="auto (that of the files) or a dtype.")
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option("--revision", show_default=False, help="Branch, tag or commit of a hub id.")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights from pickle files. Only from authors you trust.")
    ] = False,
) -> None:
    """Draw an image of a prompt, into a file.

    torchax-serve draw stabilityai/sd-turbo "a red fox in the snow" --output fox.png --steps 2
    """
    check_choice("--dtype", dtype, DTYPES)
    require_package("diffusers", "draw", extra="diffusion")
    _check(model, revision, output)
    shape = None
    if mesh is not None:
        from torchax_serve.distributed.mesh_shape import parse_mesh

        shape = parse_mesh(mesh, None)
    from torchax_serve.cli.chat.interrupts import prompt_interrupts
    from torchax_serve.cli.shared.terminal import activity, passing_note, print_note

    with prompt_interrupts(leave_at=1):
        with passing_note("starting torch and jax ..."):
            from torchax_serve import serve
        from model_adapters.loading.progress import RichProgress

        folder = _folder_of(model, revision, allow_pickle)
        image_model: Any = serve(folder, mesh=shape, dtype=dtype, allow_pickle=allow_pickle, progress=RichProgress())
        with image_model, activity() as note:
            image = image_model.generate_image(
                prompt, on_step=lambda step, number: note(f"step {step} of {number}"), **vars(drawing)
            )
    try:
        image.save(output)
    except OSError as error:
        raise InvalidArgumentError(f"--output: {output} cannot be written ({error}); choose another file") from error
    print_note(f"{image.width} x {image.height} pixels in {output}")


def _folder_of(model: str, revision: str | None, allow_pickle: bool) -> Path:
    """Returns the folder of a pipeline; downloads it if it is one of the hub."""
    if is_pipeline_folder(model):
        return Path(model).expanduser()
    from model_adapters.loading.hub_pipeline import fetch_pipeline
    from model_adapters.loading.hub_request import HubRequest
    from model_adapters.loading.progress import RichProgress

    request = HubRequest(model.strip(), revision, allow_pickle=allow_pickle)
    return fetch_pipeline(request, RichProgress())


def _check(model: str, revision: str | None, output: Path) -> None:
    """Raises, before loading, if the pipeline is missing or the file cannot be written."""
    is_here = is_pipeline_folder(model)
    if not is_here and (Path(model).expanduser().exists() or not HUB_ID.fullmatch(model.strip())):
        raise ModelNotFoundError(
            f"MODEL: expected the hub id of a diffusers pipeline, or its folder with {PIPELINE_INDEX}, got {model}; "
            "correct it"
        )
    if is_here and revision is not None:
        raise InvalidArgumentError(f"--revision: expected with a hub id, got {revision} with the folder {model}")
    if output.suffix.lower() not in ENDINGS:
        raise InvalidArgumentError(f"--output: expected a name that ends with {', '.join(ENDINGS)}, got {output}")
    if not output.parent.is_dir():
        raise InvalidArgumentError(f"--output: expected a folder that is there, got {output.parent}; make it first")


COMMAND = Command(
    "draw", draw, position=25, examples=(('draw ./sd-turbo "a fox" -o fox.png', "an image of a diffusion pipeline"),)
)
