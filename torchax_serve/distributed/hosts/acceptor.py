"""Acceptor of the leader's connections, many at a time; hosts must prove the secret.

Each caller has a thread and `GREETING_S` seconds for the handshake. A caller that sends nothing, or something else, is
dropped and delays no other. There are never more than `MAX_CALLERS` unauthenticated callers: the one that has waited
longest is dropped for a new one, and a real host calls again.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import socket
import threading
import time
from typing import Any

from torchax_serve.distributed.hosts.connection import SAID, Connection
from torchax_serve.distributed.hosts.handshake import SecretError, greet_follower

logger = logging.getLogger("torchax_serve")

GREETING_S = 5.0
MAX_CALLERS = 64
BACKLOG = 128
LONGEST_HELLO = 1 << 16


class Acceptor:
    """Listens until it is closed; usable as a context manager.

    Args:
        server: Listening socket.
        secret: Shared secret; None for none.
        program: Value of ``program`` in the first message of a host.

    Attributes:
        num_turned_away: Number of callers with another secret, or none.
    """

    def __init__(self, server: socket.socket, secret: bytes | None, program: str) -> None:
        self._server, self._secret, self._program = server, secret, program
        self._hosts: queue.SimpleQueue[tuple[Connection, dict[str, Any]]] = queue.SimpleQueue()
        self._callers: collections.OrderedDict[socket.socket, None] = collections.OrderedDict()
        self._lock, self._is_closed = threading.Lock(), False
        self._told: set[str] = set()
        self.num_turned_away = 0
        self._thread = threading.Thread(target=self._accept, name="accept hosts", daemon=True)
        self._thread.start()

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def next_host(self, wait_s: float) -> tuple[Connection, dict[str, Any]] | None:
        """Returns the next host's connection and first message.

        None if no host comes within `wait_s` seconds.
        """
        try:
            return self._hosts.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Ends listening and hangs up on all callers that were not taken by `next_host`."""
        with self._lock:
            self._is_closed = True
            for caller in self._callers:
                _hang_up(caller)
        _hang_up(self._server)
        self._server.close()
        self._thread.join()
        while (left := self.next_host(0)) is not None:
            left[0].close()

    def _accept(self) -> None:
        self._server.settimeout(None)
        while True:
            try:
                caller, address = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # out of descriptors, or a caller that has gone already
                continue
            with self._lock:
                if self._is_closed:
                    caller.close()
                    return
                if len(self._callers) >= MAX_CALLERS:
                    _hang_up(next(iter(self._callers)))  # its thread closes it
                self._callers[caller] = None
            threading.Thread(target=self._greet, args=(caller, str(address[0])), name="greet", daemon=True).start()

    def _greet(self, caller: socket.socket, address: str) -> None:
        is_host = False
        try:
            caller.settimeout(GREETING_S)
            session = greet_follower(caller, self._secret, time.monotonic() + GREETING_S)
            wire = Connection(caller, session=session)
            frame = wire.receive(GREETING_S, longest=LONGEST_HELLO)
            is_host = frame is not None and frame[0] == SAID and frame[1].get("program") == self._program
        except SecretError as error:
            self._turn_away(address, str(error))
        except (OSError, ValueError):
            pass  # a port scanner or a browser
        with self._lock:
            self._callers.pop(caller, None)
            is_host = is_host and not self._is_closed
        if is_host:
            assert frame is not None
            self._hosts.put((wire, frame[1]))
        else:
            caller.close()

    def _turn_away(self, address: str, why: str) -> None:
        with self._lock:
            self.num_turned_away += 1
            if address in self._told or len(self._told) > MAX_CALLERS:
                return
            self._told.add(address)
        logger.warning("a host at %s was turned away: %s; give all hosts the same secret", address, why)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
