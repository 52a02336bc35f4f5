"""Tells objects and folders of optional libraries apart without importing these libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PIPELINE_INDEX = "model_index.json"
"""File that names the models of a pipeline of diffusers."""


def is_pipeline(value: Any) -> bool:
    """Tells whether `value` is a pipeline of diffusers."""
    return _is_a(value, "DiffusionPipeline")


def is_diffusers_module(value: Any) -> bool:
    """Tells whether `value` is a module of diffusers."""
    return _is_a(value, "ModelMixin")


def is_pipeline_folder(name: Any) -> bool:
    """Tells whether `name` is a folder with a pipeline of diffusers."""
    if not isinstance(name, str | os.PathLike):
        return False
    try:
        return (Path(name).expanduser() / PIPELINE_INDEX).is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, or no name of one
        return False


def _is_a(value: Any, name: str) -> bool:
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(value, getattr(diffusers, name))
