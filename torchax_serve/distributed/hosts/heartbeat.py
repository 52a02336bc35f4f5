"""Detects lost hosts, and ends the process when one is lost.

A program that exchanges data with a lost host never ends, and no exception reaches into it. So the thread that
notices prints the reason, and ends the process. JAX would do the same, later and in many lines.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torchax_serve.distributed.hosts.connection import BEAT, SAID, Connection

BEAT_S = 1.0
MAX_SILENT_BEATS = 12
"""Number of beats without a message after which a host is lost. Counted, not timed: a process that was stopped and
continues has not waited."""
EXIT_LOST = 2
GRACE_S = (MAX_SILENT_BEATS + 4) * BEAT_S
"""Seconds that an error of a program waits for the report of a lost host, which would be its cause."""


def end_process(message: str) -> None:
    """Prints `message` on stderr in one line and ends the process.

    The process ends whatever its other threads wait for.
    """
    try:
        print(f"error: {message}", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_LOST)


class Heartbeat:
    """Heartbeat of a connection: keeps it alive and listens on it.

    Args:
        wire: Connection to the other host.
        who: Description of the other host.
        remedy: Advice to the user once the host is lost.
        on_loss: Called with a message when the host is lost, on the listening thread; by default ends the process.
    """

    def __init__(self, wire: Connection, who: str, remedy: str, on_loss: Callable[[str], None] = end_process) -> None:
        self.wire, self.who = wire, who
        self._remedy, self._on_loss = remedy, on_loss
        self.incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"{target.__name__} {who}", daemon=True)
            for target in (self._beat, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Marks the run as over: the connection may end from now on."""
        self._over.set()

    def close(self) -> None:
        """Closes the connection after everything sent has arrived."""
        self._over.set()
        self.wire.shutdown()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.wire.close()

    def host_lost(self, why: str) -> None:
        """Reports the other host as lost, unless the run is over anyway."""
        if not self._over.is_set():
            self._over.set()
            self._on_loss(f"{self.who} {why}; {self._remedy}")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self.wire.send(BEAT)
            except OSError:
                return  # the listener finds out why, and says so

    def _listen(self) -> None:
        silent = 0
        while not self._over.is_set():
            try:
                frame = self.wire.receive(BEAT_S)
            except (OSError, ValueError) as error:  # a closed socket has no number
                self.host_lost(f"is gone ({str(error) or type(error).__name__})")
                return
            silent = silent + 1 if frame is None else 0
            if silent >= MAX_SILENT_BEATS:
                self.host_lost(f"has not been heard of for {MAX_SILENT_BEATS * BEAT_S:.0f} s")
                return
            if frame is None or frame[0] == BEAT:
                continue
            if frame[0] == SAID and "failed" in frame[1]:
                self.host_lost(f"has failed: {frame[1]['failed']}")
                return
            self.incoming.put(frame[1])


def wait_for_host_error() -> None:
    """Waits for a report of a lost host, before an error is raised that it may have caused."""
    time.sleep(GRACE_S)
