"""Compilation of the C++ kernels at their first use, into the user's cache folder.

Where the package ``torchax-serve-kernels`` has a library that fits, that is used (`prebuilt.py`); with ``CXX`` set it
is not. The name of the file is a digest of its sources, the processor's features, jaxlib and the compiler, so that a
second process finds it. If the compiler is missing or fails, a library that another compiler built from the same
sources is used. A lock keeps two processes from building at once. The library is sealed
(`model_adapters/disk_cache.py`): one that is damaged, or that other users could have written, is never loaded. Where
the cache folder cannot be written, the library is built in a temporary folder of this process, for this process.
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

from model_adapters.disk_cache import SealedFolder, cache_root, open_lock
from model_adapters.ops.cpu.prebuilt import prebuilt_library
from model_adapters.unwritable_cache import report_unwritable

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off")
PREFIX = "torchax-serve-kernels-"
"""How the names of temporary folders begin."""
COMPILE_LIMIT_S = 900.0  # seconds for one run of the compiler: 10 to 20 s on a free core, minutes on a shared one


class BuildError(Exception):
    """The reason for a missing kernel library; the caller falls back to XLA's own operations.

    Attributes:
        remedy: What the user can do, as an imperative.
    """

    def __init__(self, reason: str, remedy: str = "install g++ or set CXX") -> None:
        super().__init__(reason)
        self.remedy = remedy


def cache_folder() -> SealedFolder:
    """Returns the folder of built libraries.

    It is ``$XDG_CACHE_HOME/torchax-serve/kernels``, else under ``~/.cache``.

    Raises:
        BuildError: no home folder, or a folder that other users could have written to.
    """
    try:
        folder = SealedFolder(cache_root() / "kernels", "compiled kernels")
    except RuntimeError as error:
        raise BuildError(f"no home folder to keep compiled kernels in ({error})", "set XDG_CACHE_HOME") from error
    if folder.path.is_dir() and (reason := folder.untrusted_reason()) is not None:
        why, _, remedy = reason.partition("; ")
        raise BuildError(f"compiled kernels are not taken from disk: {why}", remedy)
    return folder


def find_compiler() -> list[str]:
    """Returns the command of the C++ compiler.

    It is ``$CXX`` if set, else the first of g++, clang++ and c++ on the path.
    """
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


def cpuinfo() -> list[str]:
    """Returns the lines in which Linux describes the processor; none on other systems."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


def processor() -> str:
    """Returns the features of the processor, which decide what ``-march=native`` means."""
    named = (line for line in cpuinfo() if line.lower().startswith(("flags", "features")))
    return next(named, f"{platform.machine()} {platform.processor()}")


