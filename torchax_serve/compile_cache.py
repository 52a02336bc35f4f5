"""The persistent compilation cache: a second start of the same model compiles nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger("torchax_serve")


def default_cache_dir() -> Path:
    """Folder of compiled programs: ``torchax-serve/compiled`` in the user's cache folder (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchax-serve" / "compiled"


def enable_compile_cache(folder: Path | None = None) -> Path | None:
    """Keeps compiled programs in `folder`; a folder the user chose for JAX before stays.

    Returns:
        The folder in use; None where it cannot be written, which is said once and costs only time.
    """
    if chosen := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return Path(chosen)
    folder = folder or default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning("compiled programs are not kept: %s cannot be written; every start compiles anew", folder)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def programs_dir() -> Path | None:
    """Folder of whole programs beside JAX's own cache; None where nothing is kept."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return Path(folder) / "programs" if folder else None
