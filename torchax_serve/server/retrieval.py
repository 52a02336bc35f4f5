"""Embeddings, ranks and labels in the forms of Cohere and text-embeddings-inference (TEI)."""

from __future__ import annotations

import base64
import functools
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.json_lists import list_response
from torchax_serve.server.media_inputs import files_of, results
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.pooling import charge_tokens, text_results
from torchax_serve.server.pooling_schemas import texts_of
from torchax_serve.server.request_fields import ApiRequest
from torchax_serve.server.retrieval_schemas import (
    CohereEmbedRequest,
    SimilarityParameters,
    SimilarityRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiTokensRequest,
)

Body = TypeVar("Body", bound=ApiRequest)
_PROMPTS = {"search_query": "query", "search_document": "document"}
"""Names of sentence-transformers for Cohere's types of inputs."""


async def _read(request: Request, kind: type[Body], task: str) -> tuple[ModelService, Body]:
    service, body = await read_for_model(request, kind, task)
    named: Any = body
    service.settle_name(named, request.state.key)
    return service, body


async def cohere_embed(request: Request) -> Response:
    """Returns embeddings in Cohere's form, of several types of numbers."""
    service, body = await _read(request, CohereEmbedRequest, "embed")
    images, texts = _cohere_inputs(body)
    if images:
        rows = await _image_rows(request, service, body, images)
        num_tokens = 0
    else:
        rows = await _text_rows(request, service, body, texts)
        usage = await charge_tokens(request, service, texts, body.max_tokens)
        num_tokens = usage["total_tokens"]
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    found = await service.run(_by_type, rows, kinds)
    tokens = {"input_tokens": num_tokens}
    content: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "response_type": "embeddings_by_type",
        "embeddings": found,
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens},
    }
    return await _json(service, content)


def _cohere_inputs(body: CohereEmbedRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the images of a request as parts of messages, and its texts; one of them is empty."""
    given = [name for name in ("texts", "images", "inputs") if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request("texts: expected one of texts, images and inputs, got none or two", "texts", "invalid_value")
    if body.texts is not None:
        return [], body.texts
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in body.images or ()]
    for index, each in enumerate(body.inputs or ()):
        content = each.get("content")
        is_part = isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict)
        if not is_part or set(each) != {"content"}:
            raise bad_request(f"inputs[{index}]: expected content with one part", "inputs", "invalid_value")
        assert isinstance(content, list)
        parts.append(content[0])
    if not any(part.get("type") == "text" for part in parts):
        if not parts:
            raise bad_request(f"{given[0]}: expected at least one, got none", given[0], "invalid_value")
        return parts, []
    if any(set(part) != {"type", "text"} or not isinstance(part["text"], str) for part in parts):
        raise bad_request("inputs: expected texts alone or images alone, got both", "inputs", "invalid_value")
    return [], [str(part["text"]) for part in parts]


async def _image_rows(
    request: Request, service: ModelService, body: CohereEmbedRequest, images: list[dict[str, Any]]
) -> np.ndarray:
    model: Any = service.model
    field = "images" if body.images is not None else "inputs"
    if not hasattr(type(model), "aembed_images"):
        raise bad_request(f"{field}: expected texts for {service.name}, got images", field, "invalid_value")
    for name in ("output_dimension", "max_tokens"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: expected none for images, got one", name, "unsupported_parameter")
    files = await files_of(request, service, images, "image")
    try:
        found = await results(request, model.aembed_images, files, pooling=None, normalize=False)
    except ApiError as error:
        if error.param != "pooling":
            raise
        message = f"{field}: expected a model with a pooler, got {service.name}; /v1/embeddings takes pooling"
        raise bad_request(message, field, "invalid_value") from error
    return np.stack([np.asarray(row, np.float32) for row in found])


async def _text_rows(
    request: Request, service: ModelService, body: CohereEmbedRequest, texts: Sequence[str]
) -> np.ndarray:
    if hasattr(type(service.model), "aembed_images"):
        raise bad_request(f"texts: expected images for {service.name}, got texts", "texts", "invalid_value")
    if body.truncate == "START":
        message = "truncate: expected NONE or END, at which texts are cut, got START"
        raise bad_request(message, "truncate", "invalid_value")
    if body.max_tokens is not None and (body.max_tokens < 1 or body.truncate == "NONE"):
        message = f"max_tokens: expected 1 or more, with truncate END, got {body.max_tokens}"
        raise bad_request(message, "max_tokens", "invalid_value")
    cuts: bool | int = body.truncate != "NONE" and (True if body.max_tokens is None else body.max_tokens)
    prompt = await service.run(_prompt_of, service, body.input_type)
    options: dict[str, Any] = {"truncate": cuts, "truncate_dim": body.output_dimension, "prompt_name": prompt}
    call = functools.partial(service.model.aembed, **options)
    return np.stack(await text_results(request, call, texts, "texts", {"truncate_dim": "output_dimension"}))


def _prompt_of(service: ModelService, input_type: str | None) -> str | None:
    """Returns the name of the prompt for a type of inputs; None: the checkpoint's default."""
    if input_type is None:
        return None
    names = service.model.prompt_names
    return next((name for name in (input_type, _PROMPTS.get(input_type)) if name in names), None)


def _by_type(rows: np.ndarray, kinds: Sequence[str]) -> dict[str, list[Any]]:
    """Returns embeddings float32[num_rows, dim] as lists, by type."""
    return {kind: _CONVERTED[kind](rows) for kind in kinds}


def _base64(rows: np.ndarray) -> list[str]:
    return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]


