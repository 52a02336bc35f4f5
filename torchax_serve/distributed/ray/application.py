"""Ray Serve application: replicas of a server, and an ingress.

Each replica runs the application of ``torchax-serve serve``. The ingress checks what the server's protocol class does,
and retries requests of lost replicas. On a Ray cluster ``torchax-serve deploy`` runs it, or Ray's own command: ``serve
run torchax_serve.distributed.ray.application:application model=qwen3-0.6b max_replicas=4``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model_adapters.errors import InvalidArgumentError, QueueFullError, RequestError
from torchax_serve.distributed.ray.http_requests import (
    Message,
    error_messages,
    joined_metrics,
    json_messages,
    made_request,
    messages_of,
    prefix_of,
    read_request,
)
from torchax_serve.distributed.ray.options import ROUTER, DeployOptions
from torchax_serve.distributed.ray.prefix_affinity import known_replicas
from torchax_serve.server.app import Application, request_id_of
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.error_forms import error_body
from torchax_serve.server.errors import ApiError, api_error_of
from torchax_serve.server.lifespan import dead_reason, open_model
from torchax_serve.server.logs import log_to_stderr
from torchax_serve.server.model_pool import ModelSpec

logger = logging.getLogger("torchax_serve")

MOST_TRIES = 5
MORE_ONGOING = 16
"""Requests of a full replica beside those of its engine: lists of models, metrics, token counts."""
EVERY_REPLICA = ("/metrics", "/load")
"""Paths whose answer is one of all replicas together."""


class Replica:
    """Server of a model in a process of its own."""

    def __init__(self, options: DeployOptions) -> None:
        from torchax_serve import EngineOptions, serve
        from torchax_serve.compilation import gc_pause

        log_to_stderr(options.server.log_format)
        own = {
            "max_num_seqs": options.max_num_seqs,
            "max_model_len": options.max_model_len,
            "kv_cache_dtype": options.kv_cache_dtype,
        }
        loading = {
            "dtype": options.dtype,
            "quantization": options.quantization,
            "tensor_parallel": options.tensor_parallel,
            "engine": EngineOptions(**{"max_num_waiting": options.max_num_waiting, **own, **options.engine}),
        }
        self._context = ServerContext(options.server)
        self._app = Application(self._context)
        self._model = serve(options.model, **{**loading, **options.load})
        self._context.set_service(open_model(ModelSpec((), lambda: self._model), options.server))
        self._context.stage = Stage.READY
        self._lag: asyncio.Task[None] | None = None  # which needs the event loop of requests
        gc_pause.freeze_for_serving()

    async def respond(self, request: dict[str, Any]) -> AsyncIterator[Message]:
        """Yields the ASGI messages of the answer to a request of `http_requests.made_request`."""
        if self._lag is None:
            self._lag = asyncio.create_task(self._context.loop_lag.watch())
        self._context.metrics.loop_lag_s.set(self._context.loop_lag.take())
        async for message in messages_of(self._app, request):
            yield message

    def process_id(self, request: dict[str, Any]) -> int:
        """Returns the process id of the replica that would get `request`."""
        return os.getpid()

    def check_health(self) -> None:
        """Raises if the engine has ended or does not move.

        Ray then replaces the replica.
        """
        why = self._model.engine.close_reason if self._model.writes_text else None
        why = why or dead_reason(self._context)
        if why is not None:
            raise RuntimeError(f"the engine is closed: {why}")


class Ingress:
    """Ingress for requests by HTTP or handle.

    If a replica is lost before the answer has begun, the request is sent to another one.
    """

    def __init__(self, replicas: DeploymentHandle, options: DeployOptions) -> None:
        self._replicas, self._options = replicas.options(stream=True), options

    async def __call__(self, request: Request) -> Response:
        """Answers a request of HTTP, on every path of the server."""
        return _Relayed(self)

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the pieces of the answer to a POST of JSON: those of an answer by HTTP.

        Raises:
            InvalidArgumentError: The request is refused.
            RequestError: It has failed.
        """
        raw = json.dumps(dict(body)).encode()
        named = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": pairs}
        status, refusal = 0, b""
        async for message in self._answer(made_request(scope, raw, await prefix_of(pairs, raw))):
            status = message.get("status", status)
            piece = message.get("body", b"")
            if status >= 400:
                refusal += piece
            elif piece:
                yield piece
        if status >= 400:
            text = refusal.decode("utf-8", "replace")
            raise InvalidArgumentError(text) if status < 500 else RequestError(text)

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request of HTTP by ASGI."""
        try:
            request = await read_request(scope, receive, self._options.server)
        except ClientDisconnect:
            return
        except ApiError as error:
            await _send_error(error, error_body(error, scope["path"], request_id_of(scope)), scope, send)
            return
        path, has_begun = request["scope"]["path"], False
        try:
            if path in EVERY_REPLICA and scope["method"] == "GET":
                messages = self._of_all(request)
            else:
                messages = self._answer(request)
            async with contextlib.aclosing(messages):
                async for message in messages:
                    has_begun = True
                    await send(_without_id(message))
        except Exception as error:
            if has_begun:
                raise  # the connection breaks off, which the client sees
            answer = _refused(error)
            await _send_error(answer, error_body(answer, path, request_id_of(scope)), scope, send)

    async def _answer(self, request: dict[str, Any]) -> AsyncGenerator[Message]:
        """Yields the messages of a replica's answer, or another's if it is lost before."""
        for left in reversed(range(MOST_TRIES)):
            has_begun, messages = False, self._replicas.respond.remote(request)
            try:
                async for message in messages:
                    has_begun = True
                    yield message
                return
            except ray.exceptions.RayActorError:
                # Streamed text cannot be taken back, and a sampled answer would continue with other tokens.
                if has_begun or not left:
                    raise
                logger.warning("a replica was lost before its first word; the request goes to another")
            finally:
                messages.cancel()  # no more than a note once it has ended

    async def _of_all(self, request: dict[str, Any]) -> AsyncGenerator[Message]:
        """Yields the messages of one answer for all replicas, or of the first refusal."""
        bodies: dict[str, str] = {}
        head: Message = {}
        for replica in known_replicas(Replica.__name__):
            messages = [each async for each in self._answer({**request, "replica": replica})]
            if messages[0]["status"] != 200:
                for message in messages:
                    yield message
                return
            head = messages[0]
            bodies[replica] = b"".join(each.get("body", b"") for each in messages[1:]).decode()
        if request["scope"]["path"] == "/load":
            for message in json_messages(
                {"server_load": sum(json.loads(each)["server_load"] for each in bodies.values())}
            ):
                yield message
            return
        joined = joined_metrics(bodies)
        kept = [(name, value) for name, value in head.get("headers", ()) if name != b"content-length"]
        yield {
            "type": "http.response.start",
            "status": 200,
            "headers": [*kept, (b"content-length", b"%d" % len(joined))],
        }
        yield {"type": "http.response.body", "body": joined, "more_body": False}


class _Relayed(Response):
    """Answer that comes from a replica."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        await self._ingress.relay(scope, receive, send)


