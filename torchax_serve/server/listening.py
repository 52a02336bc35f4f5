"""Sockets of the server, and the connections that come through them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.http_protocol import ConnectionCounts, GuardedProtocol
from torchax_serve.server.options import ServerOptions

_SYSTEMD_FIRST_FD = 3
BACKLOG = 2048


ACCEPTED_WITHIN_S = 5.0
"""Seconds within which an accepted connection has a transport."""


class HttpListener:
    """Listens on the addresses of the options and runs an application on every connection.

    Args:
        app: ASGI application.
        options: Of the server.
    """

    def __init__(self, app: Any, options: ServerOptions) -> None:
        self._options = options
        self.state = ServerState()
        self._config = Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is no HTTP is answered with 400; clients must not fill the log with it
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(options.connection.keep_alive_timeout_s),
        )
        self._config.load()
        self._counts = ConnectionCounts()
        self._servers: list[asyncio.Server] = []
        self._replaced: list[asyncio.Server] = []  # by later calls of `start`
        self._tls = _tls_context(options)
        self._tls_stamps = _stamps(options)
        self._sockets = open_sockets(options)

    @property
    def addresses(self) -> list[str]:
        """Addresses that clients can use."""
        scheme = "http" if self._tls is None else "https"
        found = []
        for each in self._sockets:
            name = each.getsockname()
            if isinstance(name, tuple):
                host = f"[{name[0]}]" if ":" in name[0] else name[0]
                found.append(f"{scheme}://{host}:{name[1]}")
            else:
                found.append(f"unix:{name}")
        return found

    async def start(self) -> None:
        """Accepts connections; called again, with the TLS context of now from then on."""
        loop = asyncio.get_running_loop()
        make = functools.partial(
            GuardedProtocol, self._config, self.state, loop, self._options.connection, self._counts
        )
        # Copies of the sockets: closing an asyncio server closes its socket, and the copy goes on listening.
        started = [
            await loop.create_server(make, sock=each.dup(), ssl=self._tls, backlog=BACKLOG) for each in self._sockets
        ]
        before, self._servers = self._servers, started
        self._replaced = [server for server in self._replaced if server.is_serving()] + before
        for server in before:
            # It accepts no more, and is closed when those that it has accepted have their transport: asyncio makes that
            # in a task, which fails on a closed server and leaves the client waiting.
            for each in server.sockets:
                loop.remove_reader(each)
            loop.call_later(ACCEPTED_WITHIN_S, server.close)

    async def reload_tls(self) -> bool:
        """Reads certificate, key and clients' CA again if one of their files has changed.

        Returns whether it did.

        New connections have a new TLS context: what the one before trusted, and the sessions that it could resume, are
        gone with it. Open connections go on.

        Raises:
            InvalidArgumentError: The files do not fit; connections have those of before until a file changes again.
        """
        stamps = _stamps(self._options)
        if self._tls is None or stamps == self._tls_stamps or None in stamps:
            return False
        self._tls_stamps = stamps
        self._tls = _tls_context(self._options)
        await self.start()
        return True

    def close(self) -> None:
        """Accepts no more connections, and closes those without a request."""
        for server in (*self._servers, *self._replaced):
            server.close()
        for each in self._sockets:
            each.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        if self._options.uds is not None:
            with contextlib.suppress(OSError):
                self._options.uds.unlink()

    def cancel_requests(self) -> None:
        """Ends the requests that run."""
        for task in list(self.state.tasks):
            task.cancel()


def open_sockets(options: ServerOptions) -> list[socket.socket]:
    """Returns listening sockets.

    They are those that systemd gave, a Unix socket, or one for each address of the host.

    Raises:
        InvalidArgumentError: An address cannot be listened on.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        count = int(os.environ.get("LISTEN_FDS", "0"))
        given = [socket.socket(fileno=_SYSTEMD_FIRST_FD + index) for index in range(count)]
        if given:
            return [_without_delay(each) for each in given]
    try:
        if options.uds is not None:
            return [_unix_socket(options.uds)]
        infos = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found = {(family, address) for family, _, _, _, address in infos}
        made = [socket.create_server(address, family=family, backlog=BACKLOG) for family, address in sorted(found)]
        return [_without_delay(each) for each in made]
    except OSError as error:
        name, where = ("uds", options.uds) if options.uds else ("host and port", f"{options.host}:{options.port}")
        raise InvalidArgumentError(
            f"{name}: expected an address to listen on, got {where} ({error.strerror}); choose another"
        ) from error


def _without_delay(listening: socket.socket) -> socket.socket:
    """Returns the socket, whose connections send each write at once.

    asyncio sees to that only where a socket names its protocol, which those of `socket.create_server` do not. An
    answer is two writes, of which the second waits 40 ms for the client's delayed acknowledgement of the first.
    """
    if listening.family in (socket.AF_INET, socket.AF_INET6):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _unix_socket(path: Path) -> socket.socket:
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(98, "another process listens on it")
        path.unlink()  # of a server that was killed
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    os.chmod(path, 0o600)
    made.listen(BACKLOG)
    return made


def _certificate(options: ServerOptions) -> tuple[str, str]:
    return str(options.tls_certificate), str(options.tls_key)


def _tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(*_certificate(options))
        if options.tls_client_ca is not None:
            context.load_verify_locations(str(options.tls_client_ca))
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise InvalidArgumentError(
            f"tls_certificate, tls_key and tls_client_ca: expected PEM files, got others ({error})"
        ) from error
    return context


def _stamps(options: ServerOptions) -> tuple[tuple[int, int] | None, ...]:
    """Returns number and time of each file of the TLS options; None for one that is missing."""
    found: list[tuple[int, int] | None] = []
    for path in (options.tls_certificate, options.tls_key, options.tls_client_ca):
        if path is None:
            continue
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
