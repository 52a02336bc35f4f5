"""``torchax-serve bundle``: shows, checks and refreshes bundles."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError
from model_adapters.loading.bundle_folder import version_folder
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.shared.command import Command

if TYPE_CHECKING:
    from torchax_serve.export.manifest import Manifest


class BundleAction(enum.StrEnum):
    """Action on a bundle."""

    INFO = "info"
    VERIFY = "verify"
    REFRESH = "refresh"


def bundle(
    action: Annotated[
        BundleAction,
        typer.Argument(
            help="info: what is in it. verify: reads every file and compares its digest. refresh: writes a version "
            "whose programs this release of JAX has written, without the model."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The bundle, or the folder of one of its versions.")],
    version: Annotated[
        int | None, typer.Option("--version", min=1, show_default=False, help="Version; the highest by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For info: one JSON object instead of lines.")] = False,
) -> None:
    """Show, check or refresh a bundle that torchax-serve export has written.

    torchax-serve bundle info ./qwen
    """
    if bundle_folder(folder) is None:
        raise ModelNotFoundError(
            f"{folder}: expected a bundle, got something else; make one: torchax-serve export MODEL {folder}"
        )
    if as_json and action is not BundleAction.INFO:
        raise InvalidArgumentError(f"--json: expected with info, got with {action}; leave it out")
    from torchax_serve.export.manifest import check_files, read_manifest

    manifest = read_manifest(version_folder(folder, version))
    if action is BundleAction.INFO:
        found = _facts(manifest)
        print(json.dumps(found, indent=1) if as_json else "\n".join(f"{name}: {text}" for name, text in found.items()))
        return
    check_files(manifest, remembers=False)
    if action is BundleAction.VERIFY:
        num_bytes = sum(each["bytes"] for each in manifest["files"].values())
        print(f"{manifest.folder}: {len(manifest['files'])} files, {num_bytes / 1e6:.1f} MB, all as they were written")
        return
    from torchax_serve.export.refresh import refresh_bundle

    print(f"{refresh_bundle(manifest).folder}: {_num_programs(manifest)} programs written again")


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Returns what there is to know about a version, for people."""
    model, engine, files = manifest["model"], manifest["engine"], manifest["files"]
    weights = sum(files[name]["bytes"] for name in manifest["weights"]["files"])
    return {
        "folder": str(manifest.folder),
        "model": f"{model['name']} ({model['class']}, {model['dtype']})",
        "quantization": model["quantization"] or "none",
        "weights": f"{weights / 1e6:.1f} MB, {manifest['weights']['format']}",
        "platforms": ", ".join(manifest["variants"]),
        "programs": f"{_num_programs(manifest)}",
        "engine": ", ".join(f"{name}={value}" for name, value in engine.items()),
        "made with": ", ".join(f"{name} {number}" for name, number in manifest["made_with"].items()),
        "made at": manifest["made_at"],
        "readable until": f"{manifest.readable_until} by every release of JAX; bundle refresh writes it again",
        "digest": manifest.digest,
    }


def _num_programs(manifest: Manifest) -> int:
    return sum(len(variant["programs"]) for variant in manifest["variants"].values())


COMMAND = Command("bundle", bundle, position=57)
