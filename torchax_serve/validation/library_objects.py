"""Tells objects and folders of optional libraries apart without importing these libraries."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.file_names import CONFIG, PIPELINE_INDEX
from model_adapters.loading.hub_cache import snapshot

CLASS = "_class_name"
"""Entry of a diffusers configuration that names its class."""


def is_pipeline(value: Any) -> bool:
    """Tells whether `value` is a pipeline of diffusers."""
    return _is_a(value, "DiffusionPipeline")


def is_diffusers_module(value: Any) -> bool:
    """Tells whether `value` is a module of diffusers."""
    return _is_a(value, "ModelMixin")


def is_other_module(value: Any) -> bool:
    """Tells whether `value` is a module that is no model of transformers, and wraps none.

    A class of another library that is derived from transformers' own, with a forward of other arguments, is a module.
    """
    torch, transformers = sys.modules.get("torch"), sys.modules.get("transformers")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    is_theirs = transformers is not None and isinstance(value, transformers.PreTrainedModel)
    if is_theirs and not type(value).__module__.startswith("transformers."):
        parameters = inspect.signature(type(value).forward).parameters.values()
        is_theirs = any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in parameters)
    return not (is_theirs or callable(getattr(value, "get_base_model", None)))


def is_pipeline_folder(name: Any) -> bool:
    """Tells whether `name` is a folder with a pipeline of diffusers."""
    if not isinstance(name, str | os.PathLike):
        return False
    try:
        return (Path(name).expanduser() / PIPELINE_INDEX).is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long for a file, or no name of one
        return False


def is_cached_pipeline(name: Any, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None) -> bool:
    """Tells whether `name` is the hub id of a pipeline that has a copy in the hub's cache."""
    if not isinstance(name, str) or name.strip().count("/") != 1 or Path(name).exists():
        return False
    folder = snapshot(name.strip(), revision, cache_dir)
    return folder is not None and (folder / PIPELINE_INDEX).is_file() and not (folder / CONFIG).is_file()


def transformer_config(model: str) -> dict[str, Any] | None:
    """Returns the configuration of the transformer in `model`; None if that is no pipeline.

    Args:
        model: Folder of a pipeline, or JSON file with the configuration of a diffusers model.

    Raises:
        UnsupportedModelError: a pipeline without a transformer.
    """
    path = Path(model).expanduser()
    if (path / PIPELINE_INDEX).is_file():
        path = path / "transformer" / "config.json"
        if not path.is_file():
            raise UnsupportedModelError(f"plan: expected a pipeline with a transformer, got {model}; plan another one")
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError:
        return None  # said by who reads it as a model of transformers
    return config if isinstance(config, dict) and CLASS in config else None


def _is_a(value: Any, name: str) -> bool:
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(value, getattr(diffusers, name))
