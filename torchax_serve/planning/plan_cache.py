"""Plans that were made before: the same model, request, code and libraries give the same answer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

from transformers import PreTrainedModel

from torchax_serve.compilation.cache_folders import plans_folder
from torchax_serve.compilation.executable_cache import installed_versions
from torchax_serve.planning.plan import Note, PlanReport, PlanRequest, make_plan, no_note

_COMPILERS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


def cached_plan(
    module: PreTrainedModel,
    name: str,
    request: PlanRequest,
    *,
    save: Path | None = None,
    use_kept: bool = True,
    note: Note = no_note,
) -> tuple[PlanReport, bool]:
    """The plan, and whether an earlier process had made it.

    Args:
        module: on the meta device.
        name: of the model, for people.
        request: what is asked.
        save: a folder for the compiled programs, which are then compiled in any case.
        use_kept: whether an earlier plan is good enough.
        note: told what is being compiled.
    """
    try:
        folder = plans_folder()
    except RuntimeError:  # no home folder
        return make_plan(module, name, request, save=save, note=note), False
    file = f"{_digest(module, request)}.json"
    content = folder.read(file) if use_kept and save is None else None
    if content is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # of another form
            return PlanReport.from_json({**json.loads(content), "model": name}), True
    report = make_plan(module, name, request, save=save, note=note)
    with contextlib.suppress(OSError):  # not kept: costs only time
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
