"""Embeddings of tokens of texts (ColBERT), pages and queries (ColPali), and scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from torchax_serve.server.context import context_of
from torchax_serve.server.errors import bad_request
from torchax_serve.server.media_inputs import files_of, results
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.pooling_schemas import texts_of
from torchax_serve.server.request_checks import check_text_size

TASKS = ("embed", "token_embed")
"""Tasks of models with embeddings, of texts or of tokens."""
_KINDS = {"query": "texts", "document": "images"}


def finds_pages(service: ModelService) -> bool:
    """Returns whether a model reads queries as texts and documents as images."""
    return hasattr(type(service.model), "aembed_pages")


async def has_token_vectors(service: ModelService) -> bool:
    """Returns whether the files of a model say that each token has an embedding."""
    if "embeds_tokens" not in vars(service):  # it reads the files at first
        await service.run(getattr, service, "embeds_tokens")
    return service.embeds_tokens


def inputs_of_messages(messages: Sequence[Any], field: str = "messages") -> list[Any]:
    """Returns the text, or the object with a file, of each conversation.

    A list of messages is the only conversation.

    Raises:
        ApiError: 400 for one that is not a single message with a text or a file.
    """
    batch = messages if messages and isinstance(messages[0], list) else [messages]
    found: list[Any] = []
    for index, conversation in enumerate(batch):
        where = field if batch[0] is messages else f"{field}[{index}]"
        message = conversation[0] if isinstance(conversation, list) and len(conversation) == 1 else None
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], dict):
            raise bad_request(
                f"{where}: expected one message with one part, a text or an image, got others", field, "invalid_value"
            )
        part = parts[0]
        found.append(part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str) else part)
    return found


async def page_vectors(
    request: Request, service: ModelService, given: Any, input_type: str | None = None, field: str = "input"
) -> list[np.ndarray]:
    """Returns embeddings of queries (texts) and pages (objects), float32[num_tokens, dim].

    Args:
        request: Of the client, whose key is charged for the tokens.
        service: A model that finds pages.
        given: A text or an object, or a list of both.
        input_type: ``query`` or ``document``, which must be what the inputs are; None: they say it.
        field: Of the request, for errors.

    Raises:
        ApiError: 400 for what the model does not read.
    """
    items = [given] if isinstance(given, dict) else texts_of(given)
    limits, model = context_of(request).options.request, service.model
    if not 1 <= len(items) <= limits.max_texts:
        message = f"{field}: expected 1 to {limits.max_texts} texts or images, got {len(items)}"
        raise bad_request(message, field, "invalid_value")
    if any(not isinstance(each, str | dict) for each in items):
        message = f"{field}: expected texts or images for {service.name}, got token ids"
        raise bad_request(message, field, "invalid_value")
    are_texts = [isinstance(each, str) for each in items]
    if input_type is not None and any(each != (input_type == "query") for each in are_texts):
        message = f"input_type: expected {_KINDS[input_type]} for {input_type}, which {service.name} reads, got others"
        raise bad_request(message, "input_type", "invalid_value")
    texts = [each for each in items if isinstance(each, str)]
    for text in texts:
        check_text_size(text, limits, field)
    pages = [_file(each) for each in items if isinstance(each, dict)]
    images = await files_of(request, service, pages, "image", field) if pages else []
    named: Any = model
    queries = iter(await results(request, named.aembed_queries, texts, field=field) if texts else ())
    found = iter(await results(request, named.aembed_pages, images, field=field) if images else ())
    return [next(queries if is_text else found) for is_text in are_texts]


async def page_scores(
    request: Request, service: ModelService, queries: Sequence[Any], pages: Sequence[Any], field: str
) -> tuple[list[float], dict[str, int]]:
    """Returns the scores of pairs of a query and a page, and the usage."""
    from torchax_serve.pooling.multi_vector import maxsim  # it imports jax

    if any(not isinstance(each, dict) for each in pages):
        raise bad_request(f"{field}: expected images for {service.name}, got texts", field, "invalid_value")
    if any(not isinstance(each, str) for each in queries):
        raise bad_request(f"text_1: expected texts for {service.name}, got others", "text_1", "invalid_value")
    texts = list(dict.fromkeys(queries))
    vectors = dict(zip(texts, await page_vectors(request, service, texts, "query", "text_1"), strict=True))
    rows = await page_vectors(request, service, list(pages), "document", field)
    score = functools.partial(_scores, maxsim, [vectors[each] for each in queries], rows)
    return await service.run(score), vector_usage(request, [*vectors.values(), *rows])


def vector_usage(request: Request, rows: Sequence[np.ndarray]) -> dict[str, int]:
    """Returns the usage of a request, whose key is charged: a token for each embedding."""
    num_tokens = sum(map(len, rows))
    if request.state.usage is not None:
        request.state.usage.charge(num_tokens)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _scores(score: Any, queries: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> list[float]:
    return [float(score(query, row)) for query, row in zip(queries, rows, strict=True)]


def _file(given: dict[str, Any]) -> dict[str, Any]:
    """Returns an object with an image in the form of chats; Jina's is ``{"image": URL}``."""
    if set(given) == {"image"}:
        return {"type": "image_url", "image_url": {"url": given["image"]}}
    return given
