"""Reader of sentence-transformers' list of a model's modules, and of their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from model_adapters.errors import CheckpointError
from model_adapters.loading.file_names import MODULES, inside


@dataclass(frozen=True)
class ModuleEntry:
    """One line of ``modules.json``.

    Attributes:
        type: the module's class, with its Python module.
        path: of its folder, relative to that of the file; empty for that folder itself.
    """

    type: str
    path: str

    @property
    def is_transformer(self) -> bool:
        """Whether the module is the model itself."""
        is_theirs = self.type.startswith("sentence_transformers.")
        return is_theirs and self.type.endswith((".Transformer", ".MLMTransformer"))


def read_modules(file: Path) -> list[ModuleEntry]:
    """Returns the modules in `file`, in their order.

    Raises CheckpointError if the file is not a list of modules.
    """
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable as JSON ({error}): get the file again") from error
    is_list = isinstance(content, list) and all(isinstance(each, dict) for each in content)
    if not is_list or any(not isinstance(each.get("type"), str) for each in content):
        raise CheckpointError(f"{file}: expected a list of modules with a type: get the file again")
    return [ModuleEntry(each["type"], _path_of(each.get("path", ""), file)) for each in content]


def _path_of(said: Any, file: Path) -> str:
    path = PurePosixPath(inside(said, file)).as_posix()
    return "" if path == "." else path


def transformer_path(root: Path, has_config: Callable[[str], bool]) -> str:
    """Returns the folder of the model itself, relative to `root`.

    Early releases of sentence-transformers put it into a subfolder. Empty if `root` has a ``config.json``, or no
    ``modules.json`` that names such a folder.

    Args:
        root: the folder that may hold a ``modules.json``.
        has_config: whether there is a ``config.json`` in a folder relative to `root`.
    """
    if has_config("") or not (root / MODULES).is_file():
        return ""
    paths = [each.path for each in read_modules(root / MODULES) if each.is_transformer]
    return next((path for path in paths if has_config(path)), "")


def modules_root(folder: Path) -> Path | None:
    """Returns the folder whose ``modules.json`` names the model in `folder`.

    None if there is none.
    """
    if (folder / MODULES).is_file():
        return folder
    above = folder.parent / MODULES
    if above.is_file() and any(each.is_transformer and each.path == folder.name for each in read_modules(above)):
        return folder.parent
    return None
