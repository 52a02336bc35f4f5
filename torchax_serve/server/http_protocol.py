"""uvicorn's HTTP protocol behind limits, and against ambiguous requests.

uvicorn itself takes headers of any number and size and waits for them without end. Every refusal here is an answer in
the form of the interface that was asked; what the client still sends is then read and dropped up to a bound, so that
it sees the answer in place of a reset connection.
"""

from __future__ import annotations

import asyncio
import collections
import uuid
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from torchax_serve.server.error_forms import error_body
from torchax_serve.server.errors import ApiError, body_limit
from torchax_serve.server.options import ConnectionLimits

LINGER_S = 5.0
"""Seconds for which the rest of a refused request is read and dropped."""
LINGER_BYTES = 256 << 20
"""Bytes of it that are read and dropped."""
FORM_BYTES = 1 << 16
"""Bytes of the form of a file besides the file."""
_ONCE = (b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type")
"""Headers that a request may have once; two of them are read differently by different servers."""


class _RefusedError(Exception):
    """Leaves the parser after a refusal."""


class ConnectionCounts:
    """Open connections, all together and by address."""

    def __init__(self) -> None:
        self.total = 0
        self.by_address: collections.Counter[str] = collections.Counter()

    def add(self, address: str) -> None:
        """Counts a connection."""
        self.total += 1
        self.by_address[address] += 1

    def remove(self, address: str) -> None:
        """Counts its end."""
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 protocol of one connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        counts: ConnectionCounts,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state={}, _loop=loop)
        self._limits, self._counts = limits, counts
        self._address = ""
        self._in_head, self._head_bytes, self._parsed_head_bytes, self._body_bytes = True, 0, 0, 0
        self._max_body_bytes, self._body_timeout_s = limits.max_body_bytes, limits.body_timeout_s
        self._is_refused, self._num_dropped = False, 0
        self._cycles: list[Any] = []  # requests without a complete answer, several where they are pipelined
        self._timer: asyncio.TimerHandle | None = None  # of the head, the body, or the dropped rest
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Counts the connection; refuses it where there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else "unix"
        self._counts.add(self._address)
        limits = self._limits
        if self._counts.total > limits.max_connections:
            self._refuse(503, f"expected at most {limits.max_connections} connections, got more; try again later")
        elif self._counts.by_address[self._address] > limits.max_connections_per_address:
            most = limits.max_connections_per_address
            self._refuse(429, f"expected at most {most} connections of one address, got more; close some")
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers with the connection."""
        self._counts.remove(self._address)
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, as long as the request is within the limits."""
        if self._is_refused:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self.transport.abort()
            return
        if self._in_head:
            if not self._head_bytes and self._timer is None:
                self._await_head()
            self._head_bytes += len(data)
        try:
            super().data_received(data)
        except _RefusedError:
            return
        if self._in_head and self._head_bytes > self._limits.max_header_bytes and not self._is_refused:
            self._refuse(431, f"expected headers of at most {self._limits.max_header_bytes} bytes, got more")

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        self._in_head, self._parsed_head_bytes, self._body_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Takes a part of the request's target."""
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            self._refuse_in_parser(414, f"expected a URL of at most {self._limits.max_url_bytes} bytes, got more")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        super().on_header(name, value)
        self._parsed_head_bytes += len(name) + len(value) + 4
        if len(self.headers) > self._limits.max_headers:
            self._refuse_in_parser(431, f"expected at most {self._limits.max_headers} headers, got more")
        if self._parsed_head_bytes + len(self.url) > self._limits.max_header_bytes:
            self._refuse_in_parser(431, f"expected headers of at most {self._limits.max_header_bytes} bytes, got more")

    def on_headers_complete(self) -> None:
        """Checks the headers, and starts the application."""
        self._in_head, self._head_bytes = False, 0
        self._check_headers()
        self._stop_timer()
        self._timer = self.loop.call_later(self._body_timeout_s, self._body_is_late)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def _check_headers(self) -> None:
        given = collections.Counter(name for name, _ in self.headers)
        for name in _ONCE:
            if given[name] > 1:
                self._refuse_in_parser(400, f"expected one header {name.decode()}, got {given[name]}")
        if given[b"content-length"] and given[b"transfer-encoding"]:
            self._refuse_in_parser(400, "expected one of Content-Length and Transfer-Encoding, got both")
        if self.parser.get_http_version() == "1.1" and not given[b"host"]:
            self._refuse_in_parser(400, "expected a header Host, got none")
        headers = dict(self.headers)
        if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            self._refuse_in_parser(400, "expected Transfer-Encoding: chunked, got another")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            self._refuse_in_parser(400, "expected a Content-Length in digits, got another")
        self._max_body_bytes, self._body_timeout_s = self._limits.max_body_bytes, self._limits.body_timeout_s
        if self.parser.get_method() == b"POST" and self.url.partition(b"?")[0] == b"/v1/files":
            self._max_body_bytes = self._limits.max_upload_bytes + FORM_BYTES
            self._body_timeout_s = self._limits.upload_timeout_s
        if int(length) > self._max_body_bytes:
            self._refuse_in_parser(413, body_limit(self._max_body_bytes))

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self._refuse_in_parser(413, body_limit(self._max_body_bytes))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request; the connection may bring another."""
        self._stop_timer()
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is no HTTP."""
        self._refuse(400, "expected a request of HTTP/1.1, got something else")

    def pause_writing(self) -> None:
        """Gives a client that does not read some time to do so."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends that time."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if not self._head_bytes:
            self.transport.close()  # a connection without a request
        else:
            self._refuse(408, f"expected the headers within {self._limits.header_timeout_s:g} s")

    def _body_is_late(self) -> None:
        self._timer = None
        self._refuse(408, f"expected the body within {self._body_timeout_s:g} s; send it at once")

    def _refuse_in_parser(self, status: int, message: str) -> None:
        self._refuse(status, message)
        raise _RefusedError

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, and drops what the client still sends."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        unanswered = [cycle for cycle in self._cycles if not cycle.response_complete]
        self.pipeline.clear()  # requests that have not begun
        for cycle in unanswered:
            cycle.disconnected = True  # for the application, which would write behind the end
            cycle.message_event.set()
        if any(cycle.response_started for cycle in unanswered):
            self.transport.abort()
            return
        error = ApiError(status, message)
        request_id = f"req-{uuid.uuid4().hex}"
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
        body = error_body(error, path, request_id)
        lines = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        lines += [b"x-request-id: " + request_id.encode()]
        lines += [f"{name.lower()}: {value}".encode() for name, value in error.headers.items()]
        self.transport.write(STATUS_LINE[status] + b"\r\n".join([*lines, b"", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