def _int8(rows: np.ndarray) -> np.ndarray:
    """Returns int8[num_rows, dim], each row scaled so that its largest value is 127 or -127."""
    largest = np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float32).tiny)
    return np.rint(rows * (127 / largest)).astype(np.int8)


def _bits(rows: np.ndarray) -> np.ndarray:
    """Returns uint8[num_rows, dim / 8]: a bit for each value, 1 above 0."""
    if rows.shape[1] % 8:
        raise bad_request(
            f"embedding_types: expected embeddings with a multiple of 8 values for bits, got {rows.shape[1]}",
            "embedding_types",
            "invalid_value",
        )
    return np.packbits(rows > 0, axis=1)


_CONVERTED: dict[str, Callable[[np.ndarray], list[Any]]] = {
    "float": lambda rows: rows.astype(np.float32).tolist(),
    "int8": lambda rows: _int8(rows).tolist(),
    "uint8": lambda rows: (_int8(rows).astype(np.int32) + 128).tolist(),
    "binary": lambda rows: (_bits(rows).astype(np.int32) - 128).tolist(),
    "ubinary": lambda rows: _bits(rows).tolist(),
    "base64": _base64,
}


async def embed(request: Request) -> Response:
    """Returns embeddings of texts, of length 1 by default, as a list."""
    service, body = await _read(request, TeiEmbedRequest, "embed")
    options: dict[str, Any] = {
        "truncate": body.truncate,
        "truncate_dim": body.dimensions,
        "normalize": body.normalize is not False,
        "prompt_name": body.prompt_name,
    }
    texts = texts_of(body.inputs)
    names = {"truncate_dim": "dimensions", "prompt_name": "prompt_name"}
    rows = await text_results(request, functools.partial(service.model.aembed, **options), texts, "inputs", names)
    await charge_tokens(request, service, texts, None)
    return await _json(service, [np.asarray(row, np.float32) for row in rows])


async def embed_all(request: Request) -> Response:
    """Returns the embeddings of each token of texts, as a list."""
    service, body = await _read(request, TeiTokensRequest, "embed")
    options: dict[str, Any] = {"truncate": body.truncate, "prompt_name": body.prompt_name}
    texts = texts_of(body.inputs)
    call = functools.partial(service.model.aembed_tokens, **options)
    rows = await text_results(request, call, texts, "inputs", {"prompt_name": "prompt_name"})
    await charge_tokens(request, service, texts, None)
    return await _json(service, [np.asarray(row, np.float32) for row in rows])


async def embed_sparse(request: Request) -> Response:
    """Returns sparse embeddings of texts: token ids with weights, as a list."""
    service, body = await _read(request, TeiTokensRequest, "embed")
    options: dict[str, Any] = {"truncate": body.truncate, "prompt_name": body.prompt_name}
    texts = texts_of(body.inputs)
    call = functools.partial(service.model.aembed_sparse, **options)
    found = await text_results(request, call, texts, "inputs", {"prompt_name": "prompt_name"})
    await charge_tokens(request, service, texts, None)
    rows = [
        [{"index": int(index), "value": float(value)} for index, value in zip(each.indices, each.values, strict=True)]
        for each in found
    ]
    return await _json(service, rows)


