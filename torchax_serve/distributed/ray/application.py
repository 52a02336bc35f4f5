"""The application: replicas that serve a model each, and an ingress that no lost replica shows through.

``serve run torchax_serve.distributed.ray.application:application model=qwen3-0.6b max_replicas=4`` runs it on a Ray
cluster, as does ``torchax-serve deploy``.
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
from torchax_serve.distributed.ray.options import ROUTER, DeployOptions

logger = logging.getLogger("torchax_serve")

MOST_TRIES = 5


class Replica:
    """One model, in a process of its own."""

    def __init__(self, options: DeployOptions) -> None:
        from torchax_serve import EngineOptions, serve
        from torchax_serve.compilation import gc_pause

        engine = EngineOptions(
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        self._model = serve(options.model, dtype=options.dtype, tensor_parallel=options.tensor_parallel, engine=engine)
        self._model.engine.warm_up()
        gc_pause.freeze_for_serving()

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Pieces of the answer; refuses what it does not know before the first one."""
        params = params_of(request)
        if "messages" in request:
            pieces = self._model.chat(request["messages"], params, stream=True)
        else:
            pieces = self._model.stream(request["prompt"], params)
        async for piece in pieces:
            yield piece

    def process_id(self, request: dict[str, Any]) -> int:
        """Of the replica that would get `request`."""
        return os.getpid()

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises; its engine ends where the cache or a thread is lost."""
        why = self._model.engine.close_reason
        if why is not None:
            raise RuntimeError(f"the engine is closed: {why}")


class Ingress:
    """Takes requests, by HTTP or by handle, and tries another replica where one is lost before its first word."""

    def __init__(self, replicas: DeploymentHandle, options: DeployOptions) -> None:
        self._replicas, self._options = replicas.options(stream=True), options

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Pieces of the answer."""
        has_begun = False
        for left in reversed(range(MOST_TRIES)):
            try:
                async for piece in self._replicas.stream.remote(request):
                    has_begun = True
                    yield piece
                return
            except ray.exceptions.RayActorError:
                # What was streamed cannot be taken back, and a sampled answer would go on otherwise.
                if has_begun or not left:
                    raise
                logger.warning("a replica was lost before its first word; the request goes to another")

    async def __call__(self, request: Request) -> Response:
        """POST of ``{"prompt": ...}`` or ``{"messages": ...}`` with sampling options; answers text as it comes."""
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
        """What a client is told of an error."""
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
    """The application, to be run by ``ray.serve.run``. Running it again replaces replicas one after the other.

    Raises:
        UnsupportedArgumentError: no node of the cluster has what a replica takes.
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
    """The application from ``name=value`` arguments of Ray's own command line: the fields of `DeployOptions`."""
    return application_of(DeployOptions.of_text(arguments))
