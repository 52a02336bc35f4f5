"""Handshake: two hosts prove that they have the same secret, before either reads a message.

Both send a number that was never used before (a nonce). Each then proves the secret by an HMAC-SHA256 over both numbers
and its own role, the follower first: a leader that any process can call reveals nothing that a guess could be checked
against. A recorded handshake is useless for another one, since the other side's number differs; a proof sent back to
its maker is refused, since the role differs. Keys for the frames of both directions come from the same numbers.

Without a secret the steps are the same under an empty key: that detects strangers with another protocol, and proves
nothing.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import select
import socket
import time

MAGIC = b"torchax-serve/1\n"
WITH_SECRET, WITHOUT = b"s", b"-"
NONCE_BYTES = MAC_BYTES = 32
GREETING_BYTES = len(MAGIC) + 1 + NONCE_BYTES
PASSED, REFUSED = b"y", b"n"


class NotAHostError(OSError):
    """The other side speaks another protocol, hangs up or is too slow."""


class SecretError(Exception):
    """The other host has another secret, or none; the message says which."""


@dataclasses.dataclass
class Session:
    """Keys and frame counters of one connection: no frame is accepted twice, or out of order."""

    send_key: bytes
    receive_key: bytes
    num_sent: int = 0
    num_received: int = 0

    def seal(self, frame: bytes) -> bytes:
        """Returns the MAC of the next frame to be sent."""
        self.num_sent += 1
        return _mac(self.send_key, self.num_sent.to_bytes(8), frame)

    def is_next(self, frame: bytes, mac: bytes) -> bool:
        """Returns whether `mac` is that of the next frame to be received."""
        self.num_received += 1
        return hmac.compare_digest(mac, _mac(self.receive_key, self.num_received.to_bytes(8), frame))


def greet_leader(sock: socket.socket, secret: bytes | None, deadline: float) -> Session:
    """Proves the secret to the leader and verifies the leader's proof; the follower's part.

    Args:
        sock: connected.
        secret: None for none.
        deadline: Deadline as of `time.monotonic`, in seconds.

    Raises:
        NotAHostError: The other side is no leader.
        SecretError: It has another secret, or one of the two has none.
    """
    mine = _greeting(secret)
    _send(sock, mine)
    theirs = _read_greeting(sock, deadline)
    _check_both(secret, theirs)
    _send(sock, _mac(secret, b"follower", mine, theirs))
    verdict = receive_exactly(sock, 1 + MAC_BYTES, deadline)
    if verdict[:1] == REFUSED:
        raise SecretError("it has another secret")
    if not hmac.compare_digest(verdict[1:], _mac(secret, b"leader", mine, theirs)):
        raise SecretError("it has not shown the secret")
    return _session(secret, mine, theirs, is_leader=False)


def greet_follower(sock: socket.socket, secret: bytes | None, deadline: float) -> Session:
    """Verifies a follower's proof, then proves the secret to it.

    This is the leader's part. Arguments as for `greet_leader`.
    """
    theirs = _read_greeting(sock, deadline)
    mine = _greeting(secret)
    _send(sock, mine)
    _check_both(secret, theirs)
    proof = receive_exactly(sock, MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, _mac(secret, b"follower", theirs, mine)):
        _send(sock, REFUSED + bytes(MAC_BYTES))
        raise SecretError("it has another secret")
    _send(sock, PASSED + _mac(secret, b"leader", theirs, mine))
    return _session(secret, theirs, mine, is_leader=True)


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Returns the next bytes of a connection.

    Raises:
        NotAHostError: The connection ends, or they have not come by `deadline`.
    """
    parts = bytearray()
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    while len(parts) < num_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            raise NotAHostError("nothing came in time")
        try:
            part = sock.recv(min(num_bytes - len(parts), 1 << 20), socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        if not part:
            raise NotAHostError("the connection was closed")
        parts += part
    return bytes(parts)


def _greeting(secret: bytes | None) -> bytes:
    return MAGIC + (WITHOUT if secret is None else WITH_SECRET) + secrets.token_bytes(NONCE_BYTES)


def _read_greeting(sock: socket.socket, deadline: float) -> bytes:
    greeting = receive_exactly(sock, GREETING_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise NotAHostError("what came is not of this program")
    return greeting


def _check_both(secret: bytes | None, theirs: bytes) -> None:
    has_secret = theirs[len(MAGIC) : len(MAGIC) + 1] == WITH_SECRET
    if has_secret and secret is None:
        raise SecretError("it has a secret, and this host has none")
    if not has_secret and secret is not None:
        raise SecretError("it has no secret")


def _send(sock: socket.socket, content: bytes) -> None:
    try:
        sock.sendall(content)
    except OSError as error:
        raise NotAHostError(str(error)) from error


def _session(secret: bytes | None, follower: bytes, leader: bytes, *, is_leader: bool) -> Session:
    keys = [_mac(secret, b"frames of the " + role, follower, leader) for role in (b"leader", b"follower")]
    return Session(*(keys if is_leader else reversed(keys)))


def _mac(secret: bytes | None, *parts: bytes) -> bytes:
    """Returns the MAC of parts, each of fixed length except the last."""
    return hmac.digest(secret or b"", b"".join(parts), "sha256")