async def predict(request: Request) -> Response:
    """Returns the labels of texts or pairs with scores, the best first."""
    service, body = await _read(request, TeiPredictRequest, "classify")
    given = body.inputs
    is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    rows: list[Any] = given if is_batch else [[given] if isinstance(given, str) else given]  # type: ignore[assignment]
    size = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    if size not in (1, 2) or any(not isinstance(row, list) or len(row) != size for row in rows):
        raise bad_request(
            "inputs: expected a text, a pair, or lists of one text each or of two each, got others",
            "inputs",
            "invalid_value",
        )
    model: Any = service.model
    if size == 2:
        service.require("rank", "/predict")
        pairs = [tuple(row) for row in rows]
        score = functools.partial(model.ascore_pairs, truncate=body.truncate)
        scores = await text_results(request, score, pairs, "inputs")
        label = str((model.config.id2label or {}).get(0, "LABEL_0"))
        found = [[{"score": float(score), "label": label}] for score in scores]
    else:
        texts = [row[0] for row in rows]
        call = functools.partial(model.aclassify, truncate=bool(body.truncate))
        labelled = await text_results(request, call, texts, "inputs")
        found = [
            sorted(({"score": score, "label": name} for name, score in each.scores.items()), key=_score, reverse=True)
            for each in labelled
        ]
    await charge_tokens(request, service, [text for row in rows for text in row], None)
    return await _json(service, found if is_batch else found[0])


async def similarity(request: Request) -> Response:
    """Returns the cosine of a text's embedding with those of others, as a list."""
    service, body = await _read(request, SimilarityRequest, "embed")
    options = body.parameters or SimilarityParameters()
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    if not body.inputs.sentences:
        raise bad_request("inputs.sentences: expected at least one text, got none", "inputs.sentences", "invalid_value")
    call = functools.partial(
        service.model.aembed, truncate=options.truncate, prompt_name=options.prompt_name, normalize=True
    )
    rows = np.stack(await text_results(request, call, texts, "inputs", {"prompt_name": "parameters.prompt_name"}))
    await charge_tokens(request, service, texts, None)
    return await _json(service, (rows[1:] @ rows[0]).tolist())


async def info(request: Request) -> Response:
    """Returns the model, its kind and the limits of requests, in TEI's form."""
    context = context_of(request)
    service = context.only_service()
    if service is None:
        raise ApiError(404, "/info: expected a server of one model, got one of several; GET /v1/models lists them")
    options = context.options
    return JSONResponse(
        {
            "model_id": service.root,
            "model_sha": None,
            "model_dtype": service.model.dtype_name,
            "model_type": _model_type(service),
            "max_concurrent_requests": None,
            "max_input_length": service.max_model_len,
            "max_batch_tokens": None,
            "max_batch_requests": None,
            "max_client_batch_size": options.request.max_texts,
            "auto_truncate": False,
            "tokenization_workers": None,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _score(row: dict[str, Any]) -> float:
    return float(row["score"])


def _model_type(service: ModelService) -> dict[str, Any]:
    tasks = service.tasks
    if "classify" not in tasks:
        return {"reranker" if "rank" in tasks and "embed" not in tasks else "embedding": {}}
    labels = {str(index): str(label) for index, label in (service.model.config.id2label or {}).items()}
    ids = {label: int(index) for index, label in labels.items()}
    return {"reranker" if "rank" in tasks else "classifier": {"id2label": labels, "label2id": ids}}


async def _json(service: ModelService, content: Any) -> Response:
    """Returns an answer that is encoded off the event loop, a list in its pieces."""
    if isinstance(content, list) and content and isinstance(content[0], np.ndarray):
        response = await list_response(service, "list", (row.tolist() for row in content), {})
        return Response(bytes(response.body)[len(b'{"list":') : -1], media_type="application/json")
    return Response(await service.run(_dumped, content), media_type="application/json")


def _dumped(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
