"""Chooses a GGUF file by its name; imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from model_adapters.errors import ModelNotFoundError

SUFFIX = ".gguf"
_PREFERRED = ("Q8_0", "Q4_K_M")
"""Types that are taken where the caller names none: the first that is there."""

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_DENSE = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def split_tag(name: str) -> tuple[str, str | None]:
    """Returns a hub id and what stands behind its colon, "org/repo-GGUF:Q4_K_M".

    None without one.
    """
    hub_id, colon, tag = name.strip().partition(":")
    return (hub_id, tag) if colon and hub_id.count("/") == 1 and tag else (name, None)


def language_models(names: Iterable[str]) -> list[str]:
    """Returns the GGUF files among `names` but for image encoders and matrices of importance."""
    files = [name for name in names if name.lower().endswith(SUFFIX)]
    return sorted(name for name in files if not re.search(r"mmproj|imatrix", PurePosixPath(name).name, re.IGNORECASE))


def is_gguf_only(names: Iterable[str]) -> bool:
    """Tells whether the files of a folder or repository have their weights in GGUF files alone."""
    names = list(names)
    return bool(language_models(names)) and not any(name.endswith(_DENSE) for name in names)


def pick(names: Iterable[str], tag: str | None, where: str, how: str) -> str:
    """Returns the file that `tag` means: a file name, or a type such as "Q4_K_M".

    Args:
        names: Names of all files.
        tag: What the caller asked for; None takes Q8_0, else Q4_K_M, else the only file.
        where: The repository or folder, for errors.
        how: How to name a file of it, for errors.

    Raises:
        ModelNotFoundError: no such file, or several.
    """
    files = language_models(names)
    complete = [name for name in files if not _PART.search(PurePosixPath(name).stem)]
    if tag is None:
        found = (
            complete
            if len(complete) == 1
            else next((hits for kind in _PREFERRED if (hits := _of_type(complete, kind))), [])
        )
    elif tag.lower().endswith(SUFFIX):
        found = [name for name in files if name == tag]
    else:
        found = _of_type(complete, tag)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(files[:8]) + (" …" if len(files) > 8 else "")
    if not found and files and not complete:
        raise ModelNotFoundError(f"{where} holds GGUF files in parts alone ({listed}): merge them, or take another one")
    what = "several GGUF files" if tag is None or found else f"no GGUF file {tag!r}"
    raise ModelNotFoundError(f"{where} holds {what}: {how}; there are {listed or 'none'}")


def _of_type(names: list[str], kind: str) -> list[str]:
    """Returns the files whose name ends with a type: "model-Q4_K_M.gguf", "model.q4_k_m.gguf"."""
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(kind)}$", re.IGNORECASE)
    return [name for name in names if pattern.search(name[: -len(SUFFIX)])]


def gguf_in(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder whose weights are in GGUF files alone.

    None for any other folder.

    Raises:
        ModelNotFoundError: several of them.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if not is_gguf_only(names):
        return None
    return folder / pick(names, None, str(folder), "give the path of one")
