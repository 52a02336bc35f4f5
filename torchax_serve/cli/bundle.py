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
from torchax_serve.cli.shared.model_name import check_model

if TYPE_CHECKING:
    from torchax_serve.export.manifest import Manifest


TEXTS_TOLERANCE = 1e-2
"""Largest difference of an output of texts, relative to its largest value: that of bfloat16."""


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
    model: Annotated[
        str | None,
        typer.Option("--model", show_default=False, help="For verify: compare tokens with this model's in PyTorch."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For info: one JSON object instead of lines.")] = False,
) -> int:
    """Show, check or refresh a bundle that torchax-serve export has written.

    torchax-serve bundle info ./qwen

    torchax-serve bundle verify ./qwen --model qwen3-0.6b

    The exit status of verify is 1 if a token differs from PyTorch's, or an output of texts by more than 1%.
    """
    if bundle_folder(folder) is None:
        raise ModelNotFoundError(
            f"{folder}: expected a bundle, got {'something else' if folder.exists() else 'no such folder'}; make one: "
            f"torchax-serve export MODEL {folder}"
        )
    if as_json and action is not BundleAction.INFO:
        raise InvalidArgumentError(f"--json: expected with info, got with {action}; leave it out")
    if model is not None:
        if action is not BundleAction.VERIFY:
            raise InvalidArgumentError(f"--model: expected with verify, got with {action}; leave it out")
        check_model(model)
    from torchax_serve.export.layout import MODULE, TEXTS
    from torchax_serve.export.manifest import check_files, read_manifest

    manifest = read_manifest(version_folder(folder, version))
    if model is not None and MODULE in manifest.content:
        raise InvalidArgumentError(
            f"--model: expected none with a bundle of a {manifest['model']['class']}, which no name loads; leave it out"
        )
    if action is BundleAction.INFO:
        found = _facts(manifest) | _unfinished(folder)
        print(json.dumps(found, indent=1) if as_json else "\n".join(f"{name}: {text}" for name, text in found.items()))
        return 0
    check_files(manifest, remembers=False)
    if action is BundleAction.VERIFY:
        num_bytes = sum(each["bytes"] for each in manifest["files"].values())
        print(f"{manifest.folder}: {len(manifest['files'])} files, {num_bytes / 1e6:.1f} MB, all as they were written")
        compare = _texts_compared if TEXTS in manifest.content else _compared
        return 0 if model is None else compare(manifest.folder, model)
    from torchax_serve.export.refresh import refresh_bundle

    written = refresh_bundle(manifest).folder
    print(f"{written}: {_num_programs(manifest)} programs written again; torchax-serve run {folder}")
    return 0


def _compared(folder: Path, model: str) -> int:
    """Compares tokens with those of eager PyTorch; returns the exit status."""
    from torchax_serve.parity.bundle import compare_bundle

    found = compare_bundle(folder, model)
    print(f"{found.num_equal} of {found.num_tokens} greedy tokens as in eager PyTorch, up to the first difference")
    if found.num_equal < found.num_tokens:
        print(f"the logits of two tokens that differ are {found.gap:.4g} apart in PyTorch")
    return int(found.num_equal < found.num_tokens)


def _texts_compared(folder: Path, model: str) -> int:
    """Compares outputs for texts with those of eager PyTorch; returns the exit status."""
    from torchax_serve.parity.bundle import compare_texts

    found = compare_texts(folder, model)
    print(f"{found.field} of {found.num_texts} texts differs from eager PyTorch by {found.difference:.1e} at most")
    return int(found.difference > TEXTS_TOLERANCE)


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
        "engine": ", ".join(f"{name}={value}" for name, value in engine.items()) or "none",
        "made with": ", ".join(f"{name} {number}" for name, number in manifest["made_with"].items()),
        "made at": manifest["made_at"],
        "readable until": f"{manifest.readable_until} by every release of JAX; bundle refresh writes it again",
        "digest": manifest.digest,
    }


def _unfinished(folder: Path) -> dict[str, Any]:
    """Returns what exports that were killed have left, if there is any."""
    from torchax_serve.export.versions import unfinished

    names = ", ".join(each.name for each in unfinished(folder))
    return {"unfinished": f"{names}, of exports that were killed; the next one removes it"} if names else {}


def _num_programs(manifest: Manifest) -> int:
    return sum(len(variant["programs"]) for variant in manifest["variants"].values())


COMMAND = Command("bundle", bundle, position=57)
