"""Files that requests store in a folder, for each key apart and bounded."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchax_serve.server.batch.records import Records, storage_errors, write_all
from torchax_serve.server.errors import ApiError, bad_request

PART = ".part"
"""End of the name of a content that is still written."""
_CONTENT = re.compile(rf"file-[0-9a-f]{{32}}({re.escape(PART)})?")


class FileLimits(NamedTuple):
    """Limits of a store.

    Attributes:
        max_files: Files of one key.
        max_bytes: Bytes of the files of one key together.
        max_file_bytes: Bytes of one file that is sent.
        max_age_s: Seconds after which a file is dropped.
    """

    max_files: int
    max_bytes: int
    max_file_bytes: int
    max_age_s: float


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of a store.

    Attributes:
        id: Its name, which cannot be guessed.
        owner: Whose it is.
        filename: Name that its owner has given.
        purpose: ``batch`` or ``batch_output``.
        num_bytes: Bytes of its content.
        created_s: When it was stored, in seconds since 1970.
        expires_s: When it is dropped.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int

    def shown(self) -> dict[str, Any]:
        """Returns the file as OpenAI's interface has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files by id.

    A content is renamed when it is whole, and its record, written last, makes it a file.

    Calls may come from any thread.

    Args:
        folder: Folder of records and contents.
        limits: Limits.
        clock: Seconds since 1970.
    """

    def __init__(self, folder: Path, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._folder, self._clock = folder, clock
        self._lock = threading.RLock()
        self._records = Records(folder)
        self._files: dict[str, StoredFile] = {}
        self._reserved: collections.Counter[str] = collections.Counter()  # bytes of files that come, by owner
        self._num_coming: collections.Counter[str] = collections.Counter()
        self._pins: collections.Counter[str] = collections.Counter()
        for record in self._records.load():
            with contextlib.suppress(TypeError):
                file = StoredFile(**record)
                if self.content_path(file.id).exists():
                    self._files[file.id] = file
                else:  # the process was killed between the two steps of its end
                    self._records.drop(file.id)

    def sweep(self, keep: Collection[str]) -> None:
        """Deletes contents without a record but for those of `keep`, of batches that run."""
        with self._lock:
            for path in self._folder.iterdir():
                name = path.name.removesuffix(PART)
                is_file = name in self._files and path.name == name
                if _CONTENT.fullmatch(path.name) and not is_file and name not in keep:
                    path.unlink(missing_ok=True)

    def content_path(self, file_id: str) -> Path:
        """Returns where the content of a file is."""
        return self._folder / file_id

    def part_path(self, file_id: str) -> Path:
        """Returns where the content of a file is written before it is whole."""
        return self._folder / f"{file_id}{PART}"

    def begin(self, owner: str) -> Upload:
        """Begins a file, whose content comes in parts.

        Raises:
            ApiError: 400 if its owner has too many, 503 if it cannot be written.
        """
        with self._lock:
            number = len(self.list(owner)) + self._num_coming[owner]
            if number >= self.limits.max_files:
                raise _full(f"expected at most {self.limits.max_files} files of a key, got one more")
            file_id = new_file_id()
            with storage_errors():
                file = self.part_path(file_id).open("wb", buffering=0)
            self._num_coming[owner] += 1
            return Upload(self, owner, file_id, file)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Takes bytes for a file that comes; raises ApiError, 400, if its owner has no room."""
        with self._lock:
            if self.num_bytes(owner) + num_bytes > self.limits.max_bytes:
                raise _full(f"expected files of at most {self.limits.max_bytes} bytes of a key, got more")
            self._reserved[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Gives back what `begin` and `reserve` have taken for a file."""
        with self._lock:
            self._reserved[owner] -= num_bytes
            self._num_coming[owner] -= 1

    def num_bytes(self, owner: str) -> int:
        """Returns the bytes of the files of an owner, with those of files that come."""
        with self._lock:
            return self._reserved[owner] + sum(each.num_bytes for each in self._files.values() if each.owner == owner)

    def add(self, file_id: str, owner: str, filename: str, purpose: str, max_age_s: float | None = None) -> StoredFile:
        """Returns the file of a content that is whole, which is made if need be. Raises OSError."""
        with self._lock:
            if file_id in self._files:
                return self._files[file_id]
            if (part := self.part_path(file_id)).exists():
                part.replace(self.content_path(file_id))
            num_bytes, now = self.content_path(file_id).stat().st_size, int(self._clock())
            until = now + int(min(max_age_s or self.limits.max_age_s, self.limits.max_age_s))
            file = StoredFile(file_id, owner, filename, purpose, num_bytes, now, until)
            self._records.put(dataclasses.asdict(file))
            self._files[file_id] = file
            return file

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Returns a file of an owner.

        Raises:
            ApiError: 404 for one that is unknown, too old, deleted, or another owner's.
        """
        with self._lock:
            found = self._files.get(file_id)
            if found is None or found.owner != owner or self._is_old(found):
                message = "expected the id of a file of this key, got one that is unknown or was dropped"
                raise ApiError(404, f"file_id: {message}; GET /v1/files lists those that are", param="file_id")
            return found

    def list(self, owner: str) -> list[StoredFile]:
        """Returns the files of an owner, the newest first."""
        with self._lock:
            found = [each for each in self._files.values() if each.owner == owner and not self._is_old(each)]
        return sorted(found, key=lambda each: (each.created_s, each.id), reverse=True)

    def open(self, owner: str, file_id: str) -> tuple[StoredFile, BinaryIO]:
        """Returns a file and its content, which outlives it. Raises as `get`."""
        with self._lock:
            found = self.get(owner, file_id)
            with storage_errors():
                return found, self.content_path(file_id).open("rb")

    def delete(self, owner: str, file_id: str) -> None:
        """Deletes a file.

        Raises:
            ApiError: As `get`; 409 while a batch reads it; 503 if the disk refuses.
        """
        with self._lock:
            self.get(owner, file_id)
            if self._pins[file_id]:
                message = "expected a file that no batch reads, got one of a batch that has not ended; cancel it first"
                raise ApiError(409, message, param="file_id", code="conflict")
            with storage_errors():
                self._drop(file_id)

    def pin(self, owner: str, file_id: str) -> StoredFile:
        """Returns a file, which stays from now on until `unpin`; raises as `get`."""
        with self._lock:
            found = self.get(owner, file_id)
            self.restore_pin(file_id)
            return found

    def unpin(self, file_id: str) -> None:
        """Ends the use of a file that `pin` or `restore_pin` has begun."""
        with self._lock:
            self._pins[file_id] -= 1

    def restore_pin(self, file_id: str) -> None:
        """Keeps a file of a batch from before a restart, whether it is there or not."""
        with self._lock:
            self._pins[file_id] += 1

    def drop_old(self) -> None:
        """Deletes the files that are too old. Raises OSError."""
        with self._lock:
            for file_id in [each.id for each in self._files.values() if self._is_old(each)]:
                self._drop(file_id)

    def _is_old(self, file: StoredFile) -> bool:
        return not self._pins[file.id] and file.expires_s <= self._clock()

    def _drop(self, file_id: str) -> None:
        # The record first: without it the content is nothing, and goes at the next start at the latest.
        self._records.drop(file_id)
        self._files.pop(file_id, None)
        self.content_path(file_id).unlink(missing_ok=True)


class Upload:
    """A file whose content comes.

    Args:
        store: Where it will be.
        owner: Whose it will be.
        file_id: Its id.
        file: Its content.
    """

    def __init__(self, store: FileStore, owner: str, file_id: str, file: Any) -> None:
        self._store, self._owner, self._file_id, self._file = store, owner, file_id, file
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Takes a part of the content; raises ApiError if it has no room."""
        most = self._store.limits.max_file_bytes
        if self.num_bytes + len(data) > most:
            raise ApiError(413, f"file: expected at most {most} bytes, got more; split it", param="file")
        self._store.reserve(self._owner, len(data))
        self.num_bytes += len(data)
        with storage_errors():
            write_all(self._file, data)

    def finish(self, filename: str, purpose: str, max_age_s: float | None = None) -> StoredFile:
        """Returns the file, which is on the disk. Raises ApiError, 503, if it cannot be."""
        with storage_errors():
            os.fsync(self._file.fileno())
            self._file.close()
            file = self._store.add(self._file_id, self._owner, filename, purpose, max_age_s)
        self._store.give_back(self._owner, self.num_bytes)
        return file

    def abandon(self) -> None:
        """Deletes what has come."""
        self._file.close()
        self._store.give_back(self._owner, self.num_bytes)
        for path in (self._store.part_path(self._file_id), self._store.content_path(self._file_id)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def new_file_id() -> str:
    """Returns an id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def _full(message: str) -> ApiError:
    return bad_request(f"{message}; delete some by DELETE /v1/files/{{file_id}}", "file", "storage_full")
