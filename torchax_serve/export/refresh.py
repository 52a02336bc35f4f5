"""Writes the programs of a bundle again, by this release of JAX and without the model."""

from __future__ import annotations

import copy
import datetime
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import Mesh

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.cpu import ffi
from torchax_serve.export.layout import GPU_CALLS
from torchax_serve.export.manifest import Manifest, require_flatbuffers, write_manifest
from torchax_serve.export.mesh import BundleSharding
from torchax_serve.export.programs import read_program
from torchax_serve.export.versions import new_version


def refresh_bundle(manifest: Manifest) -> Manifest:
    """Writes a version with the same weights and the programs written anew.

    Returns its manifest.

    Args:
        manifest: The version that is read, one of a bundle, in which the new version gets the next number.

    Raises:
        InvalidArgumentError: the version is in no bundle.
        CheckpointError: this release of JAX does not read a program.
        UnsupportedModelError: it is for a mesh of more devices than there are.
        TorchaxServeError: the disk is full.
    """
    content: dict[str, Any] = copy.deepcopy(dict(manifest.content))
    for name in ("format", "format_version", "files"):
        del content[name]
    programs = {entry["file"] for each in content["variants"].values() for entry in each["programs"].values()}
    require_flatbuffers()
    folder = manifest.folder.resolve()
    if not folder.name.isdigit():
        raise InvalidArgumentError(
            f"{manifest.folder}: expected a version in a folder with its number, got another name; rename it to 1"
        )
    mesh = None if manifest["mesh"] is None else BundleSharding.of(manifest["mesh"]).mesh
    with new_version(folder.parent, 0) as new:
        for name in manifest["files"]:
            (new.folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name in programs:
                (new.folder / name).write_bytes(_rewritten(read_program(manifest, name), mesh))
            else:
                _link_or_copy(manifest.folder / name, new.folder / name)
        content["made_with"] |= {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
        content["made_at"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        return new.completed(write_manifest(new.folder, content))


def _rewritten(program: export.Exported, mesh: Mesh | None) -> bytes:
    """Returns the file of a program that calls `program`.

    It runs on the devices of `mesh` if it was exported for some.
    """
    allowed = [export.DisabledSafetyCheck.custom_call(each) for each in (*ffi.TARGETS, *GPU_CALLS)]
    shardings = [None] * len(program.in_avals) if mesh is None else program.in_shardings_jax(mesh)
    leaves = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
        for each, sharding in zip(program.in_avals, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
    made = export.export(jax.jit(program.call), platforms=program.platforms, disabled_checks=allowed)(*args, **kwargs)
    return bytes(made.serialize())


def _link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` the same file where the file system can: files of a version never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