async def _send_error(error: ApiError, body: bytes, scope: Scope, send: Send) -> None:
    for message in error_messages(error, body, request_id_of(scope)):
        await send(_without_id(message))


def _without_id(message: Message) -> Message:
    """Returns a message without the request's id, which Ray's proxy adds: it has given it."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [each for each in message["headers"] if each[0].lower() != b"x-request-id"]}


def _refused(error: Exception) -> ApiError:
    """Returns the answer to an error of no replica's application."""
    if isinstance(error, BackPressureError):
        return api_error_of(QueueFullError("the queue of the replicas is full"))
    logger.error("a request has failed", exc_info=error)
    return ApiError(503, "the request failed on all replicas that were tried; send it again", code="unavailable")


def application_of(options: DeployOptions) -> ray_serve.Application:
    """Builds the application for ``ray.serve.run``.

    Running it again replaces replicas one after the other.

    Raises:
        UnsupportedArgumentError: No node of the cluster has the resources of a replica.
    """
    if ray.is_initialized():
        options.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]])
    replicas = ray_serve.deployment(Replica).options(
        max_ongoing_requests=2 * options.max_num_seqs + MORE_ONGOING,
        max_queued_requests=options.max_num_waiting,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "initial_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.max_num_seqs,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
        },
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options=options.actor_options(),
    )
    ingress = ray_serve.deployment(Ingress).options(max_ongoing_requests=4096)
    return ingress.bind(replicas.bind(options), options)


def application(arguments: dict[str, str]) -> ray_serve.Application:
    """Builds the application from ``name=value`` arguments of Ray's command line.

    The names are the fields of `DeployOptions`, and those of `ServerOptions` that are one text or number.
    """
    return application_of(DeployOptions.of_text(arguments))
