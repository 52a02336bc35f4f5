"""Sealed files that outlive the process, in folders of the user's own.

Each file is checked before it is used.

The content of these files is run: machine code, shared libraries, pickles. Two things must never reach a caller: bytes
that another user could have put there, and bytes that are not the ones that were written. So a folder and its files
must belong to the user and be writable by no one else (they are made so, 0700 and 0600), and each file ends with a
seal: an HMAC-SHA256 of its name and content under a key in the same folder, readable only by the user. A
checksum would find flipped bits as well; the key also finds files that were copied in from another folder or under
another name.

Folders above the cache folder are not examined: whoever can write there can put another folder in this one's place, but
cannot make the user its owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

logger = logging.getLogger("torchax_serve")

MARK = b"torchax-serve sealed file 1\n"
SEAL_BYTES = 32 + len(MARK)
"""Number of bytes of the seal, at the end, so that a sealed shared library is still one."""
KEY_NAME, KEY_BYTES = ".key", 32
PARTIAL = ".partial-"
PARTIAL_LIFE_S = 3600.0
"""Age in seconds from which a partially written file is assumed to be of a dead process."""
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_WARNED: set[str] = set()


def cache_root() -> Path:
    """Returns the user's cache folder of this project.

    The folder is ``$XDG_CACHE_HOME/torchax-serve``, else one under ``~/.cache``.

    Raises:
        RuntimeError: there is no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchax-serve"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of a sealed folder, with its size and the time of its last use.

    The size includes the seal; the time is that of the last read or write (seconds since 1970).
    """

    path: Path
    num_bytes: int
    last_used: float


class FileSeal(NamedTuple):
    """What tells a file from others without a look at all of it."""

    seal: bytes
    num_bytes: int
    changed_ns: int


class SealedFolder:
    """A folder of sealed files, for one user; any number of processes read and write it at once.

    Args:
        path: of the folder, made at the first write.
        content: a description of the files, for the one warning when the folder cannot be trusted.
    """

    def __init__(self, path: Path, content: str = "compiled programs") -> None:
        self.path, self._content = path, content

    def untrusted_reason(self) -> str | None:
        """Returns why the folder is not used, with the remedy; None if it can be used.

        Nothing is read from or written to one that cannot. A folder that does not exist yet can be used.
        """
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror})"
        if not stat.S_ISDIR(status.st_mode):
            return f"{self.path} is no folder; remove it"
        return _not_private(status, self.path)

    def is_trusted(self) -> bool:
        """Returns whether the folder can be used; warns once for each folder that cannot."""
        reason = self.untrusted_reason()
        if reason is not None:
            self._warn(reason)
        return reason is None

    def check_writable(self) -> None:
        """Makes the folder if it does not exist.

        Raises:
            OSError: it cannot be made or written, or is not to be trusted; the message names the folder.
        """
        try:
            self._make()
        except NotPrivateError:
            raise
        except OSError as error:
            raise OSError(f"{self.path} cannot be made ({error.strerror})") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise OSError(f"{self.path} cannot be written")

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file with a valid seal; None if there is no such file.

        A damaged, truncated or foreign file is removed, so that the next write replaces it.
        """
        if not self.is_trusted():
            return None
        try:
            content = self._verified(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NotPrivateError as error:
            self._warn(str(error))
            return None
        except (OSError, DamagedError) as error:
            report_damage(self._content, self.path / name, str(error))
            self.remove(name)
            return None
        with contextlib.suppress(OSError):  # a file system that is read-only: eviction knows less, nothing else
            os.utime(self.path / name)
        return content

    def has(self, name: str) -> bool:
        """Returns whether `read` finds the file."""
        return self.read(name) is not None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in one step: no reader sees a part of it, and the last writer wins.

        Raises:
            OSError: the folder cannot be made or written, or is not to be trusted.
        """
        self.write_pieces(name, [content])

    def write_pieces(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a file as `write`, piece by piece.

        Raises:
            OSError: the folder cannot be made or written, or is not to be trusted.
        """
        self._make()
        partial = self.path / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(8)}"
        mac = hmac.new(self._key(), name.encode() + b"\0", "sha256")
        try:
            with _opened_new(partial) as file:
                for piece in pieces:
                    mac.update(piece)
                    file.write(piece)
                file.write(mac.digest() + MARK)
            os.replace(partial, self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def state_of(self, name: str) -> FileSeal | None:
        """Returns an unchecked seal with the file's size and time; None without such a file."""
        try:
            with _opened_private(self.path / name) as file:
                status = os.fstat(file.fileno())
                file.seek(-min(SEAL_BYTES, status.st_size), os.SEEK_END)
                return FileSeal(file.read(), status.st_size, status.st_mtime_ns)
        except (OSError, DamagedError):
            return None

    def remove(self, name: str) -> None:
        """Removes a file; ignores one that is missing or cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(self.path / name)

    def entries(self) -> Iterator[Entry]:
        """Yields the files, without the key, locks and partially written files."""
        for found in self._files():
            if not found.name.startswith("."):
                with contextlib.suppress(OSError):
                    status = found.stat(follow_symlinks=False)
                    yield Entry(Path(found.path), status.st_size, max(status.st_mtime, status.st_atime))

    def damage(self, name: str) -> str | None:
        """Returns a description of a file's damage; None if its content can be used.

        Changes nothing.
        """
        try:
            if (reason := self.untrusted_reason()) is not None:
                return reason
            self._verified(name)
        except (OSError, DamagedError) as error:
            return str(error)
        return None

    def remove_partial(self) -> None:
        """Removes half-written files of processes that have died."""
        for found in self._files():
            with contextlib.suppress(OSError):
                if found.name.startswith(PARTIAL) and time.time() - found.stat().st_mtime > PARTIAL_LIFE_S:
                    os.unlink(found.path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(OSError), os.scandir(self.path) as found:
            yield from (each for each in found if each.is_file(follow_symlinks=False))

    def _make(self) -> None:
        _make_private(self.path)
        if (reason := self.untrusted_reason()) is not None:
            raise NotPrivateError(reason)

    def _verified(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            OSError: it cannot be read.
            NotPrivateError: others can write it.
            DamagedError: its seal is not right.
        """
        sealed = _read_private(self.path / name)
        if len(sealed) < SEAL_BYTES or not sealed.endswith(MARK):
            raise DamagedError("it has no seal")
        content, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES : -len(MARK)]
        key = self._stored_key()
        if key is None or not hmac.compare_digest(seal, self._seal(name, content, key)):
            raise DamagedError("its content is not what was written")
        return content

    @staticmethod
    def _seal(name: str, content: bytes, key: bytes) -> bytes:
        mac = hmac.new(key, name.encode() + b"\0", "sha256")
        mac.update(content)
        return mac.digest()

    def _stored_key(self) -> bytes | None:
        """Returns the folder's key; None if there is none, or a damaged one.

        Raises:
            NotPrivateError: there is one that cannot be used: its files are not to blame.
        """
        try:
            key = _read_private(self.path / KEY_NAME)
        except FileNotFoundError:
            return None
        except NotPrivateError:
            raise
        except (OSError, DamagedError) as error:
            raise NotPrivateError(f"{self.path / KEY_NAME} cannot be read ({error}); remove it") from error
        return key if len(key) == KEY_BYTES else None

    def _key(self) -> bytes:
        """Returns the folder's key, made at the first write.

        If several processes make one, all take the first.
        """
        if (key := self._stored_key()) is not None:
            return key
        partial = self.path / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(8)}"
        with _opened_new(partial) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(partial, self.path / KEY_NAME)
        except OSError:  # there is one, valid or damaged; or the file system has no links
            if (key := self._stored_key()) is None:
                os.replace(partial, self.path / KEY_NAME)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        key = key or self._stored_key()
        if key is None:
            raise OSError(f"no key can be kept in {self.path}")
        return key

    def _warn(self, reason: str) -> None:
        if reason not in _WARNED:
            _WARNED.add(reason)
            logger.warning("%s are not taken from disk: %s", self._content, reason)


