"""Compiles the C++ kernels at their first use, into the user's cache folder.

The file is named by what it depends on: the sources, the compiler and its version, the processor's features, jaxlib. A
second process finds it; two that start at once are kept apart by a lock, and a finished file appears in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.ffi
import jaxlib.version

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off")
COMPILE_LIMIT_S = 300.0


class BuildError(Exception):
    """Why there is no kernel library; the caller falls back to XLA's own operations."""


def cache_folder() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/torchax-serve/kernels``, else under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(root) if root else Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"no home folder to keep compiled kernels in ({error})") from error
    return base / "torchax-serve" / "kernels"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``$CXX`` if set, else the first of g++, clang++ and c++ on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"the C++ compiler that CXX names, {named[0]!r}, is not there")
        return named
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run ({error})") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'no message'}")
    return done.stdout


def _cpuinfo() -> list[str]:
    """The lines in which Linux describes the processor; none elsewhere."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


def processor() -> str:
    """What decides which instructions ``-march=native`` stands for."""
    named = (line for line in _cpuinfo() if line.lower().startswith(("flags", "features")))
    return next(named, f"{platform.machine()} {platform.processor()}")


def _processor_flags() -> list[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["-mcpu=native"]
    is_intel = any("GenuineIntel" in line for line in _cpuinfo())
    return ["-march=native", *(["-DTAS_SLOW_DPBF16"] if is_intel else [])]


def sources() -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted(FOLDER.glob("*.cc"))


def _key(compiler: list[str], flags: list[str]) -> str:
    parts = [_run([*compiler, "--version"]), processor(), jaxlib.version.__version__, " ".join([*compiler, *flags])]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in [*sources(), *sorted(FOLDER.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; where files cannot be locked, two processes build and the later one wins."""
    with open(path, "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], flags: list[str], target: Path) -> None:
    include = f"-I{jax.ffi.include_dir()}"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:

        def compile_one(source: Path) -> str:
            made = str(Path(scratch) / source.with_suffix(".o").name)
            _run([*compiler, *flags, include, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor() as threads:
            objects = list(threads.map(compile_one, sources()))
        library = Path(scratch) / target.name
        _run([*compiler, *flags, "-shared", *objects, "-o", str(library)])
        os.replace(library, target)


def library_path(extra_flags: tuple[str, ...] | None = None, *, rebuild: bool = False) -> Path:
    """Returns the compiled library, building it if there is none for this machine yet.

    Args:
        extra_flags: In place of those that select this machine's instruction set.
        rebuild: Build even when there is one (it turned out to be damaged).

    Raises:
        BuildError: no compiler, a failed compilation, or a cache folder that cannot be written.
    """
    compiler = find_compiler()
    flags = [*FLAGS, *(_processor_flags() if extra_flags is None else extra_flags)]
    folder = cache_folder()
    target = folder / f"kernels-{_key(compiler, flags)}.so"
    if target.exists() and not rebuild:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if rebuild or not target.exists():  # another process may have built it while this one waited
                _compile(compiler, flags, target)
    except OSError as error:
        raise BuildError(f"compiled kernels cannot be kept in {folder} ({error.strerror or error})") from error
    return target
