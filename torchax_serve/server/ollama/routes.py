"""``/api/chat``, ``/api/generate``, ``/api/embed``, and what is known of the model."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import TorchaxServeError
from torchax_serve.server.body import read_request
from torchax_serve.server.chat import start_chat
from torchax_serve.server.common_calls import reads_tools
from torchax_serve.server.completions import start_completions
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.dialect_requests import names_of_fields, note_unknown
from torchax_serve.server.key_limits import ApiKey
from torchax_serve.server.model_pool import PooledModel
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService, adapters_of, weight_counts
from torchax_serve.server.ollama.answer import NDJSON, NS, Form, OllamaAnswer, empty_answer, failed, timestamp
from torchax_serve.server.ollama.schemas import (
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaRequest,
    ShowRequest,
)
from torchax_serve.server.ollama.translation import can_think, chat_of, completion_of, own_name
from torchax_serve.server.pooling import embedded
from torchax_serve.server.pooling_schemas import EmbeddingRequest
from torchax_serve.server.sse import EventStream, until_disconnect

INTERFACE = "0.12.0"
"""Version of Ollama whose interface this is; some clients want a least one."""
FOREVER_S = 100 * 365 * 86400
"""Seconds after which a model that stays loaded is said to be unloaded."""
_NAMES = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
}
"""Fields by their names in chats."""


async def chat(request: Request) -> Any:
    """Answers a conversation of Ollama's interface."""
    body, service = await _read(request, OllamaChatRequest, "chat")
    if not body.messages:
        return JSONResponse(empty_answer(body.model, "message"))
    return await _answered_chat(request, service, body, "message")


async def generate(request: Request) -> Any:
    """Answers a prompt of Ollama's interface."""
    body, service = await _read(request, GenerateRequest, "generate")
    if not body.prompt and not body.suffix:
        return JSONResponse(empty_answer(body.model, "response"))
    if not (body.raw or body.suffix) and "chat" in service.tasks:
        return await _answered_chat(request, service, body, "response")
    with names_of_fields(_NAMES):
        completion = await service.run(completion_of, body, service)
        _, (answer,) = await start_completions(request, service, completion)
    context = context_of(request)
    made = OllamaAnswer(context, service, body.model, answer, None, "response", completion.logprobs)
    return await _response(request, body, made)


async def _answered_chat(
    request: Request, service: ModelService, body: OllamaChatRequest | GenerateRequest, form: Form
) -> Any:
    with names_of_fields(_NAMES):
        translated = await service.run(chat_of, body, service)
        (answer,), (parser,) = await start_chat(request, service, translated, bounds_answer=True)
    made = OllamaAnswer(context_of(request), service, body.model, answer, parser, form, translated.num_top)
    return await _response(request, body, made)


async def _response(request: Request, body: OllamaRequest, answer: OllamaAnswer) -> Any:
    if body.stream is not False:
        return EventStream(answer.lines(), sign=None, failed=failed, media_type=NDJSON)
    return JSONResponse(await until_disconnect(request.receive, answer.complete()))


async def _read(request: Request, kind: type[Any], task: str) -> tuple[Any, ModelService]:
    context = context_of(request)
    service, body = await read_for_model(request, kind, task, lambda body: own_name(body.model, context.model_names))
    note_unknown(body, request.scope["path"])
    service.check_name(own_name(body.model, service.names), request.state.key, may_be_adapter=True)
    return body, service


async def embed(request: Request) -> Response:
    """Returns embeddings of texts, of length 1, in Ollama's form."""
    began = time.monotonic()
    body, service = await _read(request, EmbedRequest, "embed")
    fields = {"model": own_name(body.model, service.names), "input": body.input, "dimensions": body.dimensions}
    asked = EmbeddingRequest.parse({**fields, "truncate_prompt_tokens": _cut(body), "normalize": True})
    rows, usage = await embedded(request, service, asked)
    found = {
        "model": body.model,
        "embeddings": [row.tolist() for row in rows],
        "total_duration": int((time.monotonic() - began) * NS),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
    }
    return await service.run(JSONResponse, found)


def _cut(body: EmbedRequest) -> int | None:
    """Returns the field of embeddings by which a text that is too long is cut."""
    return None if body.truncate is False else -1


async def tags(request: Request) -> Response:
    """Lists the models that requests may name, in Ollama's form."""
    context = context_of(request)
    if (only := context.only_service()) is not None:
        return JSONResponse({"models": await only.run(_entries, only, request.state.key)})
    assert context.pool is not None
    return JSONResponse({"models": await asyncio.to_thread(_pooled_entries, context.pool.models, request.state.key)})


