"""Renders chat templates in a separate process, which is ended at a deadline."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import ChatTemplateError
from torchax_serve.validation.owner_process import OwnerProcess

DEADLINE_S = 10.0
"""Most seconds for rendering a conversation; templates take milliseconds."""
START_S = 120.0
"""Most seconds for starting the process, which imports transformers' utilities."""
MAX_JOB_BYTES = 2**28  # of a conversation as JSON
_PROGRAM = Path(__file__).with_name("template_process.py")


@dataclasses.dataclass(frozen=True)
class TemplateJob:
    """A template and its arguments.

    Attributes:
        template: Jinja source.
        conversations: Variants of a conversation, each a list of messages of JSON values.
        variables: Variables by name, special tokens included.
        tools: JSON schemas, or None.
        documents: Documents for retrieval, or None.
        continues: Whether the last message is left open for a continuation.
        is_complete: Whether no answer follows, as in training data.
    """

    template: str
    conversations: Sequence[Sequence[dict[str, Any]]]
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    continues: bool = False
    is_complete: bool = False


@dataclasses.dataclass(frozen=True)
class RenderedJob:
    """Result of a `TemplateJob`.

    Attributes:
        texts: Text of each conversation, or its error.
        generated: For each conversation the begins and ends, in characters, of what the template marks as the
            assistant's by ``{% generation %}``; None if it has no such tag, or does not render.
        variables: Names of the variables that the template reads.
        words: Names of attributes, and strings, that occur in the template.
        takes_parts: Whether the template loops over the parts of a message's content.
    """

    texts: list[str | ChatTemplateError]
    generated: list[list[tuple[int, int]] | None]
    variables: frozenset[str]
    words: frozenset[str]
    takes_parts: bool


class TemplateRenderer:
    """Renderer of templates in a process of its own. Thread-safe.

    The process starts with the first job, and again after it was ended.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False  # the process has said that it is
        self._is_busy = False
        self._owner = OwnerProcess()
        atexit.register(self.close)

    def start(self) -> None:
        """Starts the process without waiting until it is ready."""
        with self._lock:
            if self._process is None:
                self._launch()

    def render(self, job: TemplateJob, deadline_s: float = DEADLINE_S) -> RenderedJob:
        """Renders every conversation of `job`.

        Raises:
            ChatTemplateError: no valid template, or it takes more than `deadline_s` or too much memory, or the process
                cannot be started; the message is a clause without the template's name.
        """
        data = _encoded({**vars(job), "deadline_s": deadline_s})
        with self._lock:
            if self._is_busy:  # a signal handler, in the thread that renders
                raise ChatTemplateError("was asked for by code that interrupted a rendering; ask again after it")
            self._is_busy = True
            try:
                answer = self._ask(data, deadline_s)
            finally:
                self._is_busy = False
        if "error" in answer:
            raise ChatTemplateError(f"does not render: {answer['error']}")
        return RenderedJob(
            [each["text"] if "text" in each else ChatTemplateError(each["error"]) for each in answer["texts"]],
            [_spans(each.get("generated")) for each in answer["texts"]],
            frozenset(answer["variables"]),
            frozenset(answer["words"]),
            answer["takes_parts"],
        )

    def _ask(self, data: bytes, deadline_s: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._launch()
        try:
            self._wait_until_ready()
            until = time.monotonic() + deadline_s
            self._send(data, until)
            return self._receive(until)
        except TimeoutError:
            self.close()
            raise ChatTemplateError(f"does not render within {deadline_s:g} s") from None
        except OSError as error:
            process = self._process
            self.close()
            code = None if process is None else process.returncode
            raise ChatTemplateError(
                f"does not render: its process ended (exit status {code}); it takes too much time or memory"
            ) from error
        except BaseException:  # such as Ctrl-C: the answer would come to the next question
            self.close()
            raise

    def _launch(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            # A group of its own: Ctrl-C at the terminal is for this process, which ends the other where it has to.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        except (OSError, TypeError) as error:
            ours.close()
            raise ChatTemplateError(f"does not render: no process can be started for it ({error})") from error
        finally:
            theirs.close()
        self._connection, self._is_ready = ours, False
        self._send(_encoded({"path": sys.path}), time.monotonic() + START_S)

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._receive(time.monotonic() + START_S)
            self._is_ready = True

    def _send(self, data: bytes, until: float) -> None:
        assert self._connection is not None
        self._connection.settimeout(max(0.001, until - time.monotonic()))
        self._connection.sendall(len(data).to_bytes(8, "big") + data)

    def _receive(self, until: float) -> dict[str, Any]:
        length = int.from_bytes(self._read(8, until), "big")
        answer: dict[str, Any] = json.loads(self._read(length, until))
        return answer

    def _read(self, length: int, until: float) -> bytes:
        assert self._connection is not None
        data = bytearray()
        while len(data) < length:
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            piece = self._connection.recv(min(length - len(data), 2**20))
            if not piece:
                raise ConnectionResetError("the process has ended")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Ends the process; the next rendering starts another."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            if process is not None and self._owner.is_current:
                process.kill()
                process.wait()


def _encoded(value: dict[str, Any]) -> bytes:
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"takes values of JSON, got others ({type(error).__name__}: {error})") from error
    if len(data) > MAX_JOB_BYTES:
        raise ChatTemplateError(f"takes conversations of at most {MAX_JOB_BYTES >> 20} MiB, got {len(data) >> 20} MiB")
    return data


def _spans(pairs: list[list[int]] | None) -> list[tuple[int, int]] | None:
    return None if pairs is None else [(begin, end) for begin, end in pairs]


_renderer: TemplateRenderer | None = None


def shared_renderer() -> TemplateRenderer:
    """Returns the renderer of this process; a forked child gets a new one."""
    global _renderer
    if _renderer is None or not _renderer._owner.is_current:
        _renderer = TemplateRenderer()
    return _renderer
