"""Embeddings, labels and scores of texts, as OpenAI, vLLM, Cohere and Jina spell them."""

from __future__ import annotations

import base64
import functools
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import UnsupportedModelError
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import bad_request, in_words_of_requests
from torchax_serve.server.json_lists import list_response
from torchax_serve.server.media_inputs import are_objects, files_of, labels_of, refuse_objects, results
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.pooling_schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenPoolingRequest,
    texts_of,
)
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.server.sse import until_disconnect
from torchax_serve.server.token_vectors import (
    TASKS,
    finds_pages,
    has_token_vectors,
    inputs_of_messages,
    page_scores,
    page_vectors,
    vector_usage,
)

if TYPE_CHECKING:  # it imports torch, which a recorded start needs not
    from torchax_serve.entrypoints.encoder_model import EncoderModel

Body = TypeVar("Body", bound=PoolingRequest)
_Inputs = TypeVar("_Inputs", EmbeddingRequest, TokenPoolingRequest)

_FIELDS: Mapping[str, str] = {
    "truncate_dim": "dimensions",
    "pooling": "pooling",
    "embed": "pooling",  # of a model without a rule of its own
    "normalize": "normalize",
    "truncate": "truncate_prompt_tokens",
}
"""Names at the beginning of errors that are not about texts, and their fields."""


async def _read(request: Request, kind: type[Body], task: str | Sequence[str] | None) -> tuple[ModelService, Body]:
    service, body = await read_for_model(request, kind, task)
    service.settle_name(body, request.state.key)
    most, limit = body.truncate_prompt_tokens, service.max_model_len
    if most is not None and (most < -1 or most == 0 or (limit is not None and most > limit)):
        expected = "-1 or more" if limit is None else f"-1, or 1 to {limit}"
        message = f"truncate_prompt_tokens: expected {expected}, got {most}"
        raise bad_request(message, "truncate_prompt_tokens", "invalid_value")
    return service, body


async def text_results(
    request: Request,
    call: Callable[..., Coroutine[Any, Any, Any]],
    items: Sequence[Any],
    field: str,
    names: Mapping[str, str] = _FIELDS,
) -> list[Any]:
    """Returns the results of `call` for `items`, in a batch with those of other requests.

    Args:
        request: Of the client.
        call: Method of the model.
        items: Texts or pairs.
        field: That they are in.
        names: Fields by the names of the method's arguments, for errors.

    Raises:
        ApiError: 400 for what the method refuses, or too many texts.
    """
    options = context_of(request).options
    most = options.request.max_texts
    if not 1 <= len(items) <= most:
        raise bad_request(f"{field}: expected 1 to {most} texts, got {len(items)}", field, "invalid_value")
    for item in items:
        for text in item if isinstance(item, tuple) else (item,):
            if isinstance(text, str):
                check_text_size(text, options.request, field)
    work = call(items, timeout_s=options.request_timeout_s, queue_timeout_s=options.queue_timeout_s)
    try:
        return list(await until_disconnect(request.receive, work))
    except (ValueError, UnsupportedModelError) as error:
        raise _renamed(error, field, names) from error


def _encoder(service: ModelService) -> EncoderModel:
    """Returns the model, for tasks that only encoders have."""
    assert not service.model.writes_text
    return cast("EncoderModel", service.model)


def _renamed(error: Exception, field: str, names: Mapping[str, str]) -> Exception:
    """Returns an error about the texts of a batch as one about the field of the request."""
    message = in_words_of_requests(str(error))
    name, colon, rest = message.partition(":")
    if (own := names.get(name)) is not None:
        return bad_request(f"{own}:{rest}", own, "invalid_value")
    # The number of the text, which is a part of the name, is one within the batch.
    return bad_request(f"{field}:{rest if colon else ' ' + message}", field, "invalid_value")


async def _usage(request: Request, service: ModelService, body: PoolingRequest, texts: Sequence[Any]) -> dict[str, int]:
    return await charge_tokens(request, service, texts, body.truncate_prompt_tokens)


