"""Pages of lists, by ``limit``, ``order`` and ``after``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from torchax_serve.server.errors import bad_request


def page_of(
    request: Request, newest_first: Sequence[Mapping[str, Any]], *, default: int = 20, most: int = 100
) -> dict[str, Any]:
    """Returns the page of a list that a request asks for, as OpenAI's interface has it.

    Args:
        request: The request, whose parameters say which page.
        newest_first: The list, the newest objects first.
        default: Number of objects where the request says none.
        most: Largest number of objects.

    Raises:
        ApiError: 400 for a parameter that says nothing.
    """
    limit, order, after = (request.query_params.get(name) for name in ("limit", "order", "after"))
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise bad_request(f"limit: expected a whole number from 1 to {most}, got another", "limit")
    if order not in (None, "asc", "desc"):
        raise bad_request("order: expected asc or desc, got another", "order")
    shown = newest_first[::-1] if order == "asc" else newest_first
    if after is not None:
        ids = [item["id"] for item in shown]
        if after not in ids:
            raise bad_request("after: expected the id of an item of this list, got another", "after")
        shown = shown[ids.index(after) + 1 :]
    page = shown[: int(limit or default)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(shown),
    }
