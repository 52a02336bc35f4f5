"""``torchax-serve export``: writes a bundle, which runs without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import loaded_model
from torchax_serve.cli.shared.load_options import MaxModelLen, MeshOptions, check_choice, option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.validation.extras import require_package


@dataclass(frozen=True)
class BundleOptions:
    """What the bundle holds."""

    platforms: Annotated[
        list[str] | None,
        typer.Option(
            "--platform",
            help="Platforms of the programs, with commas: cpu, tpu:v6e, cuda:h100. Their devices need not be here.",
        ),
    ] = None
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Requests that run at once.")] = 32
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens of one step, all requests together.")
    ] = 256
    max_num_steps: Annotated[int, typer.Option("--max-num-steps", min=1, help="Decode steps in one dispatch.")] = 16
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page of the cache.")] = 16
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option("--kv-cache-memory-bytes", min=1, show_default=False, help="Bytes of all pages together."),
    ] = None
    weights: Annotated[str, typer.Option("--weights", help="Format of the weights: safetensors or orbax.")] = (
        "safetensors"
    )
    no_native: Annotated[bool, typer.Option("--no-native", help="Without the C++ kernels: slower on CPUs.")] = False
    no_reference: Annotated[
        bool, typer.Option("--no-reference", help="Without the programs that CPUs without a compiler fall back to.")
    ] = False

    def __post_init__(self) -> None:
        check_choice("--weights", self.weights, ("safetensors", "orbax"))
        if self.no_native and self.no_reference:
            raise InvalidArgumentError(
                "--no-reference: expected without --no-native, which leaves no other programs; leave one of them out"
            )

    @property
    def platform_names(self) -> list[str]:
        """Names of the platforms, one by one."""
        return [name for each in self.platforms or ["cpu"] for name in each.split(",")]


@option_groups
def export(
    model: Annotated[str, typer.Argument(help="Short name, hub id or folder.", autocompletion=complete_model)],
    out: Annotated[Path, typer.Argument(help="Folder of the bundle, new or with other versions.")],
    *,
    max_model_len: MaxModelLen = None,
    bundle: BundleOptions,
    load: MeshOptions,
) -> None:
    """Write a model as a bundle: programs, weights and tokenizer that run without PyTorch.

    torchax-serve export qwen3-0.6b ./qwen --max-model-len 4096 --max-num-seqs 8

    torchax-serve run ./qwen

    Each export is a new version, a folder with the next number; run and serve take the highest.
    """
    check_model(model, load.revision)
    if bundle_folder(model) is not None:
        raise InvalidArgumentError(
            f"MODEL: expected a model to export, got the bundle {model}; name the model that it was made from, or run: "
            f"torchax-serve bundle refresh {model}"
        )
    if load.adapters()[1] or load.max_loras or load.max_lora_rank or load.lora_target_modules:
        raise InvalidArgumentError(
            "--adapter: expected a FOLDER to add to the weights, got adapters that requests name, which a bundle has "
            "not; merge one: --adapter FOLDER"
        )
    require_package("flatbuffers", "export", extra="export")
    if bundle.weights == "orbax":
        require_package("orbax", "--weights orbax", extra="orbax", package="orbax-checkpoint")
    from torchax_serve.export.targets import parse_platforms

    parse_platforms(bundle.platform_names)  # before a model is loaded for them
    with loaded_model(model, load, packs_weights=False) as served:
        from torchax_serve import EngineOptions

        engine = EngineOptions(
            max_model_len=max_model_len,
            max_num_seqs=bundle.max_num_seqs,
            max_num_batched_tokens=bundle.max_num_batched_tokens,
            max_num_steps=bundle.max_num_steps,
            page_size=bundle.page_size,
            kv_cache_memory_bytes=bundle.kv_cache_memory_bytes,
        )
        written: list[int] = []
        folder = served.export(
            out,
            platforms=bundle.platform_names,
            engine=engine,
            weights=bundle.weights,
            native=not bundle.no_native,
            reference=not bundle.no_reference,
            advance=written.append,
        )
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    then = "run" if served.writes_text else "bundle info"
    print(f"{folder}: {len(written)} programs, {num_bytes / 1e6:.1f} MB; torchax-serve {then} {out}")


COMMAND = Command(
    "export",
    export,
    position=56,
    examples=(("export qwen3-0.6b ./out", "a bundle that runs without PyTorch"),),
)
