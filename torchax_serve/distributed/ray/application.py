"""Ray Serve application: replicas of a model, and an ingress.

The ingress retries requests of lost replicas. ``serve run torchax_serve.distributed.ray.application:application
model=qwen3-0.6b max_replicas=4`` runs the application on a Ray cluster, as does ``torchax-serve deploy``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from model_adapters.errors import TorchaxServeError
from torchax_serve.distributed.ray.http_requests import (
    BadHttpRequest,
    answer_to,
    check_head,
    params_of,
    parse_request,
    read_body,
    within,
)
from torchax_serve.distributed.ray.openai_fields import CHAT
from torchax_serve.distributed.ray.options import ROUTER, DeployOptions

logger = logging.getLogger("torchax_serve")

MOST_TRIES = 5


class Replica:
    """Model in a process of its own."""

    def __init__(self, options: DeployOptions) -> None:
        from torchax_serve import EngineOptions, serve
        from torchax_serve.compilation import gc_pause

        engine = EngineOptions(
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        self._model = serve(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            tensor_parallel=options.tensor_parallel,
            engine=engine,
        )
        self._model.engine.warm_up()
        gc_pause.freeze_for_serving()

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Yields pieces of the answer; refuses unknown fields before the first one."""
        params = params_of(request)
        if "messages" in request:
            options = {name: request[name] for name in CHAT if request.get(name) is not None}
            pieces = self._model.chat(request["messages"], params, stream=True, **options)
        else:
            pieces = self._model.stream(request["prompt"], params)
        async for piece in pieces:
            yield piece

    def process_id(self, request: dict[str, Any]) -> int:
        """Returns the process id of the replica that would get `request`."""
        return os.getpid()

    def check_health(self) -> None:
        """Raises if the engine has ended, as after the loss of its cache or a thread.

        Ray then replaces the replica.
        """
        why = self._model.engine.close_reason
        if why is not None:
            raise RuntimeError(f"the engine is closed: {why}")


class Ingress:
    """Ingress for requests by HTTP or handle.

    If a replica is lost before its first piece of output, the request is sent to another one.
    """

    def __init__(self, replicas: DeploymentHandle, options: DeployOptions) -> None:
        self._replicas, self._options = replicas.options(stream=True), options

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Yields pieces of the answer."""
        has_begun = False
        for left in reversed(range(MOST_TRIES)):
            try:
                async for piece in self._replicas.stream.remote(request):
                    has_begun = True
                    yield piece
                return
            except ray.exceptions.RayActorError:
                # Streamed text cannot be taken back, and a sampled answer would continue with other tokens.
                if has_begun or not left:
                    raise
                logger.warning("a replica was lost before its first word; the request goes to another")

    async def __call__(self, request: Request) -> Response:
        """Answers a POST of ``{"prompt": ...}`` or ``{"messages": ...}``; streams text.

        Sampling options may be added to the object.
        """
        try:
            check_head(request.scope, self._options.max_body_bytes)
            body = await read_body(request.stream(), self._options.max_body_bytes)
            pieces = within(self.stream(parse_request(body, self._options.max_body_bytes)), self._options.stall_s)
            first = await anext(pieces, "")
        except Exception as error:
            refused = self._refused(error)
            return JSONResponse(refused.content(), status_code=refused.status, headers=refused.headers)
        return StreamingResponse(_joined(first, pieces), media_type="text/plain; charset=utf-8")

    @staticmethod
    def _refused(error: Exception) -> BadHttpRequest:
        """Returns the HTTP answer to an error."""
        if isinstance(error, BadHttpRequest):
            return error
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, TorchaxServeError):
            return answer_to(error.cause)
        logger.error("a request has failed", exc_info=error)
        return BadHttpRequest(503, "the request failed on all replicas that were tried; send it again", "unavailable")


async def _joined(first: str, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in pieces:
        yield piece


def application_of(options: DeployOptions) -> ray_serve.Application:
    """Builds the application for ``ray.serve.run``.

    Running it again replaces replicas one after the other.

    Raises:
        UnsupportedArgumentError: No node of the cluster has the resources of a replica.
    """
    if ray.is_initialized():
        options.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]])
    replicas = ray_serve.deployment(Replica).options(
        max_ongoing_requests=2 * options.max_num_seqs,
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

    The names are the fields of `DeployOptions`.
    """
    return application_of(DeployOptions.of_text(arguments))
