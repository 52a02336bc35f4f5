"""Folders of bundles: versions in numbered folders, complete with their manifest.

Imports neither torch nor jax.
"""

from __future__ import annotations

import json
from pathlib import Path

from model_adapters.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "torchax-serve bundle"
PARTIAL = ".partial-"
"""Beginning of the name of a version that is being written."""


def is_bundle(folder: Path) -> bool:
    """Returns whether `folder` is a bundle, a version of one, or an unfinished one."""
    if _has_manifest(folder) or any(_has_manifest(each) for each in _numbered(folder)):
        return True
    return not (folder / "config.json").exists() and any(folder.glob(f"{PARTIAL}*/programs"))


def versions(folder: Path) -> list[int]:
    """Returns the numbers of the complete versions in a bundle, ascending."""
    return sorted(int(each.name) for each in _numbered(folder) if (each / MANIFEST).is_file())


def version_folder(folder: Path, version: int | None = None) -> Path:
    """Returns the folder of a version of a bundle.

    Args:
        folder: The bundle, or the folder of one version.
        version: Number of the version; None: the highest.

    Raises:
        CheckpointError: there is no such version, or none is complete.
    """
    if version is None and (folder / MANIFEST).is_file():
        return folder
    found = versions(folder)
    if not found:
        raise CheckpointError(
            f"{folder}: expected a bundle with a complete version, got one whose export or copy was not finished; "
            "export or copy it again"
        )
    if version is not None and version not in found:
        listed = ", ".join(map(str, found))
        raise CheckpointError(f"{folder}: expected a version out of {listed}, got {version}; choose one of them")
    return folder / str(found[-1] if version is None else version)


def holds_module(folder: Path) -> bool:
    """Returns whether the newest version in a bundle is a module of another library."""
    try:
        content = json.loads((version_folder(folder) / MANIFEST).read_text("utf-8"))
    except (CheckpointError, OSError, ValueError):  # whoever loads it says what is wrong
        return False
    return isinstance(content, dict) and "module" in content


def _numbered(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.name.isdigit() and each.is_dir()]


def _has_manifest(folder: Path) -> bool:
    """Returns whether the folder has a manifest of ours, damaged or not."""
    try:
        text = (folder / MANIFEST).read_text("utf-8", errors="replace")
    except OSError:
        return False
    try:
        content = json.loads(text)
    except ValueError:
        return FORMAT in text[:200]
    return isinstance(content, dict) and content.get("format") == FORMAT
