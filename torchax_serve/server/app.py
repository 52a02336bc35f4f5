"""The ASGI application: routes, ids, host check, keys, errors, log and counts."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchax_serve.server import (
    adapter_routes,
    audio,
    health,
    images,
    inference_protocol,
    model_routes,
    openapi,
    page,
    pooling,
    profile_routes,
    retrieval,
    segmentations,
    speech,
    tokens,
)
from torchax_serve.server.anthropic import errors as anthropic_errors
from torchax_serve.server.anthropic import routes as anthropic
from torchax_serve.server.auth import CALLER
from torchax_serve.server.batch import routes as batches
from torchax_serve.server.chat import chat_completions
from torchax_serve.server.completions import completions
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.decisions import systemone
from torchax_serve.server.error_forms import error_body
from torchax_serve.server.errors import ApiError, where_of
from torchax_serve.server.infill import infill
from torchax_serve.server.ollama import downloads as ollama_downloads
from torchax_serve.server.ollama import routes as ollama
from torchax_serve.server.options import LOOPBACK
from torchax_serve.server.responses import stored_routes
from torchax_serve.server.responses.routes import responses

logger = logging.getLogger("torchax_serve.server")
access_logger = logging.getLogger("torchax_serve.access")

PUBLIC = frozenset({"/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key and count as no work. `ServerOptions.metrics_without_key` frees ``/metrics`` of it, too."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")

ROUTES: tuple[tuple[str, str, Callable[..., Awaitable[Any]]], ...] = (
    ("GET", "/livez", health.livez),
    ("GET", "/readyz", health.readyz),
    ("GET", "/health", health.readyz),
    ("GET", "/ping", health.livez),
    ("GET", "/version", health.version),
    ("GET", "/openapi.json", openapi.openapi),
    ("GET", "/docs", openapi.page),
    ("GET", "/load", health.load),
    ("GET", "/stats", page.stats),
    ("GET", "/", page.page),
    ("GET", "/page.js", page.page),
    ("GET", "/page.css", page.page),
    ("GET", "/metrics", health.metrics),
    ("GET", "/v1/models", health.models),
    ("GET", "/v1/models/{model:path}", health.model),
    ("POST", "/models/load", model_routes.load),
    ("POST", "/models/unload", model_routes.unload),
    ("POST", "/v1/load_lora_adapter", adapter_routes.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", adapter_routes.unload_lora_adapter),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/render", tokens.render),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/v1/responses", responses),
    ("GET", "/v1/responses/{response_id}", stored_routes.get_response),
    ("DELETE", "/v1/responses/{response_id}", stored_routes.delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", stored_routes.cancel_response),
    ("GET", "/v1/responses/{response_id}/input_items", stored_routes.list_input_items),
    ("POST", "/v1/files", batches.create_file),
    ("GET", "/v1/files", batches.list_files),
    ("GET", "/v1/files/{file_id}", batches.get_file),
    ("DELETE", "/v1/files/{file_id}", batches.delete_file),
    ("GET", "/v1/files/{file_id}/content", batches.get_file_content),
    ("POST", "/v1/batches", batches.create_batch),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{batch_id}", batches.get_batch),
    ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch),
    ("POST", "/v1/completions", completions),
    ("POST", "/infill", infill),
    ("POST", "/v1/systemone", systemone),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/score", pooling.score),
    ("POST", "/classify", pooling.classify),
    ("POST", "/pooling", pooling.pooling),
    ("POST", "/v2/embed", retrieval.cohere_embed),
    ("POST", "/embed", retrieval.embed),
    ("POST", "/embed_all", retrieval.embed_all),
    ("POST", "/embed_sparse", retrieval.embed_sparse),
    ("POST", "/predict", retrieval.predict),
    ("POST", "/similarity", retrieval.similarity),
    ("GET", "/info", retrieval.info),
    ("POST", "/v1/audio/transcriptions", audio.transcriptions),
    ("POST", "/v1/audio/translations", audio.translations),
    ("POST", "/v1/audio/speech", speech.speech),
    ("POST", "/v1/images/generations", images.generations),
    ("POST", "/v1/images/segmentations", segmentations.segmentations),
    ("GET", "/v2", inference_protocol.server_metadata),
    ("GET", "/v2/health/live", inference_protocol.live),
    ("GET", "/v2/health/ready", inference_protocol.ready),
    ("POST", "/v2/repository/index", inference_protocol.repository_index),
    ("GET", "/v2/models/stats", inference_protocol.statistics),
    ("GET", "/v2/models/{model:path}/versions/{version}/stats", inference_protocol.statistics),
    ("GET", "/v2/models/{model:path}/stats", inference_protocol.statistics),
    ("GET", "/v2/models/{model:path}/versions/{version}/ready", inference_protocol.model_ready),
    ("GET", "/v2/models/{model:path}/ready", inference_protocol.model_ready),
    ("POST", "/v2/models/{model:path}/versions/{version}/infer", inference_protocol.infer),
    ("POST", "/v2/models/{model:path}/infer", inference_protocol.infer),
    ("GET", "/v2/models/{model:path}/versions/{version}/config", inference_protocol.model_config),
    ("GET", "/v2/models/{model:path}/config", inference_protocol.model_config),
    ("GET", "/v2/models/{model:path}/versions/{version}", inference_protocol.model_metadata),
    ("GET", "/v2/models/{model:path}", inference_protocol.model_metadata),
    ("GET", "/v2/{kind}sharedmemory/status", inference_protocol.no_regions),
    ("POST", "/v2/{kind}sharedmemory/unregister", inference_protocol.unregister_regions),
    ("GET", "/v2/{kind}sharedmemory/region/{region:path}/status", inference_protocol.refuse_region),
    ("POST", "/v2/{kind}sharedmemory/region/{region:path}/register", inference_protocol.refuse_region),
    ("POST", "/v2/{kind}sharedmemory/region/{region:path}/unregister", inference_protocol.refuse_region),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed),
    ("POST", "/api/show", ollama.show),
    ("POST", "/api/pull", ollama_downloads.pull),
    ("DELETE", "/api/delete", ollama_downloads.delete),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.ps),
    ("GET", "/api/version", ollama.version),
    ("POST", "/start_profile", profile_routes.start_profile),
    ("POST", "/stop_profile", profile_routes.stop_profile),
    ("POST", "/profile", profile_routes.profile),
)
"""Method, path and function of each endpoint."""
UNSUPPORTED = {
    "/v1/realtime": ("the realtime interface", "send audio to /v1/audio/transcriptions"),
    "/api/embeddings": ("this older form of embeddings", "ask /api/embed"),
    "/api/create": ("making models", "start a server of a folder, or of a model of the hub"),
    "/api/copy": ("copying models", "give --served-model-name at the start"),
    "/api/push": ("uploading models", "upload a folder by the hub's own client"),
    "/v1/images/edits": ("editing of images", "run the pipeline in Python"),
    "/v1/images/variations": ("variations of images", "run the pipeline in Python"),
}
"""Paths that clients of other servers may use: what is not supported, and what to do."""


class Application:
    """The server's ASGI application.

    Args:
        context: State of the server.
    """

    def __init__(self, context: ServerContext) -> None:
        self.context, self.routes = context, ROUTES
        routes = [Route(path, function, methods=[method]) for method, path, function in ROUTES]
        self._keyless = PUBLIC | set(page.FILES) | ({"/metrics"} if context.options.metrics_without_key else set())
        self._labels = {path for _, path, _ in ROUTES if "{" not in path}
        self._patterns = [(path, route.path_regex) for (_, path, _), route in zip(ROUTES, routes, strict=True)]
        inner: ASGIApp = Router(routes, redirect_slashes=False)
        if context.options.cors_origins:
            inner = CORSMiddleware(
                inner,
                allow_origins=list(context.options.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-Id", *anthropic_errors.HEADERS],
                expose_headers=["X-Request-Id"],
            )
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            raise RuntimeError(f"expected requests of HTTP, got {scope['type']}")
        await _Exchange(self, scope, receive, send).run()

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks host and key, and calls the endpoint."""
        self._check_host(scope)
        if scope["path"] not in self._keyless and not self._is_preflight(scope):
            self._identify(scope)
        usage = scope["state"]["usage"]
        if usage is None or scope["method"] != "POST":
            await self._inner(scope, receive, send)
            return
        usage.begin()
        try:
            await self._inner(scope, receive, send)
        finally:
            usage.end()

    def _identify(self, scope: Scope) -> None:
        """Finds out whose request it is.

        Raises ApiError, 401, if it has no key of those that are known.
        """
        key = scope[CALLER] if CALLER in scope else self.context.keys.key_of(scope["headers"])
        scope["state"] |= {"key": key, "key_name": key and key.name, "usage": self.context.key_usages.of(key)}

    def _is_preflight(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" and bool(self.context.options.cors_origins)

    def _check_host(self, scope: Scope) -> None:
        """Raises ApiError for a Host that is none.

        On a loopback address a foreign one is refused as well (DNS rebinding).
        """
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if host is None:
            return
        match = _HOST.fullmatch(host)
        if match is None:
            raise ApiError(400, "expected a header Host with a name and a port, got something else")
        options = self.context.options
        name = match[1].strip("[]").lower()
        if options.uds is None and options.is_loopback and name not in (*LOOPBACK, *options.allowed_hosts):
            raise ApiError(403, "expected the header Host to name this machine, got another; add it by --allowed-host")

    def label(self, scope: Scope) -> str:
        """Returns the route of a request, for logs and metrics; one of a fixed set."""
        path = scope["path"]
        if path in self._labels:
            return str(path)
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return next((label for label, regex in self._patterns if regex.match(path)), "other")


class _Exchange:
    """One request and its response."""

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._context = app, app.context
        self._scope, self._receive, self._send = scope, receive, send
        self._status = 0
        self._error_type: str | None = None
        scope["app"] = app
        request_id, span = request_id_of(scope), None
        if app.context.tracing is not None and scope["method"] == "POST":
            span = app.context.tracing.begin(app.label(scope), request_id, scope["headers"])
        scope["state"] = {"request_id": request_id, "key": None, "key_name": None, "usage": None, "span": span}

    async def run(self) -> None:
        """Answers the request, with an error if the endpoint raises one."""
        context = self._context
        is_work = self._scope["path"] not in PUBLIC
        began = time.perf_counter()
        context.num_in_flight += is_work
        context.metrics.in_flight.set(context.num_in_flight)
        try:
            await self._app.dispatch(self._scope, self._receive, self._send_with_id)
            if (error := self._scope["state"].pop("error", None)) is not None:
                await self._fail(error)  # of a stream, which has sent it
        except ClientDisconnect:
            self._status = self._status or 499
        except asyncio.CancelledError:
            if context.stage not in (Stage.DEAD, Stage.DRAINING):
                raise
            await self._fail(ApiError(503, "the server ends; send the request to another one"))
        except HTTPException as error:
            await self._fail(_of_router(error, self._scope["path"]))
        except Exception as error:
            await self._fail(error)
        finally:
            if (model := self._scope["state"].pop("model", None)) is not None:
                context.release(model)
            context.num_in_flight -= is_work
            context.metrics.in_flight.set(context.num_in_flight)
            self._record(time.perf_counter() - began)

    async def _send_with_id(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self._scope["state"]["request_id"].encode()),
            ]
            if anthropic_errors.is_for(self._scope["path"]):
                message["headers"].append((b"request-id", self._scope["state"]["request_id"].encode()))
            if (usage := self._scope["state"]["usage"]) is not None:
                message["headers"] += [(name.encode(), value.encode()) for name, value in usage.headers().items()]
            if self._context.refuses_new and all(name != b"connection" for name, _ in message["headers"]):
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    async def _fail(self, error: BaseException) -> None:
        """Sends an error; one that comes when the answer has begun can only be logged."""
        answer = self._context.error_of(error)
        if answer.status >= 500 and not isinstance(error, ApiError):
            logger.error("%s: the request failed: %s", self._scope["state"]["request_id"], where_of(error))
        self._context.metrics.errors.labels(answer.type).inc()
        self._error_type = answer.code or answer.type
        if self._status:
            return
        body = error_body(answer, self._scope["path"], self._scope["state"]["request_id"])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        await self._send_with_id({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self._is_head else body, "more_body": False})

    @property
    def _is_head(self) -> bool:
        return bool(self._scope["method"] == "HEAD")

    def _record(self, duration_s: float) -> None:
        label, metrics, state = self._app.label(self._scope), self._context.metrics, self._scope["state"]
        metrics.requests.labels(label, str(self._status)).inc()
        metrics.request_s.labels(label).observe(duration_s)
        if state["span"] is not None:
            state["span"].end(self._status, self._error_type)
        if state["key_name"] is not None:
            metrics.by_key.labels(state["key_name"]).inc()
        if self._context.options.access_log and self._scope["path"] not in PUBLIC:
            line = {
                "request_id": state["request_id"],
                "method": self._scope["method"][:16],
                "route": label,
                "status": self._status,
                "duration_ms": round(1000 * duration_s, 1),
                "key": state["key_name"],
            }
            access_logger.info("%s", json.dumps(line))


def request_id_of(scope: Scope) -> str:
    """Returns the id that a client has given its request, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{uuid.uuid4().hex}"


def _of_router(error: HTTPException, path: str) -> ApiError:
    headers = dict(error.headers or {})
    if "Allow" in headers:  # of a set, whose order differs from process to process
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    if error.status_code == 404 and path in UNSUPPORTED:
        what, remedy = UNSUPPORTED[path]
        return ApiError(404, f"{path}: {what} is not supported; {remedy}", code="unknown_url")
    if error.status_code == 404:
        return ApiError(
            404, "expected a URL of this server, got another; docs/server.md lists them", code="unknown_url"
        )
    if error.status_code == 405:
        return ApiError(405, f"expected the method {headers.get('Allow', 'of the URL')}, got another", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)
