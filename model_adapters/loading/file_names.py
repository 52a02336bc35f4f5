"""Names of a checkpoint's files."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

from model_adapters.errors import CheckpointError

CONFIG = "config.json"
MODULES = "modules.json"  # of sentence-transformers
PIPELINE_INDEX = "model_index.json"  # names the models of a pipeline of diffusers
DECISIONS = ("decision.json", "decision_template.jinja")
"""How a checkpoint asks typed questions, by `transformers.decision`."""
DECISION_HEADS = ("decision_config.json", "judge_config.json")
"""Files of a decision head that lies next to the weights of another class."""


def has_decision_files(folder: Path | None) -> bool:
    """Returns whether a checkpoint says itself how questions are asked, or has a head."""
    return folder is not None and any((folder / name).is_file() for name in (*DECISIONS, *DECISION_HEADS))


def inside(name: Any, said_in: str | os.PathLike[str]) -> str:
    """Returns `name`, the path of a file, if the file is below its folder.

    Raises CheckpointError for a path that leads out of the folder. Symbolic links are not followed: the hub's cache
    consists of them.

    Args:
        name: what a file of the checkpoint names.
        said_in: that file.
    """
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    if path.is_absolute() or ".." in path.parts or "\\" in path.as_posix() or "\0" in path.as_posix():
        raise CheckpointError(
            f"{said_in} names {name!r}, expected a path within its own folder: do not trust this checkpoint"
        )
    return str(name)
