"""The persistent compilation cache: a second start of the same model compiles nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from model_adapters.disk_cache import NotPrivateError, SealedFolder
from model_adapters.unwritable_cache import report_unwritable
from torchax_serve.compilation import jax_cache
from torchax_serve.compilation.cache_folders import EVICTOR, PROGRAMS, compiled_dir, max_cache_bytes

logger = logging.getLogger("torchax_serve")


def enable_compile_cache(folder: Path | None = None) -> Path | None:
    """Stores compiled programs in `folder`, unless the user has chosen one for JAX before.

    Returns:
        The folder in use; None where it cannot be made or trusted, which is said once and costs only time, and
        where JAX's cache is switched off. One that cannot be written is read.

    Raises:
        InvalidArgumentError: TORCHAX_SERVE_CACHE_SIZE is no size.
    """
    EVICTOR.max_bytes = max_cache_bytes()
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None  # such as on Pathways, which has a cache of its own and gives no executables to the host
    if chosen := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return Path(chosen)
    try:
        folder = folder or compiled_dir()
        SealedFolder(folder).check_writable()
    except NotPrivateError as error:
        logger.warning("compiled programs are not kept: %s; until then every start compiles anew", error)
        return None
    except (OSError, RuntimeError) as error:
        report_unwritable(f"compiled programs are not kept: {error}")
        if folder is None or not folder.is_dir():
            return None  # else it is read only, as in an image, and has programs that were made with it
    if not jax_cache.seal(folder):
        logger.warning("compiled programs are not kept: this release of jax has no place to check them; update us")
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA would keep the autotuning of GPUs in files of its own there, which nobody checks; programs hold its result.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return folder


def programs_dir() -> Path | None:
    """Returns the folder of serialized programs; None if nothing is stored."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    return Path(folder) / PROGRAMS if folder else None
