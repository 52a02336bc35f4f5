"""Routes of stored responses: ``/v1/responses/{response_id}``, its input, and its end."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.paging import page_of
from torchax_serve.server.responses.store import ResponseStore


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
    return JSONResponse(page_of(request, items[::-1]))


def _store(request: Request) -> ResponseStore:
    """Returns the store. Raises ApiError, 404, if there is none."""
    store = context_of(request).responses
    if not store.is_on:
        raise ApiError(404, "expected a server that stores responses; start it with --max-stored-responses")
    return store
