"""Makes new versions of a bundle: written next to the others, complete by a rename."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.loading.bundle_folder import PARTIAL, is_bundle, versions
from model_adapters.loading.memory import gigabytes
from torchax_serve.export.manifest import Manifest

logger = logging.getLogger("torchax_serve")
_OURS = re.compile(re.escape(PARTIAL) + r"\d+-[0-9a-f]{8}")
"""Names of folders that exports write to: others are those of whoever copies a bundle."""


@dataclasses.dataclass(frozen=True)
class NewVersion:
    """A version that is being written.

    Attributes:
        folder: Folder of its files, until it is complete.
        out: The bundle.
    """

    folder: Path
    out: Path

    def completed(self, manifest: Manifest) -> Manifest:
        """Gives the version the next number; returns its manifest there."""
        while True:  # another process may take a number meanwhile
            number = max([*_numbers(self.out), 0]) + 1
            target = self.out / str(number)
            try:
                self.folder.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                return dataclasses.replace(manifest, folder=target)


@contextlib.contextmanager
def new_version(out: Path, num_bytes: int) -> Iterator[NewVersion]:
    """Yields a new version of a bundle; its files are removed unless it is completed.

    Those of exports that were killed are removed as well, with a warning.

    Args:
        out: The bundle.
        num_bytes: Bytes of its weights.

    Raises:
        InvalidArgumentError: `out` is something else than a bundle.
        TorchaxServeError: it cannot be written.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not is_bundle(out))):
        raise InvalidArgumentError(f"{out}: expected a new folder or a bundle, got something else; choose another one")
    partial = out / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
    is_new = not out.exists()
    for each in unfinished(out):
        logger.warning("%s is removed: its export was killed", each)
        shutil.rmtree(each, ignore_errors=True)
    lock = contextlib.ExitStack()
    try:
        partial.mkdir(parents=True)
        with contextlib.suppress(OSError):  # a file system without locks, where nobody removes it either
            lock.enter_context(_locked(partial))  # before it has what `unfinished` looks for
        (partial / "programs").mkdir()
        if (free := shutil.disk_usage(out).free) < num_bytes:
            raise TorchaxServeError(
                f"{out}: expected {gigabytes(num_bytes)} of free disk for the weights, got {gigabytes(free)}; free "
                "some, or choose another folder"
            )
        yield NewVersion(partial, out)
    except OSError as error:
        raise TorchaxServeError(
            f"{out}: expected a folder that can be written, got {error.strerror or error}; free some disk, or choose "
            "another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.close()
        if is_new:
            with contextlib.suppress(OSError):  # it has a version
                out.rmdir()


def unfinished(out: Path) -> list[Path]:
    """Returns the folders that exports which were killed have left in a bundle."""
    found = []
    for programs in sorted(out.glob(f"{PARTIAL}*/programs")):
        if _OURS.fullmatch(programs.parent.name) is None:
            continue
        with contextlib.suppress(OSError), _locked(programs.parent):  # BlockingIOError: it is being written
            found.append(programs.parent)
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder, until the end of the process at the latest.

    Raises:
        OSError: another process has, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _numbers(out: Path) -> list[int]:
    """Returns the numbers that are taken, whether or not the version is complete."""
    return [int(each.name) for each in out.iterdir() if each.name.isdigit()] + versions(out)
