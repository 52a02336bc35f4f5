"""JAX's persistent compilation cache on sealed files.

JAX checks nothing of an entry but that it can be decompressed: a flipped bit is run, or ends the process in XLA.
There is no public way to give JAX another store, so the one function that makes it is replaced, for the folder given
alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from model_adapters.disk_cache import SealedFolder
from model_adapters.once import once
from torchax_serve.compilation.cache_folders import EVICTOR

logger = logging.getLogger("torchax_serve")

_SEALED: dict[str, SealedCache] = {}
_LOCAL = threading.local()


class SealedCache(CacheInterface):
    """JAX's entries in a sealed folder; what is damaged is compiled again.

    Args:
        folder: of the entries.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._folder = SealedFolder(folder)

    def get(self, key: str) -> bytes | None:
        """Returns an entry; None if there is none that can be used."""
        return None if _is_bypassed() else self._folder.read(key)

    def put(self, key: str, value: bytes) -> None:
        """Stores an entry; where that fails, the program is compiled at the next start."""
        if _is_bypassed():
            return
        try:
            self._folder.write(key, value)
        except OSError as error:
            logger.info("a compiled program is not kept: %s", error)
        else:
            EVICTOR.wrote(len(value), self._folder)


def seal(folder: Path) -> bool:
    """Makes JAX read only authenticated files in `folder`; returns False if JAX cannot."""
    if not hasattr(compilation_cache, "get_file_cache"):
        return False
    _SEALED[str(folder)] = SealedCache(folder)
    made: Any = compilation_cache.get_file_cache
    if made is not _cache_of:
        _ORIGINAL.append(made)
        compilation_cache.get_file_cache = _cache_of
    return True


_ORIGINAL: list[Any] = []


def _cache_of(path: str) -> Any:
    found = _SEALED.get(str(path))
    return _ORIGINAL[-1](path) if found is None else (found, path)


@contextlib.contextmanager
def bypassed(wanted: bool = True) -> Iterator[None]:
    """Compiles on this thread without JAX's folder, for programs that are stored elsewhere."""
    before, _LOCAL.bypassed = _is_bypassed(), wanted
    try:
        yield
    finally:
        _LOCAL.bypassed = before


def _is_bypassed() -> bool:
    return getattr(_LOCAL, "bypassed", False)


@contextlib.contextmanager
def counting_hits() -> Iterator[list[str]]:
    """Collects the hits of JAX's own compilation cache on this thread."""
    _listen()
    before, _LOCAL.events = getattr(_LOCAL, "events", None), []
    try:
        yield _LOCAL.events
    finally:
        _LOCAL.events = before


def _on_event(event: str, **kwargs: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits" and getattr(_LOCAL, "events", None) is not None:
        _LOCAL.events.append(event)


@once
def _listen() -> None:
    jax.monitoring.register_event_listener(_on_event)
