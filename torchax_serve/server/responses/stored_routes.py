"""Routes of stored responses: ``/v1/responses/{response_id}``, its input, and its end."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.responses.store import ResponseStore

MAX_ITEMS = 100
"""Most items of one list."""


async def get_response(request: Request) -> Response:
    """Returns a stored response."""
    if request.query_params.get("stream") == "true":
        raise bad_request("stream: expected false; a stream is sent once, to the request that asks for it", "stream")
    return JSONResponse(_store(request).get(request.state.key_name, request.path_params["response_id"]).response)


async def delete_response(request: Request) -> Response:
    """Drops a stored response."""
    response_id = request.path_params["response_id"]
    _store(request).delete(request.state.key_name, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Cancels a response that runs."""
    store, key, response_id = _store(request), request.state.key_name, request.path_params["response_id"]
    if store.cancel(key, response_id):
        return JSONResponse({"id": response_id, "object": "response", "status": "cancelled"})
    store.get(key, response_id)
    raise bad_request("response_id: expected a response that runs, got one that has ended", "response_id")


async def list_input_items(request: Request) -> Response:
    """Returns the items that a stored response answers, the last ones first."""
    items = _store(request).get(request.state.key_name, request.path_params["response_id"]).input_items
    limit, order, after = (request.query_params.get(name) for name in ("limit", "order", "after"))
    if limit is not None and not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_ITEMS):
        raise bad_request(f"limit: expected a whole number from 1 to {MAX_ITEMS}, got another", "limit")
    if order not in (None, "asc", "desc"):
        raise bad_request("order: expected asc or desc, got another", "order")
    shown = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in shown]
        if after not in ids:
            raise bad_request("after: expected the id of an item of this list, got another", "after")
        shown = shown[ids.index(after) + 1 :]
    page = shown[: int(limit or 20)]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(shown),
        }
    )


def _store(request: Request) -> ResponseStore:
    """Returns the store. Raises ApiError, 404, if there is none."""
    store = context_of(request).responses
    if not store.is_on:
        raise ApiError(404, "expected a server that stores responses; start it with --max-stored-responses")
    return store
