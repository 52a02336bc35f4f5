"""Sends and receives frames on a TCP connection between two hosts.

A frame has a kind (1 byte), a length (8 bytes), its content, and after a handshake a MAC of 32 bytes, which proves
that it is the next one from the host that has shown the secret. What followers send is JSON; what the leader sends is
encoded by `torchax_serve/distributed/hosts/message_codec.py`. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from torchax_serve.distributed.hosts.handshake import MAC_BYTES, Session, receive_exactly
from torchax_serve.distributed.hosts.message_codec import encode
from torchax_serve.validation.bounded_json import parse_json

HEAD = struct.Struct("!cQ")
BEAT, SAID, ORDER = b"b", b"s", b"o"
LONGEST_SAID = 1 << 20
LONGEST_ORDER = 1 << 31
FRAME_TIMEOUT_S = 60.0
"""Time limit from the first byte of a frame to its last, in seconds."""
SEND_TIMEOUT_S = 15.0
NOT_OURS = "what came is not of this program"


class Connection:
    """End of a connection. Any thread may send; one receives.

    The receiver accepts commands only with `accepts_commands`.

    Args:
        sock: Connected socket.
        accepts_commands: Whether the other side is the leader, whose commands are accepted.
        session: Session of the handshake; None for frames without MACs.
    """

    def __init__(self, sock: socket.socket, *, accepts_commands: bool = False, session: Session | None = None) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._kinds = sock, (BEAT, SAID, ORDER) if accepts_commands else (BEAT, SAID)
        self._session = session
        self._sending = threading.Lock()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Sends a frame; raises OSError if the connection is gone or blocked for `SEND_TIMEOUT_S`."""
        frame = HEAD.pack(kind, len(content)) + content
        with self._sending:
            self._socket.sendall(frame if self._session is None else frame + self._session.seal(frame))

    def send_status(self, **said: Any) -> None:
        """Sends a status message as JSON."""
        self.send(SAID, json.dumps(said).encode())

    def send_command(self, order: Any) -> None:
        """Sends a command to the other side.

        Raises:
            UnsupportedArgumentError: A value in it cannot be encoded.
        """
        self.send(ORDER, encode(order))

    def receive(self, wait_s: float, *, longest: int = LONGEST_SAID) -> tuple[bytes, Any] | None:
        """Returns kind and content of the next frame; None if none begins within `wait_s` seconds.

        Args:
            wait_s: seconds.
            longest: Largest size of a status message, in bytes.

        Raises:
            OSError: The connection has ended, or the bytes are no frame of the other host.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(wait_s * 1000):
            return None
        deadline = time.monotonic() + FRAME_TIMEOUT_S
        head = receive_exactly(self._socket, HEAD.size, deadline)
        kind, length = HEAD.unpack(head)
        if kind not in self._kinds or length > (LONGEST_ORDER if kind == ORDER else longest):
            raise OSError(NOT_OURS)
        content = receive_exactly(self._socket, length, deadline)
        if self._session is not None:
            mac = receive_exactly(self._socket, MAC_BYTES, deadline)
            if not self._session.is_next(head + content, mac):
                raise OSError("what came is not of the host that has joined")
        return kind, _words(content) if kind == SAID else content

    def shutdown(self) -> None:
        """Shuts the socket down, which ends a waiting `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def _words(content: bytes) -> dict[str, Any]:
    try:
        words = parse_json(content, max_bytes=len(content))
    except ValueError as error:
        raise OSError(NOT_OURS) from error
    if not isinstance(words, dict):
        raise OSError(NOT_OURS)
    return words