async def ps(request: Request) -> Response:
    """Lists the models that are loaded, in Ollama's form."""
    context = context_of(request)
    context.only_service()  # raises unless requests are answered
    found = []
    for service in context.loaded:
        further = {"expires_at": timestamp(_expires_s(context, service)), "context_length": service.max_model_len or 0}
        entries = await service.run(_entries, service, request.state.key)
        found += [each | further | {"size_vram": _vram(each["size"])} for each in entries]
    return JSONResponse({"models": found})


def _expires_s(context: ServerContext, service: ModelService) -> float:
    """Returns when a model is unloaded if nobody uses it, in seconds since 1970."""
    limit_s = context.options.model_idle_timeout_s
    pooled = None if context.pool is None else context.pool.find(service.name)
    if pooled is None or limit_s is None:
        return service.created + FOREVER_S
    return time.time() + max(0.0, pooled.used_s + limit_s - time.monotonic())


async def show(request: Request) -> Response:
    """Describes a model, in Ollama's form."""
    context = context_of(request)
    only = context.only_service()
    body = await read_request(request, context.options, ShowRequest)
    note_unknown(body, "/api/show")
    name = own_name(body.model or body.name or "", context.model_names)
    service = only or await context.take(request, name)
    service.check_name(name, request.state.key, may_be_adapter=True)
    return JSONResponse(await service.run(_shown, service))


def _shown(service: ModelService) -> dict[str, Any]:
    details, config = _details(service), _text_config(service)
    kind = details["family"]
    sizes = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
    info: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": weight_counts(service.model)[1],
        f"{kind}.context_length": service.max_model_len,
        **{f"{kind}.{name}": getattr(config, field, None) for name, field in sizes.items()},
    }
    return {
        "modelfile": f"FROM {service.name}",
        "parameters": "",
        "template": service.template,
        "details": details,
        "model_info": {name: value for name, value in info.items() if value is not None},
        "capabilities": _capabilities(service),
        "modified_at": timestamp(service.created),
    }


async def version(request: Request) -> Response:
    """Returns the version of Ollama whose interface this is."""
    context_of(request)
    return JSONResponse({"version": INTERFACE})


def _text_config(service: ModelService) -> Any:
    """Returns the configuration of the language model; None of a bundle, which has a part."""
    if _is_pipeline(service):
        return None
    try:
        return service.model.config.get_text_config()
    except TorchaxServeError:
        return None


def _is_pipeline(service: ModelService) -> bool:
    return "generate_image" in service.tasks


def _entries(service: ModelService, key: ApiKey | None) -> list[dict[str, Any]]:
    """Returns what lists say of each name that a key may use."""
    size, _ = weight_counts(service.model)
    return [
        {
            "name": name,
            "model": name,
            "modified_at": timestamp(service.created),
            "size": size,
            "digest": hashlib.sha256(f"{name}\0{service.root}".encode()).hexdigest(),
            "details": _details(service),
        }
        for name in (*service.names, *adapters_of(service))
        if key is None or key.allows(name)
    ]


def _pooled_entries(models: Sequence[PooledModel], key: ApiKey | None) -> list[dict[str, Any]]:
    """Returns what lists say of several models: little of those that are not loaded."""
    found = []
    for each in models:
        if (service := each.service) is not None:
            found += _entries(service, key)
            continue
        for name in each.spec.names:
            if key is None or key.allows(name):
                digest = hashlib.sha256(f"{name}\0{each.spec.source}".encode()).hexdigest()
                known = {"name": name, "model": name, "modified_at": timestamp(0), "size": each.num_bytes}
                found.append(known | {"digest": digest, "details": {"parent_model": "", "format": "safetensors"}})
    return found


def _details(service: ModelService) -> dict[str, Any]:
    kind = service.model.class_name if _is_pipeline(service) else service.model.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": f"{weight_counts(service.model)[1] / 1e9:.1f}B",
        "quantization_level": service.model.dtype_name,
    }


def _vram(size: int) -> int:
    """Returns the bytes of weights that are in an accelerator's memory."""
    import jax

    return 0 if jax.default_backend() == "cpu" else size


def _capabilities(service: ModelService) -> list[str]:
    """Returns what a model can do, in Ollama's words."""
    is_chat = "chat" in service.tasks
    found = {
        "completion": "generate" in service.tasks,
        "embedding": "embed" in service.tasks,
        "tools": is_chat and reads_tools(service.template),
        "thinking": is_chat and can_think(service),
        "vision": service.takes_images,
    }
    return [name for name, is_there in found.items() if is_there]