def _processor_flags() -> list[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["-mcpu=native"]
    is_intel = any("GenuineIntel" in line for line in cpuinfo())
    return ["-march=native", *(["-DTAS_SLOW_DPBF16"] if is_intel else [])]


def sources(folder: Path = FOLDER) -> list[Path]:
    """Returns the C++ files of `folder` in a fixed order."""
    return sorted(folder.glob("*.cc"))


def headers(folder: Path = FOLDER) -> list[Path]:
    """Returns the C++ headers of `folder` in a fixed order."""
    return sorted(folder.glob("*.h"))


def sources_digest(folder: Path = FOLDER) -> str:
    """Returns a digest of all C++ code in `folder`."""
    digest = hashlib.sha256()
    for path in [*sources(folder), *headers(folder)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def machine_key() -> str:
    """Returns a digest of what a library and this process must share besides its sources."""
    return hashlib.sha256(f"{processor()}\0{jaxlib.version.__version__}".encode()).hexdigest()[:24]


def _source_key(flags: list[str], folder: Path) -> str:
    """Returns a digest of what a library and this process must share, for any compiler."""
    parts = [machine_key(), " ".join([os.environ.get("CXX", ""), *flags]), sources_digest(folder)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compiler_key(compiler: list[str]) -> str:
    described = f"{_run([*compiler, '--version'])}\0{' '.join(compiler)}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`.

    If files cannot be locked, two processes build and the later one wins.
    """
    with open(open_lock(path), "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], flags: list[str], folder: SealedFolder, name: str, code: Path) -> None:
    include = f"-I{jax.ffi.include_dir()}"
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:  # not beside the library: that disk may be full

        def compile_one(source: Path) -> str:
            made = str(Path(scratch) / source.with_suffix(".o").name)
            _run([*compiler, *flags, include, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor() as threads:
            objects = list(threads.map(compile_one, sources(code)))
        library = Path(scratch) / name
        _run([*compiler, *flags, "-shared", *objects, "-o", str(library)])
        folder.write(name, library.read_bytes())


def library_path(extra_flags: tuple[str, ...] | None = None, *, rebuild: bool = False, code: Path = FOLDER) -> Path:
    """Returns the compiled library, building it if there is none for this machine yet.

    Args:
        extra_flags: Flags in place of those that select this machine's instruction set.
        rebuild: Build even if there is a library, also an installed one (it could not be loaded).
        code: Folder of the C++ files.

    Raises:
        BuildError: no library and no compiler, a failed compilation, or a cache folder that cannot be written.
    """
    if extra_flags is None and not rebuild and not os.environ.get("CXX"):
        installed = prebuilt_library(sources_digest(code), cpuinfo())
        if installed is not None:
            return installed
    flags = [*FLAGS, *(_processor_flags() if extra_flags is None else extra_flags)]
    folder = cache_folder()
    stem = f"kernels-{_source_key(flags, code)}"
    try:
        return _built(find_compiler(), flags, folder, stem, rebuild, code)
    except BuildError:
        # The last used of those that were built from these sources for this processor.
        entries = sorted(folder.entries(), key=lambda entry: -entry.last_used)
        found = (entry.path for entry in entries if entry.path.name.startswith(stem) and folder.has(entry.path.name))
        if rebuild or (path := next(found, None)) is None:
            raise
        return path


def _built(compiler: list[str], flags: list[str], folder: SealedFolder, stem: str, rebuild: bool, code: Path) -> Path:
    """Returns the library of `compiler`, from the folder or built now."""
    name = f"{stem}-{_compiler_key(compiler)}.so"
    if rebuild or not folder.has(name):
        try:
            folder.check_writable()  # before minutes of compilation
            with _locked(folder.path / f".{name}.lock"):
                if rebuild or not folder.has(name):  # another process may have built it while this one waited
                    _compile(compiler, flags, folder, name, code)
        except OSError as error:
            reason = f"{folder.path}: {error.strerror}" if error.strerror else error
            report_unwritable(f"compiled kernels are not kept: {reason}")
            return _built_for_now(compiler, flags, name, code)
    return folder.path / name


def _built_for_now(compiler: list[str], flags: list[str], name: str, code: Path) -> Path:
    """Returns the library of `compiler` in the temporary folder."""
    try:
        folder = _TEMPORARY.folder()
        if not folder.has(name):
            _compile(compiler, flags, folder, name, code)
    except OSError as error:
        reason = f"and no temporary folder can be written either ({error.strerror or error})"
        raise BuildError(
            f"compiled kernels cannot be kept, {reason}", "choose folders by XDG_CACHE_HOME and TMPDIR"
        ) from error
    return folder.path / name


class _Temporary:
    """The temporary folder of this process, 0700; made at its first use."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def folder(self) -> SealedFolder:
        """Returns the folder.

        Raises:
            OSError: it cannot be made.
        """
        if self._made is None:
            self._made = tempfile.TemporaryDirectory(prefix=PREFIX)
        return SealedFolder(Path(self._made.name), "compiled kernels")

    def remove(self) -> None:
        """Removes the folder, if there is one; a library in it that is loaded stays loaded."""
        if self._made is not None:
            self._made.cleanup()
            self._made = None


_TEMPORARY = _Temporary()


def remove_temporary() -> None:
    """Removes the temporary folder as soon as the library in it is loaded."""
    _TEMPORARY.remove()