class NotPrivateError(OSError):
    """A file or folder that others than the user own or can write."""


class DamagedError(Exception):
    """A file whose seal is missing or wrong."""


def touch(path: Path) -> None:
    """Notes that a file is used, without a change of its state (`SealedFolder.state_of`)."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


def report_damage(content: str, path: Path, reason: str) -> None:
    """Logs that a file is not used: the first of a process as a warning."""
    level = logging.INFO if "damage" in _WARNED else logging.WARNING
    _WARNED.add("damage")
    logger.log(level, "%s: %s is damaged (%s); it is made anew", content, path, reason)


def keep_within(folders: Iterable[SealedFolder], max_bytes: int) -> list[Entry]:
    """Removes the least recently used files until `folders` hold at most `max_bytes`.

    Returns the removed files.
    """
    folders = list(folders)
    for folder in folders:
        folder.remove_partial()
    entries = sorted((entry for folder in folders for entry in folder.entries()), key=lambda entry: entry.last_used)
    total, removed = sum(entry.num_bytes for entry in entries), []
    for entry in entries:
        if total <= max_bytes:
            break
        with contextlib.suppress(OSError):  # another process was first
            entry.path.unlink()
        total -= entry.num_bytes
        removed.append(entry)
    return removed


def open_lock(path: Path) -> int:
    """Opens a file to lock, made 0600; returns its descriptor."""
    _make_private(path.parent)
    return os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)


def _make_private(folder: Path) -> None:
    """Makes a folder, 0700, and the missing ones above it."""
    if not folder.exists():
        _make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _opened_new(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600), "wb")


def _read_private(path: Path) -> bytes:
    """Returns the content of a file of the user's own."""
    with _opened_private(path) as file:
        return file.read()


@contextlib.contextmanager
def _opened_private(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file of the user's own, examined after opening against replacement."""
    flags = os.O_RDONLY | _NO_FOLLOW
    try:  # without a change of the time of access, which says when a file was used (`touch`)
        descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # not the user's own, which is said below
        descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is no file")
        if (reason := _not_private(status, path)) is not None:
            raise NotPrivateError(reason)
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _not_private(status: os.stat_result, path: Path) -> str | None:
    """Returns why another user may have written a file or folder, and the remedy.

    None if no other user can, and on systems without owners.
    """
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to user {status.st_uid}, and you are user {os.geteuid()}; remove it, or set "
            "XDG_CACHE_HOME to a folder of your own"
        )
    if status.st_mode & 0o022:
        return (
            f"{path} can be written by others than you (mode {stat.S_IMODE(status.st_mode):04o}); if nobody has, "
            f"run: chmod -R go-w {path}"
        )
    return None
