"""Images, videos and audio of a chat by address, fetched from hosts on a list only.

A name must lead to public addresses only, and the connection is made to one that was checked; so is each redirect. A
host that is listed by its address is the operator's word for that address.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.options import MIB

MAX_FILE_BYTES = 16 * MIB
"""Most bytes of a file."""
TIMEOUT_S = 10.0
"""Most seconds for a file, redirects included."""
MAX_REDIRECTS, MAX_FILES = 3, 8
"""Most redirects of a file, and most files of a request."""
_FIELDS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "audio_url": "audio_url",
    "video_url": "video_url",
}


@dataclasses.dataclass(frozen=True)
class _Place:
    """A part of a message whose file is an address."""

    where: str
    part: dict[str, Any]
    field: str
    url: str

    def put(self, data: bytes) -> None:
        """Writes the file in place of its address."""
        url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
        inner = self.part[self.field]
        self.part[self.field] = {**inner, "url": url} if isinstance(inner, dict) else url


async def with_remote_files(messages: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns messages with the files at their addresses, as data URLs.

    Args:
        messages: Of the request.
        hosts: Names and addresses that files may come from, with ``:PORT`` where it is another than the scheme's.

    Raises:
        ApiError: 400 for an address that is not allowed, and for one that cannot be read.
    """
    found = [_copied(message) for message in messages]
    places = list(_places(found)) if hosts else []
    if len(places) > MAX_FILES:
        message = f"messages: expected at most {MAX_FILES} files to fetch, got {len(places)}"
        raise bad_request(message, "messages", "invalid_value")
    files = await asyncio.gather(*(asyncio.to_thread(fetch, each.where, each.url, hosts) for each in places))
    for place, data in zip(places, files, strict=True):
        place.put(data)
    return found


def _copied(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [dict(part) if isinstance(part, dict) else part for part in content]}


def _places(messages: Sequence[dict[str, Any]]) -> Iterator[_Place]:
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            field = _FIELDS.get(str(part.get("type"))) if isinstance(part, dict) else None
            given = None if field is None else part.get(field)
            url = given.get("url") if isinstance(given, dict) else given
            if field is not None and isinstance(url, str) and url.startswith(("http://", "https://")):
                yield _Place(f"messages[{number}].content[{index}]", part, field, url)


def fetch(where: str, url: str, hosts: Sequence[str]) -> bytes:
    """Returns the file at an address.

    Raises:
        ApiError: 400, of the field `where`: it may not be fetched, is not there in time, or is too large.
    """
    until = time.monotonic() + TIMEOUT_S
    try:
        for _ in range(MAX_REDIRECTS + 1):
            answer = _get(where, url, hosts, until)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(where, f"a file that can be read within {TIMEOUT_S:g} s, got {type(error).__name__}") from error
    raise _refused(where, f"at most {MAX_REDIRECTS} redirects, got more")


def _get(where: str, url: str, hosts: Sequence[str], until: float) -> bytes | str:
    """Returns the file at an address, or where it is instead."""
    parts = urlsplit(url)
    address = _address(where, parts, hosts)
    connection = _Connection(parts, address, max(0.1, until - time.monotonic()))
    deadline = threading.Timer(connection.timeout_s, connection.abort)  # whatever the server sends until then
    deadline.start()
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "torchax-serve"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("Location") or ""
        if answer.status != 200:
            raise _refused(where, f"a file, got the status {answer.status}")
        data = bytearray()
        while piece := answer.read1(1 << 16):
            data += piece
            if len(data) > MAX_FILE_BYTES:
                raise _refused(where, f"at most {MAX_FILE_BYTES} bytes, got more")
        if time.monotonic() > until:
            raise TimeoutError
        return bytes(data)
    finally:
        deadline.cancel()
        connection.close()


def _address(where: str, parts: SplitResult, hosts: Sequence[str]) -> str:
    """Returns the address of a host that is allowed."""
    name, port = parts.hostname or "", parts.port
    is_plain = parts.scheme in ("http", "https") and parts.username is None and parts.password is None
    shown = name if port is None else f"{name}:{port}"
    if not is_plain or shown not in hosts:
        raise _refused(where, "a data URL, or one of a host that the server is allowed to fetch from, got another")
    found = socket.getaddrinfo(name, port or _port_of(parts), type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    is_listed = all(address == name for address in addresses)
    if not is_listed and not all(map(_is_public, addresses)):
        raise _refused(where, "a host with public addresses, got another")
    return addresses[0]


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)  # an address of the old kind in the new one's form
    return (mapped or found).is_global


def _port_of(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80


def _refused(where: str, what: str) -> ApiError:
    return bad_request(f"{where}: expected {what}", where, "invalid_value")


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked, by the name that it was found by."""

    def __init__(self, parts: SplitResult, address: str, timeout_s: float) -> None:
        super().__init__(parts.hostname or "", parts.port or _port_of(parts), timeout=timeout_s)
        self._address, self.timeout_s, self._is_secure = address, timeout_s, parts.scheme == "https"

    def connect(self) -> None:
        """Connects; its certificate is that of the name."""
        self.sock = socket.create_connection((self._address, self.port), self.timeout_s)
        if self._is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def abort(self) -> None:
        """Ends what is being read; called from another thread."""
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)
