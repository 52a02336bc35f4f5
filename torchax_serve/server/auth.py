"""API keys: read from options and a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.errors import ApiError
from torchax_serve.server.key_limits import ApiKey, KeyLimits

logger = logging.getLogger("torchax_serve.server")

MIN_KEY_CHARS = 8
"""Shortest key, in characters."""
CALLER = "torchax_serve.caller"
"""Entry of the scope of a request of this process, with the key that it is of; no client can set it."""
ANYBODY = "anybody"
"""Owner of what is stored by a server without keys."""
_BY_POSITION = re.compile(r"key-\d+")
"""Names of keys that were given without one: they change as keys are added."""


class ApiKeys:
    """The keys with which requests may come. None at all: any request may.

    A file of keys is read again when it changes; while it cannot be read, the keys of before stay.

    Args:
        keys: Names and keys; words behind a key are its limits, as `KeyLimits.parse` takes them.
        file: File with ``NAME:KEY`` or ``KEY`` a line, limits behind it; or None.
        secret: What digests of keys are made with; None: drawn anew. Owners stay the same with the same one.

    Raises:
        InvalidArgumentError: The file is not readable, or a key is too short.
    """

    def __init__(
        self, keys: Iterable[tuple[str, str]] = (), file: Path | None = None, secret: bytes | None = None
    ) -> None:
        self._secret = secret or secrets.token_bytes(32)  # digests say nothing about keys, and are all of one length
        self._given = self._by_digest(keys)
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._from_file: dict[bytes, ApiKey] = {}
        if file is not None:
            self._from_file, self._stamp = self._read(file), _stamp_of(file)

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return self._file is None and not self._given

    @property
    def limits_models(self) -> bool:
        """Whether a key may not use all models."""
        return any(key.limits.models for key in (*self._given.values(), *self._from_file.values()))

    def key_of(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """Returns name and limits of the key in a request's headers; None if no key is needed.

        Raises:
            ApiError: 401 without a key, or with one that is unknown.
        """
        if self.is_open:
            return None
        given = _keys_in(headers)
        if len(given) != 1:
            raise _refused("expected one API key in the header Authorization: Bearer, got none or several")
        digest = self._digest(given[0])
        self._refresh()
        found = None
        for known, key in (*self._given.items(), *self._from_file.items()):  # all, so that times tell nothing
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _refused("Incorrect API key provided.")
        return found

    def of_owner(self, owner: str) -> ApiKey | None:
        """Returns the key of an owner; None if it does not exist any more, or if no key is needed."""
        self._refresh()
        every = (*self._given.values(), *self._from_file.values())
        return next((key for key in every if key.owner == owner), None)

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            stamp = _stamp_of(self._file)
            if stamp != self._stamp:
                self._from_file, self._stamp = self._read(self._file), stamp
                logger.info("the file of API keys was read again: %d keys", len(self._from_file))
        except (InvalidArgumentError, OSError):
            logger.warning("the file of API keys cannot be read; those of before stay")
            self._stamp = None

    def _by_digest(self, keys: Iterable[tuple[str, str]]) -> dict[bytes, ApiKey]:
        found = {}
        for name, text in keys:
            key, *limits = text.split() or [""]
            _check(name, key)
            digest = self._digest(key)
            # A name by position may be another key's after the next start.
            of_key = hashlib.sha256(b"owner" + digest).hexdigest()[:32] if _BY_POSITION.fullmatch(name) else None
            owner = f"name {name}" if of_key is None else f"key {of_key}"
            found[digest] = ApiKey(name, KeyLimits.parse(name, limits), owner)
        return found

    def _read(self, file: Path) -> dict[bytes, ApiKey]:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"api_key_file: expected a file of text, got {file} ({error})") from error
        pairs = []
        for number, line in enumerate(lines):
            line = line.strip()
            if line and not line.startswith("#"):
                name, colon, key = line.partition(":")
                pairs.append((name, key) if colon else (f"key-{number}", line))
        return self._by_digest(pairs)


def owner_of(key: ApiKey | None) -> str:
    """Returns whose what a request stores is."""
    return ANYBODY if key is None else key.owner


def check_for_all_models(key: ApiKey | None) -> None:
    """Raises ApiError, 403, for a key that is limited to some models."""
    if key is not None and key.limits.models:
        raise ApiError(403, "expected a key for all models, got one that is limited to some; use another")


def _check(name: str, key: str) -> None:
    if len(key) < MIN_KEY_CHARS or not key.isascii():
        raise InvalidArgumentError(
            f"API key {name!r}: expected at least {MIN_KEY_CHARS} ASCII characters without spaces, got others; "
            "make one: openssl rand -hex 32"
        )


def _stamp_of(file: Path) -> tuple[int, int]:
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_size


def _keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    found = []
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            kind, _, key = text.partition(" ")
            found.append(key.strip() if kind.lower() == "bearer" else "")
        elif name in (b"x-api-key", b"api-key"):
            found.append(text)
    # Clients of several dialects send the same key in both headers.
    return list(dict.fromkeys(found))


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
