"""``/openapi.json`` and ``/docs``: routes and bodies, made from the request models."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.server import inference_protocol
from torchax_serve.server.adapter_routes import LoadAdapterRequest, UnloadAdapterRequest
from torchax_serve.server.anthropic import errors as anthropic_errors
from torchax_serve.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from torchax_serve.server.audio import TranscriptionRequest
from torchax_serve.server.batch.routes import BatchCreateRequest
from torchax_serve.server.batch.upload import FileRequest
from torchax_serve.server.context import context_of
from torchax_serve.server.decisions import SystemOneRequest
from torchax_serve.server.images import ImageGenerationRequest
from torchax_serve.server.inference_protocol import InferRequest
from torchax_serve.server.infill import InfillRequest
from torchax_serve.server.model_routes import ModelRequest
from torchax_serve.server.ollama import errors as ollama_errors
from torchax_serve.server.ollama.schemas import (
    DeleteRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    PullRequest,
    ShowRequest,
)
from torchax_serve.server.pooling_schemas import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    TokenPoolingRequest,
)
from torchax_serve.server.profile_routes import ProfileRequest
from torchax_serve.server.request_fields import ApiRequest, notes_of
from torchax_serve.server.responses.schemas import ResponsesRequest
from torchax_serve.server.retrieval_schemas import (
    CohereEmbedRequest,
    SimilarityRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiTokensRequest,
)
from torchax_serve.server.schemas import ChatRequest, CompletionRequest
from torchax_serve.server.segmentations import SegmentationRequest
from torchax_serve.server.speech import SpeechRequest

REQUESTS: tuple[type[ApiRequest], ...] = (
    ChatRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    OllamaChatRequest,
    GenerateRequest,
    EmbedRequest,
    ShowRequest,
    PullRequest,
    DeleteRequest,
    CompletionRequest,
    InfillRequest,
    SystemOneRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
    TokenPoolingRequest,
    CohereEmbedRequest,
    TeiEmbedRequest,
    TeiTokensRequest,
    TeiPredictRequest,
    SimilarityRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TranscriptionRequest,
    SpeechRequest,
    ImageGenerationRequest,
    SegmentationRequest,
    InferRequest,
    ProfileRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    ModelRequest,
    FileRequest,
    BatchCreateRequest,
)
"""Bodies of all routes that have one."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}

_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


_LINKS = {
    "GET /v1/models": {
        "first": {"operationId": "get_v1_models_model", "parameters": {"model": "$response.body#/data/0/id"}}
    },
    "POST /tokenize": {"text": {"operationId": "post_detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}},
    "POST /detokenize": {
        "tokens": {"operationId": "post_tokenize", "requestBody": {"prompt": "$response.body#/prompt"}}
    },
    "POST /v1/chat/completions/render": {
        "text": {"operationId": "post_detokenize", "requestBody": {"tokens": "$response.body#/prompt_token_ids"}}
    },
}
"""What of an answer is a field of another request, by method and path."""

_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "summary{cursor:pointer;padding:.2rem 0}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "code{font-size:.95em}table{margin:.3rem 0 1rem 1rem}"
)


async def openapi(request: Request) -> Response:
    """Returns the description of the server's interface."""
    return JSONResponse(_description_for(request))


async def page(request: Request) -> Response:
    """Returns a page of the same description, which needs no other file."""
    return HTMLResponse("".join(_page(_description_for(request))), headers=_PAGE_HEADERS)


def _description_for(request: Request) -> dict[str, Any]:
    return description(request.scope["app"].routes, context_of(request).model_names)


def description(routes: Any, model_names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the OpenAPI description of routes (method, path, function) and their models."""
    schemas: dict[str, Any] = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "OllamaError": _OLLAMA_ERROR}
    paths: dict[str, Any] = {}
    by_route = {route: kind for kind in REQUESTS for route in kind.routes}
    for method, path, function in routes:
        shown = path.replace(":path}", "}")
        answer: dict[str, Any] = {"description": "The answer."}
        is_text = ollama_errors.is_for(path) or inference_protocol.is_for(path)
        error = "OllamaError" if is_text else "Error"
        error = "AnthropicError" if anthropic_errors.is_for(path) else error
        if (links := _LINKS.get(f"{method} {shown}")) is not None:
            answer["links"] = links
        operation: dict[str, Any] = {
            "operationId": _operation_id(method, shown),
            "summary": (function.__doc__ or "").strip().splitlines()[0],
            "responses": {
                "200": answer,
                "default": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
                },
            },
        }
        if names := re.findall(r"{(\w+)}", shown):
            schema = {"type": "string"}
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": schema} for name in names
            ]
        kind = by_route.get(path.removesuffix("/render"))
        if kind is not None and method in ("POST", "DELETE"):
            operation["requestBody"] = {
                "required": True,
                "content": {
                    each: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}} for each in _types_of(kind)
                },
            }
            schemas.setdefault(kind.__name__, _schema_of(kind, schemas, model_names))
        paths.setdefault(shown, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "torchax-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types_of(kind: type[ApiRequest]) -> tuple[str, ...]:
    """Returns the media types of a body."""
    if kind in (TranscriptionRequest, FileRequest):
        return ("multipart/form-data",)
    return ("application/json", "multipart/form-data") if kind is SegmentationRequest else ("application/json",)


def _schema_of(kind: type[ApiRequest], schemas: dict[str, Any], model_names: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON schema of a body, without refused fields; its parts go to `schemas`."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    for name, note in notes_of(kind).items():
        if note.effect == "refused":
            schema["properties"].pop(name)
        else:
            schema["properties"][name]["description"] = f"{note.effect}: {note.text}"
    if model_names and "model" in schema["properties"]:
        schema["properties"]["model"]["examples"] = list(model_names)
        for choice in (schema["properties"]["model"], *schema["properties"]["model"].get("anyOf", ())):
            if choice.get("type") == "string":
                choice["enum"] = list(model_names)
    return _with_int_bounds(schema)


def _with_int_bounds(schema: Any) -> Any:
    """Returns a JSON schema whose integers have 64 bits, as those of requests must."""
    if isinstance(schema, list):
        return [_with_int_bounds(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_int_bounds(value) for name, value in schema.items()}
    if found.get("type") == "integer":
        found = {"minimum": -(2**63), "maximum": 2**63 - 1, **found}
    return found


def _page(found: dict[str, Any]) -> Iterator[str]:
    """Yields the parts of a page: each route with the fields of its body."""
    title = f"{found['info']['title']} {found['info']['version']}"
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title}</h1><p>The same as JSON: <a href=openapi.json>openapi.json</a>.</p>"
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            body = operation.get("requestBody")
            if body is None:
                yield f"<p>{head}</p>"
                continue
            kinds, content = " or ".join(body["content"]), next(iter(body["content"].values()))
            schema = found["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            yield f"<details><summary>{head}</summary><p><code>{kinds}</code></p><table>"
            for name, field in schema["properties"].items():
                needed = " (required)" if name in schema.get("required", ()) else ""
                yield f"<tr><td><code>{name}</code>{needed}<td>{html.escape(field.get('description', ''))}"
            yield "</table></details>"
    yield "</html>"
