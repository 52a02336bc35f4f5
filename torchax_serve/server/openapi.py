"""``/openapi.json``: the routes and the bodies that they take, made from the request models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.server.audio import TranscriptionRequest
from torchax_serve.server.pooling_schemas import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    TokenPoolingRequest,
)
from torchax_serve.server.request_fields import ApiRequest, notes_of
from torchax_serve.server.schemas import ChatRequest, CompletionRequest

REQUESTS: tuple[type[ApiRequest], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
    TokenPoolingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TranscriptionRequest,
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


async def openapi(request: Request) -> Response:
    """Returns the description of the server's interface."""
    return JSONResponse(description(request.scope["app"].routes))


def description(routes: Any) -> dict[str, Any]:
    """Returns the OpenAPI description of routes (method, path, function)."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    by_route = {route: kind for kind in REQUESTS for route in kind.routes}
    for method, path, function in routes:
        shown = path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "summary": (function.__doc__ or "").strip().splitlines()[0],
            "responses": {
                "200": {"description": "The answer."},
                "default": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        if "{model}" in shown:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        kind = by_route.get(path.removesuffix("/render"))
        if kind is not None and method == "POST":
            operation["requestBody"] = {
                "required": True,
                "content": {_type_of(kind): {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}},
            }
            schemas.setdefault(kind.__name__, _schema_of(kind, schemas))
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


def _type_of(kind: type[ApiRequest]) -> str:
    return "multipart/form-data" if kind is TranscriptionRequest else "application/json"


def _schema_of(kind: type[ApiRequest], schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a body, without refused fields; its parts go to `schemas`."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    for name, note in notes_of(kind).items():
        if note.effect == "refused":
            schema["properties"].pop(name)
        else:
            schema["properties"][name]["description"] = f"{note.effect}: {note.text}"
    return schema
