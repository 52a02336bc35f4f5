"""The manifest of a bundle: its contents, with a digest of each file for checks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from model_adapters.disk_cache import SealedFolder
from model_adapters.errors import CheckpointError
from model_adapters.loading.bundle_folder import FORMAT, MANIFEST
from torchax_serve.compilation.cache_folders import START
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.validation.extras import require_package

FORMAT_VERSION = 1
READABLE_DAYS = 180
"""Days after which a new release of JAX may refuse an exported program: six months, by its documentation."""
AGAIN = "copy or export the bundle again"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of one version of a bundle.

    Attributes:
        folder: Folder of the version.
        content: What ``manifest.json`` says.
        digest: SHA-256 of it, which stands in it.
    """

    folder: Path
    content: Mapping[str, Any]
    digest: str

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    @property
    def readable_until(self) -> datetime.date:
        """Day until which every release of JAX reads the programs."""
        return datetime.date.fromisoformat(self["made_at"]) + datetime.timedelta(days=READABLE_DAYS)

    def read_bytes(self, name: str) -> bytes:
        """Returns the content of a file whose digest is right.

        Raises:
            CheckpointError: the file is damaged or missing.
        """
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got {error.strerror}; {AGAIN}") from error
        _compare(path, hashlib.sha256(content).hexdigest(), self["files"][name]["sha256"])
        return content


def write_manifest(folder: Path, content: dict[str, Any]) -> Manifest:
    """Writes the manifest of the files in `folder`, and returns it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    described = {path.relative_to(folder).as_posix(): _described(path) for path in files}
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **content, "files": described}
    digest = _digest(content)
    (folder / MANIFEST).write_text(json.dumps({**content, "digest": digest}, indent=1) + "\n", "utf-8")
    return Manifest(folder, content, digest)


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a version; no other file is looked at.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text("utf-8"))
        version = content["format_version"] if content["format"] == FORMAT else None
    except OSError as error:
        raise CheckpointError(f"{path}: expected the manifest of a bundle, got {error.strerror}; {AGAIN}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the manifest of a bundle, got a damaged file; {AGAIN}") from error
    if version != FORMAT_VERSION:
        made_with = content.get("made_with", {}).get("torchax-serve", "another release")
        raise CheckpointError(
            f"{path}: expected a bundle of format {FORMAT_VERSION}, got format {version}, made by torchax-serve "
            f"{made_with}; update torchax-serve, or export it with this release"
        )
    digest = content.pop("digest", None)
    _compare(path, _digest(content), digest)
    return Manifest(folder, content, str(digest))


def check_files(manifest: Manifest, *, remembers: bool = True) -> None:
    """Reads every file of a version and compares its digest; nothing of them is used before.

    Files of weights that were right when this user last checked them, and have not changed since, are not read again:
    no code is in them.

    Args:
        manifest: The manifest.
        remembers: Whether to pass over files of weights that were checked before.

    Raises:
        CheckpointError: a file is missing, damaged, or not in the manifest.
    """
    known = _Checked(manifest) if remembers else None
    names = [name for name in manifest["files"] if known is None or not known.is_unchanged(name)]
    code = {path.relative_to(manifest.folder).as_posix() for path in (manifest.folder / "native").glob("*")}
    if unknown := sorted(code - set(manifest["files"])):
        raise CheckpointError(
            f"{manifest.folder / unknown[0]}: expected only files that the manifest lists, got another one, which "
            f"would be run; remove it, or {AGAIN}"
        )

    def check(name: str) -> None:
        _check_file(manifest, name)

    with ThreadPoolExecutor(2) as threads:  # hashing releases the interpreter's lock
        for _ in threads.map(check, sorted(names, key=lambda name: -manifest["files"][name]["bytes"])):
            pass
    if known is not None and names:
        known.write()


def _check_file(manifest: Manifest, name: str) -> None:
    path, expected = manifest.folder / name, manifest["files"][name]
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        raise CheckpointError(f"{manifest.folder / MANIFEST}: expected files of the bundle, got {name}; {AGAIN}")
    try:
        described = _described(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file of {expected['bytes']} bytes, got none ({error.strerror}); {AGAIN}"
        ) from error
    if described["bytes"] != expected["bytes"]:
        raise CheckpointError(f"{path}: expected {expected['bytes']} bytes, got {described['bytes']}; {AGAIN}")
    _compare(path, described["sha256"], expected["sha256"])


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _compare(path: Path, found: str, expected: str | None) -> None:
    if found != expected:
        raise CheckpointError(
            f"{path}: expected sha256 {str(expected)[:12]}..., got {found[:12]}...; the file was damaged or changed: "
            f"{AGAIN}"
        )


class _Checked:
    """States of the files of weights that were checked before, in the user's own cache.

    Args:
        manifest: The manifest.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        programs = programs_dir()
        self._cache = None if programs is None else SealedFolder(programs.parent / START, "start records")
        name = hashlib.sha256(str(manifest.folder.resolve()).encode()).hexdigest()[:40]
        self._name = f"bundle-{name}"
        content = None if self._cache is None else self._cache.read(self._name)
        states: dict[str, Any] = {} if content is None else json.loads(content)
        self._states = states if states.get("digest") == manifest.digest else {}

    def is_unchanged(self, name: str) -> bool:
        """Returns whether a file of weights is as it was when it was checked."""
        return name in self._states and self._states[name] == _state(self._manifest.folder / name)

    def write(self) -> None:
        """Writes the states of the files of weights."""
        if self._cache is not None:
            names: Iterable[str] = self._manifest["weights"]["files"]
            states = {name: _state(self._manifest.folder / name) for name in names}
            with contextlib.suppress(OSError):  # costs the next start its time alone
                self._cache.write(self._name, json.dumps({"digest": self._manifest.digest, **states}).encode())


def _state(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def require_flatbuffers() -> None:
    """Raises UnsupportedArgumentError if the package that `jax.export` needs is missing."""
    require_package("flatbuffers", "bundle", extra="export")
