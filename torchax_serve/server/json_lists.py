"""Answers that are long lists, encoded a piece at a time off the event loop.

One call of an encoder holds Python's lock, and with it the event loop, until it has all of its value.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from torchax_serve.server.model_service import ModelService

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_NUM_AT_ONCE = 16384  # short values in one call: some milliseconds


async def list_response(
    service: ModelService, name: str, items: Iterable[Any], others: Mapping[str, Any], *, are_short: bool = False
) -> Response:
    """Returns an answer with the field `name`, a list, and others.

    Args:
        service: Its threads encode.
        name: Name of the list.
        items: Items of the list, which are made while it is encoded.
        others: Other fields.
        are_short: Whether the items are numbers or short texts.
    """
    content = await service.run(_encoded, name, items, others, _NUM_AT_ONCE if are_short else 1)
    return Response(content, media_type="application/json")


def _encoded(name: str, items: Iterable[Any], others: Mapping[str, Any], num_at_once: int) -> bytes:
    rest = iter(items)
    batches: Iterable[Sequence[Any]] = iter(lambda: list(itertools.islice(rest, num_at_once)), [])
    pieces = [_ENCODER.encode(batch)[1:-1].encode() for batch in batches]
    head, tail = _ENCODER.encode(name).encode(), _ENCODER.encode(others).encode()
    return b"{" + head + b":[" + b",".join(pieces) + b"]" + (b"," + tail[1:] if others else b"}")
