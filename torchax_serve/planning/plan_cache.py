"""Caches plans on disk: the same model, request, code and libraries give the same plan."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

from transformers import PreTrainedModel

from torchax_serve.compilation.cache_folders import plans_folder
from torchax_serve.compilation.environment import installed_versions
from torchax_serve.planning.plan import Note, PlanReport, PlanRequest, make_plan, no_note

_COMPILERS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


def cached_plan(
    module: PreTrainedModel,
    name: str,
    request: PlanRequest,
    *,
    save: Path | None = None,
    use_cache: bool = True,
    note: Note = no_note,
) -> tuple[PlanReport, bool]:
    """Returns the plan, and whether it was read from the cache on disk.

    Args:
        module: Model on the meta device.
        name: Name of the model in the report.
        request: Devices and sizes to plan for.
        save: Folder for the compiled programs, which are then compiled in any case.
        use_cache: Whether a cached plan may be returned.
        note: Called with a text before each part that may take a while.
    """
    try:
        folder = plans_folder()
    except RuntimeError:  # no home folder
        return make_plan(module, name, request, save=save, note=note), False
    file = f"{_digest(module, request)}.json"
    content = folder.read(file) if use_cache and save is None else None
    if content is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # written by another release
            return PlanReport.from_json({**json.loads(content), "model": name}), True
    report = make_plan(module, name, request, save=save, note=note)
    with contextlib.suppress(OSError):  # without the file, the next start only takes longer
        folder.write(file, json.dumps(report.to_json()).encode())
    return report, False


def _digest(module: PreTrainedModel, request: PlanRequest) -> str:
    versions = []
    for package in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    described = [
        installed_versions(),
        *versions,
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        os.environ.get("XLA_FLAGS", ""),
        f"{type(module).__module__}.{type(module).__qualname__} {module.dtype}",
        module.config.to_json_string(use_diff=False),
        repr(request),
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:40]
