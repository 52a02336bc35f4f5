"""Folders of compiled programs: their size limit, and eviction of the least used.

This module imports neither jax nor torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from pathlib import Path

from model_adapters.disk_cache import SealedFolder, cache_root, keep_within
from model_adapters.errors import InvalidArgumentError

SIZE_VARIABLE = "TORCHAX_SERVE_CACHE_SIZE"
DEFAULT_MAX_BYTES = 10 * 10**9
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)

PROGRAMS = "programs"
START = "start"
KINDS = {
    PROGRAMS: "whole programs of models, and what was found out about them",
    "xla": "what else XLA has compiled, found by JAX",
    "plans": "plans of `torchax-serve plan`",
    "kernels": "the C++ kernels of the CPU",
    START: "weights and records of models for their next start",
}


def compiled_dir() -> Path:
    """Returns the folder of compiled programs: ``compiled`` in the user's cache folder.

    Raises:
        RuntimeError: there is no home folder.
    """
    return cache_root() / "compiled"


def plans_folder() -> SealedFolder:
    """Returns the folder of plans."""
    return SealedFolder(cache_root() / "plans", "plans")


def folders() -> dict[str, SealedFolder]:
    """Returns all folders by kind; see `KINDS`.

    A folder that was chosen for JAX by its own variable holds programs as well; its other files are JAX's own.
    """
    found = {
        PROGRAMS: SealedFolder(compiled_dir() / PROGRAMS),
        "xla": SealedFolder(compiled_dir()),
        "plans": plans_folder(),
        "kernels": SealedFolder(cache_root() / "kernels", "compiled kernels"),
        START: SealedFolder(compiled_dir() / START, "start records"),
    }
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        found[PROGRAMS] = SealedFolder(Path(chosen) / PROGRAMS)
        found[START] = SealedFolder(Path(chosen) / START, "start records")
    return found


def parse_size(text: str, name: str) -> int:
    """Parses a size such as ``10GB``, ``500M`` or ``123456`` (powers of ten) to bytes.

    Raises:
        InvalidArgumentError: it is no size; `name` is what the user has set.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgumentError(f"{name}: expected a size such as 10GB or 500MB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def max_cache_bytes() -> int:
    """Returns how much room all folders together may take: TORCHAX_SERVE_CACHE_SIZE, else 10 GB.

    Raises:
        InvalidArgumentError: the variable is no size.
    """
    given = os.environ.get(SIZE_VARIABLE)
    return parse_size(given, SIZE_VARIABLE) if given else DEFAULT_MAX_BYTES


@dataclasses.dataclass
class Evictor:
    """Keeps folders within a size while a process writes to them.

    Looking at all files takes milliseconds, and a first start writes hundreds: so it is done after the first write, and
    then after each twentieth of the limit. The limit is exceeded by that much per writing process.

    Attributes:
        max_bytes: of all folders together.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    _written: int | None = None  # bytes since the last look; None: never looked
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def wrote(self, num_bytes: int, *folders_written: SealedFolder) -> None:
        """Notes a write to `folders_written`, and evicts where the limit may be reached.

        Those of the user's cache folder are counted too, together with them.
        """
        with self._lock:
            total = None if self._written is None else self._written + num_bytes
            if total is not None and total < self.max_bytes // 20:
                self._written = total
                return
            self._written = 0
        with contextlib.suppress(RuntimeError):  # no home folder: only what JAX was told to use is there
            folders_written = (*folders().values(), *folders_written)
        keep_within({each.path: each for each in folders_written}.values(), self.max_bytes)


EVICTOR = Evictor()
"""Of this process; `enable_compile_cache` sets its limit."""
