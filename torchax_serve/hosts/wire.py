"""Frames on a TCP connection between two hosts.

A frame is a kind, one byte, a length, eight bytes, and so many bytes. What followers send is JSON. What the leader
sends is pickled: a follower runs what the leader whose address it was given says, as everywhere in `jax.distributed`.
The leader unpickles nothing.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import select
import socket
import struct
import threading
from typing import Any

HEAD = struct.Struct("!cQ")
BEAT, SAID, ORDER = b"b", b"s", b"o"
LONGEST_SAID = 1 << 20
SEND_TIMEOUT_S = 15.0


class Wire:
    """One end of a connection. Any thread may send; one receives, and takes no orders unless it says so."""

    def __init__(self, sock: socket.socket, *, takes_orders: bool = False) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._kinds = sock, (BEAT, SAID, ORDER) if takes_orders else (BEAT, SAID)
        self._sending = threading.Lock()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Sends a frame; OSError where the connection is gone or nothing is taken for `SEND_TIMEOUT_S`."""
        with self._sending:
            self._socket.sendall(HEAD.pack(kind, len(content)) + content)

    def say(self, **said: Any) -> None:
        """Sends a few words as JSON."""
        self.send(SAID, json.dumps(said).encode())

    def order(self, order: Any) -> None:
        """Sends an object for the other side to act upon."""
        self.send(ORDER, pickle.dumps(order))

    def receive(self, wait_s: float) -> tuple[bytes, Any] | None:
        """Kind and content of the next frame; None if none begins within `wait_s`.

        Raises:
            OSError: the connection has ended, or what came is no frame.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(wait_s * 1000):
            return None
        kind, length = HEAD.unpack(self._exactly(HEAD.size))
        if kind not in self._kinds or (kind != ORDER and length > LONGEST_SAID):
            raise OSError("what came is not of this program")
        content = self._exactly(length)
        if kind == SAID:
            return kind, _words(content)
        return kind, content

    def _exactly(self, number: int) -> bytes:
        parts = bytearray()
        while len(parts) < number:
            part = self._socket.recv(min(number - len(parts), 1 << 20))
            if not part:
                raise OSError("the connection was closed")
            parts += part
        return bytes(parts)

    def hang_up(self) -> None:
        """Nothing more will be sent or received, which whoever is receiving notices."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def _words(content: bytes) -> dict[str, Any]:
    try:
        words = json.loads(content)
    except ValueError as error:
        raise OSError("what came is not of this program") from error
    if not isinstance(words, dict):
        raise OSError("what came is not of this program")
    return words
