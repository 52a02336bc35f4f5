"""JSON objects on disk, each in a file that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.errors import ApiError

logger = logging.getLogger("torchax_serve.server")

SUFFIX = ".json"
TEMPORARY = ".tmp"


class Records:
    """Objects by id in a folder. A change is written to another name and renamed.

    Args:
        folder: Folder, which is made; others of this machine cannot read it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self) -> Iterator[dict[str, Any]]:
        """Yields all objects; what a process that was killed has left goes."""
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(TEMPORARY):
                path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                try:
                    found = json.loads(path.read_bytes())
                except ValueError:
                    found = None
                if isinstance(found, dict) and found.get("id") == path.stem:
                    yield found
                else:
                    logger.warning("%s is no record of this server, and is left as it is", path)

    def put(self, record: Mapping[str, Any]) -> None:
        """Writes an object under its `id`; raises OSError, and the one of before stays."""
        path = self._folder / f"{record['id']}{SUFFIX}"
        temporary = path.with_name(f".{path.name}{TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.write(json.dumps(record).encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def drop(self, record_id: str) -> None:
        """Deletes an object."""
        (self._folder / f"{record_id}{SUFFIX}").unlink(missing_ok=True)


def open_folder(folder: Path) -> tuple[Any, bytes]:
    """Makes a folder of a server's own; returns its lock, and a secret that stays in it.

    The lock is held until it is closed.

    Raises:
        InvalidArgumentError: It cannot be written, or another server has it.
    """
    import fcntl

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise InvalidArgumentError(
            f"file_storage_path: expected a folder that can be written, got {folder} ({error.strerror}); choose another"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InvalidArgumentError(
            f"file_storage_path: expected a folder of this server alone, got {folder}, which another one has; "
            "choose another"
        ) from error
    try:
        return lock, _secret(folder / "secret")
    except OSError as error:
        lock.close()
        raise InvalidArgumentError(
            f"file_storage_path: expected a folder with room, got {folder} ({error.strerror}); choose another"
        ) from error


def _secret(path: Path) -> bytes:
    if path.exists() and len(found := path.read_bytes()) == 32:
        return found
    made, temporary = secrets.token_bytes(32), path.with_name(f".secret{TEMPORARY}")
    temporary.write_bytes(made)
    temporary.chmod(0o600)
    temporary.replace(path)
    return made


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turns an error of the disk into the answer to a request."""
    try:
        yield
    except OSError as error:
        logger.error("the folder of files cannot be written: %s", error.strerror)
        message = f"expected room in the folder of files, and the disk says: {error.strerror}; send it again later"
        raise ApiError(503, message, code="storage_unavailable", headers={"Retry-After": "30"}) from error


def write_all(file: Any, content: bytes) -> None:
    """Writes all of `content`, of which a file may take a part at a time. Raises OSError."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
