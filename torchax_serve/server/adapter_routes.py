"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM names them.

They exist with an option of the server only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from model_adapters.errors import CheckpointError, InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from torchax_serve.server.auth import check_for_all_models
from torchax_serve.server.body import read_request
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService, adapters_of, unknown_model
from torchax_serve.server.request_fields import ApiRequest, honoured, no_effect, refused

logger = logging.getLogger("torchax_serve.server")


class LoadAdapterRequest(ApiRequest):
    """Body of ``/v1/load_lora_adapter``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/load_lora_adapter",)
    lora_name: Annotated[str, honoured("name of the adapter, by which requests ask for it as their `model`")]
    lora_path: Annotated[str, honoured("its folder on the server, as peft writes it")]
    base_model_name: Annotated[str | None, honoured("of a server of several models, the one that it is for")] = None
    load_inplace: Annotated[bool | None, refused("expected false; unload the adapter first, got true", False)] = None


class UnloadAdapterRequest(ApiRequest):
    """Body of ``/v1/unload_lora_adapter``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/unload_lora_adapter",)
    lora_name: Annotated[str, honoured("name of the adapter; requests that run or wait with it end first")]
    lora_int_id: Annotated[int | None, no_effect("adapters are found by their name")] = None


async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter, which requests then name as their model."""
    context = _checked(request)
    only = context.only_service()
    body = await read_request(request, context.options, LoadAdapterRequest)
    if only is not None:
        if body.base_model_name is not None and body.base_model_name not in only.names:
            raise unknown_model(body.base_model_name)
        _check_name(body.lora_name, only.names)
        await _load(only, body)
        return _done(body.lora_name, "added")
    assert context.pool is not None
    async with context.pool.changing_adapters:
        if not body.base_model_name:
            message = f"base_model_name: expected one of {', '.join(context.model_names)}, got none"
            raise bad_request(message, "base_model_name", "missing_required_parameter")
        if body.base_model_name not in context.model_names:
            raise unknown_model(body.base_model_name)
        _check_name(body.lora_name, context.every_name)
        service = await context.take(request, body.base_model_name)  # which the end of the request lets go
        await _load(service, body)
        context.find(request, body.base_model_name).spec.adapters[body.lora_name] = body.lora_path
    return _done(body.lora_name, "added")


async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter once the requests that have it have ended."""
    context = _checked(request)
    only = context.only_service()
    body = await read_request(request, context.options, UnloadAdapterRequest)
    if only is not None:
        await _unload(only, body.lora_name, context.options.drain_timeout_s)
        return _done(body.lora_name, "removed")
    assert context.pool is not None
    async with context.pool.changing_adapters:
        model = context.pool.find(body.lora_name)
        if model is None or body.lora_name not in model.spec.adapters:
            raise _not_loaded(body.lora_name)
        if model.status != "unloaded":  # else the next load leaves it out
            service = await context.take(request, model.name)
            await _unload(service, body.lora_name, context.options.drain_timeout_s)
        del model.spec.adapters[body.lora_name]
    return _done(body.lora_name, "removed")


def restore_adapters(service: ModelService, adapters: dict[str, str]) -> None:
    """Has a model of several, loaded again, have the adapters that it had; called in a thread.

    One that cannot be loaded any more leaves `adapters`.
    """
    has = adapters_of(service)
    for name in has.keys() - adapters.keys():
        service.model.unload_adapter(name)
    for name in [each for each in adapters if each not in has]:
        try:
            service.model.load_adapter(name, adapters[name])
        except (TorchaxServeError, OSError) as error:
            logger.error("the adapter %s of %s is dropped: %s", name, service.name, error)
            adapters.pop(name)


def _check_name(name: str, taken: Sequence[str]) -> None:
    """Raises ApiError, 400, for the name of a model, or of several models' adapters."""
    if name in taken:
        message = f"lora_name: expected another name than the model's, got {name[:100]!r}"
        raise bad_request(message, "lora_name", "invalid_value")


async def _load(service: ModelService, body: LoadAdapterRequest) -> None:
    try:
        await asyncio.to_thread(service.model.load_adapter, body.lora_name, body.lora_path)
    except (InvalidArgumentError, CheckpointError, UnsupportedModelError) as error:
        raise bad_request(str(error)) from error


async def _unload(service: ModelService, name: str, timeout_s: float) -> None:
    if name not in adapters_of(service):
        raise _not_loaded(name)
    try:
        await asyncio.to_thread(service.model.unload_adapter, name, timeout_s)
    except InvalidArgumentError as error:
        raise bad_request(str(error)) from error
    except TorchaxServeError as error:
        raise ApiError(409, str(error), code="conflict") from error


def _not_loaded(name: str) -> ApiError:
    message = f"the adapter {name[:100]!r} is not loaded; GET /v1/models lists those that are"
    return ApiError(404, message, param="lora_name", code="model_not_found")


def _done(name: str, what: str) -> Response:
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {what} successfully.")


def _checked(request: Request) -> ServerContext:
    """Returns the server's state, if its options and the request's key allow a change of models.

    Raises:
        ApiError: 404 or 403 otherwise.
    """
    context = context_of(request)
    if not context.options.allow_runtime_lora_updating:
        raise ApiError(
            404, "expected a server that loads adapters, got one started without --allow-runtime-lora-updating"
        )
    check_for_all_models(request.state.key)
    return context
