"""The location of the hub's downloads, and the models that have a folder there.

It is determined without importing huggingface_hub.
"""

from __future__ import annotations

import os
from pathlib import Path


def hub_cache(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the hub's downloads, by the rules of huggingface_hub."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(named)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def snapshot(hub_id: str, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the cached copy of a repository at the commit that its revision had last.

    None if there is none.

    Args:
        hub_id: Id of the repository.
        revision: Branch, tag or commit; None: the branch ``main``.
        cache_dir: In place of the hub's own cache.
    """
    folder = hub_cache(cache_dir) / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text()
    except OSError:
        commit = revision or ""
    found = folder / "snapshots" / commit
    return found if commit and found.is_dir() else None


def downloaded(cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the hub ids of the models that have a folder in the hub's cache, sorted."""
    try:
        names = sorted(os.listdir(hub_cache(cache_dir)))
    except OSError:
        return []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in names if name.startswith("models--")]
