"""Makes new versions of a bundle: written next to the others, complete by a rename."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.loading.bundle_folder import PARTIAL, is_bundle, versions
from model_adapters.loading.memory import gigabytes
from torchax_serve.export.manifest import Manifest


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
    try:
        (partial / "programs").mkdir(parents=True)
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
        if is_new:
            with contextlib.suppress(OSError):  # it has a version
                out.rmdir()


def _numbers(out: Path) -> list[int]:
    """Returns the numbers that are taken, whether or not the version is complete."""
    return [int(each.name) for each in out.iterdir() if each.name.isdigit()] + versions(out)