async def charge_tokens(
    request: Request, service: ModelService, texts: Sequence[Any], most: int | None
) -> dict[str, int]:
    """Returns the usage of a request with texts of `most` tokens, which is charged to its key."""
    num_tokens = await service.run(_num_tokens, service, texts, most)
    if request.state.usage is not None:
        request.state.usage.charge(num_tokens)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def embeddings(request: Request) -> Response:
    """Returns embeddings of texts or images; of a multi-vector model one for each token."""
    service, body = await _read(request, EmbeddingRequest, TASKS)
    body = _with_input(service, body)
    if finds_pages(service) or (body.pooling is None and await has_token_vectors(service)):
        found, usage = await _vectors(request, service, body)
    elif body.input_type is not None:
        message = "input_type: expected null for a model with one embedding for each text, got a value; ask /v2/embed"
        raise bad_request(message, "input_type", "unsupported_parameter")
    else:
        found, usage = await embedded(request, service, body)
    data = (
        {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
        for index, row in enumerate(found)
    )
    return await list_response(service, "data", data, {"object": "list", "model": body.model, "usage": usage})


def _with_input(service: ModelService, body: _Inputs) -> _Inputs:
    """Returns a request whose field `input` has what its messages say.

    Raises:
        ApiError: 400 for none or both of them, and for messages to a model that reads no images.
    """
    if (body.input is None) == (body.messages is None):
        got = "none" if body.input is None else "both"
        message = f"input: expected one of input and messages, got {got}"
        raise bad_request(message, "input", "missing_required_parameter")
    if body.messages is None:
        return body
    if not (finds_pages(service) or hasattr(type(service.model), "aembed_images")):
        message = f"messages: expected none for {service.name}, which reads no images, got some; give input"
        raise bad_request(message, "messages", "unsupported_parameter")
    return body.model_copy(update={"input": inputs_of_messages(body.messages)})


async def _vectors(
    request: Request, service: ModelService, body: EmbeddingRequest
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Returns embeddings of tokens, float32[num_tokens, size] of each input, and the usage."""
    if body.dimensions is not None:
        message = "dimensions: expected null for embeddings of tokens, got a number"
        raise bad_request(message, "dimensions", "unsupported_parameter")
    normalize = body.use_activation if body.normalize is None else body.normalize
    if finds_pages(service):
        return await _page_vectors(request, service, body, normalize)
    refuse_objects(body.input, "input", service.name)
    texts = texts_of(body.input)
    options: dict[str, Any] = {"truncate": body.cut, "normalize": normalize, "task": body.input_type or "document"}
    found = await text_results(request, functools.partial(service.model.aembed_tokens, **options), texts, "input")
    return found, await _usage(request, service, body, texts)


async def _page_vectors(
    request: Request, service: ModelService, body: EmbeddingRequest | TokenPoolingRequest, normalize: bool | None
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Returns the embeddings of the tokens of queries and pages, and the usage."""
    scaling = "normalize" if body.use_activation is None else "use_activation"
    for name, value in ((scaling, normalize is False), ("truncate_prompt_tokens", body.cut is not None)):
        if value:
            message = f"{name}: expected none for {service.name}, whose processor and forward decide it, got a value"
            raise bad_request(message, name, "unsupported_parameter")
    found = await page_vectors(request, service, body.input, body.input_type)
    return found, vector_usage(request, found)


async def embedded(
    request: Request, service: ModelService, body: EmbeddingRequest
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Returns the embeddings that a request asks for, float32[size] each, and its usage."""
    if hasattr(type(service.model), "aembed_images"):
        return await _embedded_images(request, service, body)
    refuse_objects(body.input, "input", service.name)
    texts = texts_of(body.input)
    options: dict[str, Any] = {
        "truncate": body.cut,
        "truncate_dim": body.dimensions,
        "normalize": body.use_activation if body.normalize is None else body.normalize,
        "pooling": body.pooling,
    }
    found = await text_results(request, functools.partial(service.model.aembed, **options), texts, "input")
    return found, await _usage(request, service, body, texts)


async def _embedded_images(
    request: Request, service: ModelService, body: EmbeddingRequest
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Returns the embeddings of images, and a usage without tokens."""
    for name in ("dimensions", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: expected none for images, got one", name, "unsupported_parameter")
    normalize = bool(body.use_activation if body.normalize is None else body.normalize)
    images = await files_of(request, service, body.input, "image")
    model: Any = service.model
    found = await results(request, model.aembed_images, images, pooling=body.pooling, normalize=normalize)
    return list(found), {"prompt_tokens": 0, "total_tokens": 0}


def _encoded(row: np.ndarray, form: str | None) -> Any:
    if form == "base64" and row.ndim > 1:
        return [_encoded(each, form) for each in row]
    if form == "base64":
        return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()
    return np.asarray(row, np.float32).tolist()


async def classify(request: Request) -> Response:
    """Returns the labels of texts."""
    service, body = await _read(request, ClassifyRequest, "classify")
    if hasattr(service.model, "methods"):
        return await _classify_files(request, service, body)
    if body.labels is not None:
        raise bad_request("labels: expected none for a model of texts, got some", "labels", "unsupported_parameter")
    refuse_objects(body.input, "input", service.name)
    texts = texts_of(body.input)
    truncate = body.cut or False
    call = functools.partial(_encoder(service).aclassify, truncate=truncate)
    found = await text_results(request, call, texts, "input")
    data = (
        {
            "index": index,
            "label": each.label,
            "probs": list(each.scores.values()),
            "num_classes": len(each.scores),
        }
        for index, each in enumerate(found)
    )
    usage = await _usage(request, service, body, texts)
    return await list_response(service, "data", data, _list("classify", body.model) | {"usage": usage})


async def _classify_files(request: Request, service: ModelService, body: ClassifyRequest) -> Response:
    """Returns the labels of images or sound: probabilities in the labels' order, and by label."""
    if body.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise bad_request(f"{name}: expected none for files, got one", name, "unsupported_parameter")
    found = await labels_of(request, service, body.input, body.labels)
    order = body.labels or list((service.model.config.id2label or {}).values())

    def entry(index: int, row: Any) -> dict[str, Any]:
        scores: dict[str, list[float]] = {}
        for each in row:
            scores.setdefault(each.label, []).append(each.score)
        probs = [scores[label].pop(0) for label in order]
        return {"index": index, "label": row[0].label, "probs": probs, "num_classes": len(probs), "labels": order}

    data = (entry(index, row) for index, row in enumerate(found))
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return await list_response(service, "data", data, _list("classify", body.model) | {"usage": usage})


async def pooling(request: Request) -> Response:
    """Returns the label or embedding of each token, or the embedding of each text."""
    service, body = await _read(request, TokenPoolingRequest, None)
    body = _with_input(service, body)
    if finds_pages(service):
        data, usage = await _pooled_pages(request, service, body)
        items = ({"index": index, "object": "pooling", "data": each} for index, each in enumerate(data))
        return await list_response(service, "data", items, _list("pool", body.model) | {"usage": usage})
    refuse_objects(body.input, "input", service.name)
    texts = texts_of(body.input)
    task = body.task or ("token_embed" if "embed" in service.tasks else "token_classify")
    if task == "token_classify":
        data = await _token_labels(request, service, body, texts)
    else:
        data = await _token_embeddings(request, service, body, texts, task)
    usage = await _usage(request, service, body, texts)
    items = ({"index": index, "object": "pooling", "data": each} for index, each in enumerate(data))
    return await list_response(service, "data", items, _list("pool", body.model) | {"usage": usage})


async def _pooled_pages(
    request: Request, service: ModelService, body: TokenPoolingRequest
) -> tuple[Iterator[Any], dict[str, int]]:
    """Returns the embeddings of the tokens of queries and pages as lists, and the usage."""
    if body.task not in (None, "token_embed"):
        raise bad_request(f"task: expected token_embed for {service.name}, got {body.task}", "task", "invalid_value")
    if body.dimensions is not None:
        message = "dimensions: expected null for embeddings of tokens, got a number"
        raise bad_request(message, "dimensions", "unsupported_parameter")
    found, usage = await _page_vectors(request, service, body, body.use_activation)
    return (np.asarray(row, np.float32).tolist() for row in found), usage


async def _token_labels(
    request: Request, service: ModelService, body: TokenPoolingRequest, texts: Sequence[Any]
) -> Iterator[Any]:
    """Returns the labels of each token, by text."""
    service.require("label tokens", request.scope["path"])
    for name in ("dimensions", "input_type"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: expected null for labels, got a value", name, "unsupported_parameter")
    if body.use_activation is False:
        raise bad_request("use_activation: expected true for labels, got false", "use_activation", "invalid_value")
    call = functools.partial(_encoder(service).aclassify_tokens, truncate=body.cut or False)
    found = await text_results(request, call, texts, "input")
    return (
        [{"token_id": each.token_id, "token": each.text, "label": each.label, "score": each.score} for each in labels]
        for labels in found
    )


_TASK_FIELDS: Mapping[str, str] = {
    "truncate_dim": "dimensions",
    "truncate": "truncate_prompt_tokens",
    "embed": "task",
    "embed_tokens": "task",
}
"""As `_FIELDS`, of ``/pooling``."""


async def _token_embeddings(
    request: Request, service: ModelService, body: TokenPoolingRequest, texts: Sequence[Any], task: str
) -> Iterator[Any]:
    """Returns the embeddings of each token or, for the task ``embed``, of each text."""
    service.require("embed", request.scope["path"])
    options: dict[str, Any] = {"truncate": body.cut, "normalize": body.use_activation}
    if task == "embed":
        if body.input_type is not None:
            message = "input_type: expected null for the task embed, got a value"
            raise bad_request(message, "input_type", "unsupported_parameter")
        options["truncate_dim"] = body.dimensions
        call: Any = functools.partial(service.model.aembed, **options)
    else:
        if body.dimensions is not None:
            message = "dimensions: expected null for embeddings of tokens, got a number"
            raise bad_request(message, "dimensions", "unsupported_parameter")
        call = functools.partial(service.model.aembed_tokens, task=body.input_type or "document", **options)
    found = await text_results(request, call, texts, "input", _TASK_FIELDS)
    return (np.asarray(row, np.float32).tolist() for row in found)


async def rerank(request: Request) -> Response:
    """Ranks documents for a query."""
    service, body = await _read(request, RerankRequest, "rank")
    if (body.documents is None) == (body.texts is None):
        message = "documents: expected one of documents and texts, got none or both"
        raise bad_request(message, "documents", "missing_required_parameter")
    if body.texts is not None:
        return await _rerank_texts(request, service, body, body.texts)
    if body.truncate is not None or body.return_text is not None:
        name = "return_text" if body.truncate is None else "truncate"
        raise bad_request(f"{name}: expected none next to documents, got one", name, "unsupported_parameter")
    if not body.query:
        raise bad_request("query: expected some text, got an empty string", "query", "invalid_value")
    if body.top_n is not None and body.top_n < 0:
        raise bad_request(f"top_n: expected a whole number >= 0, got {body.top_n}", "top_n", "invalid_value")
    if finds_pages(service):
        return await _rerank_pages(request, service, body)
    documents = [_document(index, each) for index, each in enumerate(body.documents or ())]
    pairs = [(body.query, document) for document in documents]
    scores = await _scores(request, service, pairs, body.cut, "documents")
    order = sorted(range(len(pairs)), key=lambda index: -scores[index])[: body.top_n or None]
    shown = body.return_documents is not False
    results = (
        {"index": index, "relevance_score": scores[index]} | ({"document": {"text": documents[index]}} if shown else {})
        for index in order
    )
    usage = await _usage(request, service, body, [*documents, *[body.query] * len(documents)])
    others = {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage}
    return await list_response(service, "results", results, others)


async def _rerank_pages(request: Request, service: ModelService, body: RerankRequest) -> Response:
    """Ranks images of pages for a query; the answer does not repeat them."""
    for name, value in (("return_documents", body.return_documents), ("truncate_prompt_tokens", body.cut)):
        if value not in (None, False):
            raise bad_request(f"{name}: expected none for images, got a value", name, "unsupported_parameter")
    pages = body.documents or []
    scores, usage = await page_scores(request, service, [body.query] * len(pages), pages, "documents")
    order = sorted(range(len(pages)), key=lambda index: -scores[index])[: body.top_n or None]
    ranked = ({"index": index, "relevance_score": scores[index]} for index in order)
    others = {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage}
    return await list_response(service, "results", ranked, others)


async def _rerank_texts(request: Request, service: ModelService, body: RerankRequest, texts: Sequence[str]) -> Response:
    """Returns the ranks of texts in the form of text-embeddings-inference."""
    for name in ("top_n", "return_documents", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: expected none next to texts, got one", name, "unsupported_parameter")
    if finds_pages(service):
        message = f"texts: expected documents with images for {service.name}, got texts"
        raise bad_request(message, "texts", "invalid_value")
    if not body.query:
        raise bad_request("query: expected some text, got an empty string", "query", "invalid_value")
    scores = await _scores(request, service, [(body.query, text) for text in texts], body.truncate, "texts")
    await charge_tokens(request, service, [*texts, *[body.query] * len(texts)], None)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    shown = [{"index": i, "score": scores[i]} | ({"text": texts[i]} if body.return_text else {}) for i in order]
    return JSONResponse(shown)


def _document(index: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    if set(document) != {"text"} or not isinstance(document["text"], str):
        raise bad_request(
            f'documents[{index}]: expected a text or an object {{"text": ...}}, got {", ".join(document)[:100]}',
            f"documents[{index}]",
            "invalid_value",
        )
    return str(document["text"])


async def score(request: Request) -> Response:
    """Returns the scores of pairs of texts."""
    service, body = await _read(request, ScoreRequest, "rank")
    firsts = _texts("text_1", body.text_1, body.queries, body.data_1)
    seconds = _texts("text_2", body.text_2, body.documents, body.items, body.data_2)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise bad_request(
            f"text_1: expected one text or as many as text_2 has ({len(seconds)}), got {len(firsts)}",
            "text_1",
            "invalid_value",
        )
    if finds_pages(service):
        if body.cut is not None:
            name = "truncate_prompt_tokens"
            raise bad_request(f"{name}: expected none for images, got one", name, "unsupported_parameter")
        scores, usage = await page_scores(request, service, firsts, seconds, "text_2")
    else:
        if are_objects(firsts) or are_objects(seconds):
            refuse_objects(seconds if are_objects(seconds) else firsts, "text_2", service.name)
        scores = await _scores(request, service, list(zip(firsts, seconds, strict=True)), body.cut, "text_2")
        usage = await _usage(request, service, body, [*firsts, *seconds])
    data = ({"index": index, "object": "score", "score": each} for index, each in enumerate(scores))
    return await list_response(service, "data", data, _list("score", body.model) | {"usage": usage})


def _texts(name: str, *spellings: Any) -> list[Any]:
    """Returns the texts or objects that one of the spellings of a field has."""
    given = [each for each in spellings if each is not None]
    if len(given) != 1:
        raise bad_request(f"{name}: expected a text or several, got none or two fields", name, "invalid_value")
    return [given[0]] if isinstance(given[0], str | dict) else list(given[0])


async def _scores(
    request: Request, service: ModelService, pairs: list[tuple[str, str]], truncate: bool | int | None, field: str
) -> list[float]:
    call = functools.partial(service.model.ascore_pairs, truncate=truncate)
    found = await text_results(request, call, pairs, field)
    return [float(each) for each in found]


def _list(kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def _num_tokens(service: ModelService, texts: Sequence[Any], most: int | None) -> int:
    """Returns the number of tokens of texts and of token ids together, special tokens included."""
    tokenizer: Any = service.model.text_tokenizer
    given = [text for text in texts if not isinstance(text, str)]
    written = [text for text in texts if isinstance(text, str)]
    ids = tokenizer(written)["input_ids"] if written else []
    limits = [each for each in (service.max_model_len, most) if each is not None and each > 0]
    limit = min(limits, default=None)
    lens = [len(each) for each in (*given, *ids)]
    return sum(lens if limit is None else [min(length, limit) for length in lens])
