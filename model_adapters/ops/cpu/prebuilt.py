"""Finds C++ kernels that are built already, in the package ``torchax-serve-kernels``.

It has one for each level of instructions. A library is taken if it was built from the C++ files of this installation,
for this version of XLA's headers and for a processor with no more instructions than this one, and if it is undamaged.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import platform
from pathlib import Path
from typing import Any

import jax.ffi

logger = logging.getLogger("torchax_serve")

PACKAGE = "torchax_serve_kernels"
MANIFEST = "manifest.json"
_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
_AMX = ("amx_tile", "amx_bf16", "amx_int8")


@dataclasses.dataclass(frozen=True)
class Level:
    """A set of instructions that libraries are built for.

    Attributes:
        name: Name of it, and of the library.
        machine: Kind of processor, as `platform.machine` says.
        flags: Flags of the compiler.
        features: What the processor must have, by Linux's names.
        vendor: Line that Linux's description of the processor must have; "": any.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: tuple[str, ...]
    vendor: str = ""


_X86_64_V4 = ("-march=x86-64-v4", "-mavx512vnni")
LEVELS = (
    Level(
        "x86_64-amx",
        "x86_64",
        (*_X86_64_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DTAS_SLOW_DPBF16"),
        (*_AVX512, "avx512_bf16", *_AMX),
        "GenuineIntel",
    ),
    Level("x86_64-avx512bf16", "x86_64", (*_X86_64_V4, "-mavx512bf16"), (*_AVX512, "avx512_bf16"), "AuthenticAMD"),
    Level("x86_64-avx512", "x86_64", _X86_64_V4, _AVX512),
    Level("x86_64-avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("aarch64-dotprod", "aarch64", ("-mcpu=generic+dotprod",), ("asimd", "asimddp")),
    Level("aarch64", "aarch64", ("-mcpu=generic",), ("asimd",)),
)
"""Levels, of which a processor uses the first that it has all of."""


def headers_digest() -> str:
    """Returns a digest of XLA's headers, through which a library and jaxlib know each other."""
    folder, digest = Path(jax.ffi.include_dir()), hashlib.sha256()
    for path in sorted(folder.rglob("*.h")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def level_of(described: list[str]) -> Level | None:
    """Returns the level of a processor; None if it has none.

    Args:
        described: Lines in which Linux describes it.
    """
    words = {word for line in described if line.lower().startswith(("flags", "features")) for word in line.split()}
    for level in LEVELS:
        is_from = not level.vendor or any(level.vendor in line for line in described)
        if level.machine == platform.machine() and is_from and words.issuperset(level.features):
            return level
    return None


@functools.cache
def _package() -> tuple[Path, dict[str, Any]] | None:
    """Returns the folder and the manifest of the installed package; None if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        logger.warning("torchax-serve-kernels has no readable %s (%s); kernels are compiled", MANIFEST, error)
        return None
    return folder, manifest


def prebuilt_library(sources_digest: str, described: list[str]) -> Path | None:
    """Returns the installed library for this processor; None if none fits.

    One that does not is named by one line in the log.

    Args:
        sources_digest: Of the C++ files.
        described: Lines in which Linux describes the processor.
    """
    if (package := _package()) is None:
        return None
    folder, manifest = package
    level = level_of(described)
    entry = None if level is None else manifest.get("libraries", {}).get(level.name)
    reason = None
    if manifest.get("sources") != sources_digest:
        reason = f"was built from other C++ files (version {manifest.get('version')})"
    elif manifest.get("headers") != headers_digest():
        reason = f"was built for other headers of XLA than those of jaxlib {jax.__version__}"
    elif level is None or entry is None:
        reason = "has no library for this processor"
    else:
        path = folder / entry["file"]
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]:
                return path
            reason = f"is damaged ({path.name} is not as it was built)"
        except OSError as error:
            reason = f"is damaged ({path.name}: {error.strerror})"
    _note(f"the installed torchax-serve-kernels {reason}; kernels are compiled")
    return None


@functools.cache
def _note(message: str) -> None:
    logger.warning("%s", message)
