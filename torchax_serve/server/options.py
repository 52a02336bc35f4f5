"""Options of the server: addresses, keys, limits and times."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

_NAME, _IPV6 = r"[^\s/:@?#\[\]A-Z]+", r"[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*"
_NAMES = (
    ("allowed_hosts", re.compile(f"{_NAME}|{_IPV6}"), "a host in small letters, without a port"),
    ("media_hosts", re.compile(rf"{_NAME}(:\d+)?|{_IPV6}"), "HOST or HOST:PORT in small letters"),
    ("cors_origins", re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@?#A-Z]+"), "SCHEME://HOST in small letters, or *"),
)
"""Options whose values are compared with what requests say: one in another form would never be met."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits that the protocol class enforces on every connection.

    They hold before a request reaches the application.

    Attributes:
        max_connections: Open connections, all clients together.
        max_connections_per_address: Open connections of one address.
        max_url_bytes: Bytes of a request's target.
        max_header_bytes: Bytes of all headers of a request with its first line.
        max_headers: Number of headers.
        max_body_bytes: Bytes of a request's body.
        max_upload_bytes: Bytes of a file that ``POST /v1/files`` stores.
        header_timeout_s: Seconds from the first byte of a request, or from the connection, to its last header.
        body_timeout_s: Seconds from the last header to the end of the body.
        write_timeout_s: Seconds for which a client may read nothing of what waits for it.
        keep_alive_timeout_s: Seconds that a connection may stay open between two requests.
    """

    max_connections: int = 4096
    max_connections_per_address: int = 2048
    max_url_bytes: int = 8192
    max_header_bytes: int = 32768
    max_headers: int = 100
    max_body_bytes: int = 32 * MIB
    max_upload_bytes: int = 200 * MIB
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    keep_alive_timeout_s: float = 75.0

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def upload_timeout_s(self) -> float:
        """Seconds to the end of the body of a file: `body_timeout_s` for each body's worth of it."""
        return self.body_timeout_s * max(1.0, self.max_upload_bytes / self.max_body_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of one request, checked before any work.

    Attributes:
        max_answers: Answers of a request: prompts times `n`.
        max_json_depth: Levels of nested objects and arrays of a body.
        max_json_values: Values of a body, those of lists and objects counted.
        max_messages: Messages of a conversation.
        max_texts: Texts of a request for embeddings, labels or scores.
        max_text_bytes: Bytes of one of these, and of a text to tokenize, in UTF-8.
        max_audio_s: Seconds of audio to transcribe.
        max_schema_bytes: Bytes of a JSON schema, a regular expression or a grammar.
    """

    max_answers: int = 128
    max_json_depth: int = 64
    max_json_values: int = 1 << 20
    max_messages: int = 4096
    max_texts: int = 2048
    max_text_bytes: int = MIB
    max_audio_s: float = 1800.0
    max_schema_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        uds: Path of a Unix socket, in place of host and port.
        served_model_names: Names that requests may use for the model; empty: the name it was loaded by.
        api_keys: Keys by their name; empty: no key is needed.
        api_key_file: File with a key a line, ``NAME:KEY`` or ``KEY``; it is read again when it changes.
        allowed_hosts: Further values of the header Host; on a loopback address others are refused.
        media_hosts: Names and addresses that images and audio of chats may be fetched from; empty: none are fetched.
        cors_origins: Origins whose pages may call the server from a browser.
        tls_certificate: Certificate chain in PEM; with `tls_key`.
        tls_key: Private key in PEM.
        tls_client_ca: Certificates in PEM, one of which must have signed a client's; None asks for none.
        keep_alive_s: Seconds of silence of a streamed answer after which a comment is sent.
        request_timeout_s: Seconds that a request may take, waiting included; None for any time.
        queue_timeout_s: Seconds that a request may wait before it begins; None for any time.
        first_token_timeout_s: Seconds until the first token of an answer, waiting included; None for any time.
        pre_stop_s: Seconds for which requests are still accepted after SIGTERM.
        drain_timeout_s: Seconds that requests have to finish after that.
        watchdog_s: Seconds without progress after which the process reports itself dead and ends; 0 switches it off.
        response_template: Family or file that says how answers spell reasoning and tool calls, or ``none``; None: by
            the checkpoint.
        metrics_compat: ``vllm`` for vLLM's metric names next to our own.
        metrics_without_key: Whether ``/metrics`` needs no key: scrapers and gateways often have none.
        log_format: ``text`` or ``json``.
        access_log: Whether each request is a line in the log.
        otlp_traces_endpoint: URL of an OpenTelemetry collector, with its path, that gets a span of each request.
        profile_dir: Folder of profiles, which ``/start_profile`` and ``/stop_profile`` take; None for none.
        allow_runtime_lora_updating: Whether requests may load and unload adapters, from any folder of this machine.
        allow_model_downloads: Whether requests may download models of the hub onto this machine, and delete them.
        max_stored_responses: Responses of one API key that later requests may name; 0 stores none.
        stored_response_ttl_s: Seconds for which they are stored.
        file_storage_path: Folder of ``/v1/files`` and ``/v1/batches``; None for none.
        file_storage_bytes: Bytes of the files of one API key together.
        max_stored_files: Files of one API key, and its batches.
        stored_file_ttl_s: Seconds for which files are stored, and batches that have ended.
        warm_up: Whether programs are compiled before the server is ready, and before a model of several is.
        max_loaded_models: Of several models, those that are loaded at once; None: all.
        model_memory_bytes: Bytes of weights and caches of loaded models; None sets no limit.
        model_idle_timeout_s: Seconds after which a model of several that nobody uses is unloaded; None: never.
        connection: Limits of connections.
        request: Limits of requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    media_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    keep_alive_s: float = 15.0
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    pre_stop_s: float = 0.0
    drain_timeout_s: float = 30.0
    watchdog_s: float = 300.0
    response_template: str | None = None
    metrics_compat: str | None = None
    metrics_without_key: bool = False
    log_format: str = "text"
    access_log: bool = True
    otlp_traces_endpoint: str | None = None
    profile_dir: Path | None = None
    allow_runtime_lora_updating: bool = False
    allow_model_downloads: bool = False
    max_stored_responses: int = 0
    stored_response_ttl_s: float = 3600.0
    file_storage_path: Path | None = None
    file_storage_bytes: int = 4096 * MIB
    max_stored_files: int = 1000
    stored_file_ttl_s: float = 30 * 86400.0
    warm_up: bool = True
    max_loaded_models: int | None = None
    model_memory_bytes: int | None = None
    model_idle_timeout_s: float | None = None
    connection: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    request: RequestLimits = dataclasses.field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidArgumentError(f"port: expected a number from 0 to 65535, got {self.port}")
        for name in ("pre_stop_s", "drain_timeout_s", "watchdog_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgumentError(f"{name}: expected seconds >= 0, got {getattr(self, name)!r}")
        for name in ("max_loaded_models", "model_memory_bytes", "file_storage_bytes", "max_stored_files"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}: expected a number >= 1, got {getattr(self, name)!r}")
        for name in ("request_timeout_s", "queue_timeout_s", "first_token_timeout_s", "model_idle_timeout_s"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise InvalidArgumentError(f"{name}: expected seconds > 0, got {getattr(self, name)!r}")
        for name in ("keep_alive_s", "stored_response_ttl_s", "stored_file_ttl_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgumentError(f"{name}: expected seconds > 0, got {getattr(self, name)!r}")
        if self.max_stored_responses < 0:
            raise InvalidArgumentError(f"max_stored_responses: expected a number >= 0, got {self.max_stored_responses}")
        if not all(self.served_model_names):
            raise InvalidArgumentError("served_model_names: expected names of at least one character, got an empty one")
        if self.metrics_compat not in (None, "vllm"):
            raise InvalidArgumentError(f"metrics_compat: expected vllm, got {self.metrics_compat!r}")
        if self.log_format not in ("text", "json"):
            raise InvalidArgumentError(f"log_format: expected text or json, got {self.log_format!r}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", endpoint):
            raise InvalidArgumentError(
                "otlp_traces_endpoint: expected a URL http://HOST:PORT/PATH without a password, got another; "
                "OTEL_EXPORTER_OTLP_HEADERS is the place of one"
            )
        if "*" in self.cors_origins and (self.api_keys or self.api_key_file):
            raise InvalidArgumentError("cors_origins: expected origins by name next to API keys, got *; list them")
        for name in ("allow_runtime_lora_updating", "allow_model_downloads", "file_storage_path"):
            if getattr(self, name) and not (self.is_loopback or self.api_keys or self.api_key_file):
                raise InvalidArgumentError(
                    f"{name}: expected API keys, or an address of this machine alone, got neither; add api_key_file"
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_certificate and tls_key: expected both or neither, got one of them")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidArgumentError("tls_client_ca: expected tls_certificate and tls_key with it, got neither")
        for name, pattern, expected in _NAMES:
            for value in getattr(self, name):
                if not pattern.fullmatch(value):
                    raise InvalidArgumentError(f"{name}: expected {expected}, got {value!r}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.uds is not None or self.host in LOOPBACK

    def public(self) -> dict[str, Any]:
        """Returns the effective options without secrets and folders, for the log and ``/version``."""
        shown = dataclasses.asdict(self)
        shown["api_keys"] = len(self.api_keys)
        return {name: value.name if isinstance(value, Path) else value for name, value in shown.items()}

    def changed(self) -> dict[str, Any]:
        """Returns the `public` options that are not the defaults, as ``group.name`` in a group."""
        ours, defaults = _by_path(self.public()), _by_path(ServerOptions().public())
        return {path: value for path, value in ours.items() if value != defaults[path]}


def _by_path(options: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _check_positive(limits: Any) -> None:
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if not 0 < value < math.inf:
            raise InvalidArgumentError(f"{field.name}: expected a number > 0, got {value!r}")
