"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM names them.

They exist with an option of the server only.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from model_adapters.errors import CheckpointError, InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from torchax_serve.server.auth import check_for_all_models
from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService, adapters_of
from torchax_serve.server.request_fields import ApiRequest, honoured, no_effect, refused


class LoadAdapterRequest(ApiRequest):
    """Body of ``/v1/load_lora_adapter``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/load_lora_adapter",)
    lora_name: Annotated[str, honoured("name of the adapter, by which requests ask for it as their `model`")]
    lora_path: Annotated[str, honoured("its folder on the server, as peft writes it")]
    load_inplace: Annotated[bool | None, refused("expected false; unload the adapter first, got true", False)] = None


class UnloadAdapterRequest(ApiRequest):
    """Body of ``/v1/unload_lora_adapter``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/unload_lora_adapter",)
    lora_name: Annotated[str, honoured("name of the adapter; requests that run or wait with it end first")]
    lora_int_id: Annotated[int | None, no_effect("adapters are found by their name")] = None


async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter, which requests then name as their model."""
    service = _service(request)
    body = await read_request(request, context_of(request).options, LoadAdapterRequest)
    if body.lora_name in service.names:
        raise bad_request(
            f"lora_name: expected another name than the model's, got {body.lora_name[:100]!r}",
            "lora_name",
            "invalid_value",
        )
    try:
        await asyncio.to_thread(service.model.load_adapter, body.lora_name, body.lora_path)
    except (InvalidArgumentError, CheckpointError, UnsupportedModelError) as error:
        raise bad_request(str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter once the requests that have it have ended."""
    service = _service(request)
    context = context_of(request)
    body = await read_request(request, context.options, UnloadAdapterRequest)
    if body.lora_name not in adapters_of(service):
        raise ApiError(
            404,
            f"the adapter {body.lora_name[:100]!r} is not loaded; GET /v1/models lists those that are",
            param="lora_name",
            code="model_not_found",
        )
    try:
        await asyncio.to_thread(service.model.unload_adapter, body.lora_name, context.options.drain_timeout_s)
    except InvalidArgumentError as error:
        raise bad_request(str(error)) from error
    except TorchaxServeError as error:
        raise ApiError(409, str(error), code="conflict") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _service(request: Request) -> ModelService:
    """Returns the model.

    Raises ApiError unless the server's options and the request's key allow its change.
    """
    context = context_of(request)
    if not context.options.allow_runtime_lora_updating:
        raise ApiError(
            404, "expected a server that loads adapters, got one started without --allow-runtime-lora-updating"
        )
    check_for_all_models(request.state.key)
    return context.service()
