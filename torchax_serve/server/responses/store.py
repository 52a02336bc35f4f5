"""Responses that later requests may name.

They are in memory, for each key apart, and bounded in number, bytes and age.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchax_serve.server.errors import ApiError

MAX_BYTES = 64 << 20
"""Most bytes of the responses of one key, as JSON; the oldest are dropped."""


class StoredResponse(NamedTuple):
    """A response and what it answers.

    Attributes:
        response: Its object.
        input_items: Items of its request, with ids.
        conversation: Items of the conversation with its output, as a request has them.
        num_bytes: Bytes of all of that as JSON.
        stored_s: When it was stored, on the store's clock.
    """

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    conversation: list[dict[str, Any]]
    num_bytes: int
    stored_s: float


class ResponseStore:
    """Responses by key and id. All calls come from the event loop's thread.

    Args:
        max_responses: Most responses of one key; 0 stores none.
        max_age_s: Seconds after which a response is dropped.
        clock: Seconds, monotonic.
    """

    def __init__(self, max_responses: int, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_responses, self._max_age_s, self._clock = max_responses, max_age_s, clock
        self._by_key: dict[str | None, collections.OrderedDict[str, StoredResponse]] = {}
        self._running: dict[tuple[str | None, str], Callable[[], None]] = {}

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self._max_responses > 0

    def put(
        self,
        key: str | None,
        response: dict[str, Any],
        input_items: list[dict[str, Any]],
        conversation: Sequence[dict[str, Any]],
    ) -> bool:
        """Stores a response, for which the oldest of the key make room, unless it is too large.

        Returns:
            Whether it is stored.
        """
        found = self._fresh(key)
        parts = (response, input_items, conversation)
        num_bytes = sum(len(json.dumps(part)) for part in parts)
        found.pop(response["id"], None)
        if num_bytes > MAX_BYTES:
            return False
        while found and (
            len(found) >= self._max_responses or num_bytes + sum(each.num_bytes for each in found.values()) > MAX_BYTES
        ):
            found.popitem(last=False)
        found[response["id"]] = StoredResponse(response, input_items, [*conversation], num_bytes, self._clock())
        return True

    def get(self, key: str | None, response_id: str) -> StoredResponse:
        """Returns a response of a key.

        Raises:
            ApiError: 404 for one that is unknown, too old, dropped, or another key's.
        """
        found = self._fresh(key).get(response_id)
        if found is None:
            message = "expected the id of a stored response, got one that is unknown or was dropped"
            raise ApiError(404, f"response_id: {message}; send all of the input again", param="response_id")
        return found

    def item(self, key: str | None, item_id: str) -> dict[str, Any] | None:
        """Returns an item of a key's responses, of input or output; None if there is none."""
        for stored in reversed(self._fresh(key).values()):
            for item in (*stored.response.get("output", ()), *stored.input_items):
                if item.get("id") == item_id and item["type"] != "item_reference":
                    return item
        return None

    def delete(self, key: str | None, response_id: str) -> None:
        """Drops a response. Raises as `get`."""
        self.get(key, response_id)
        del self._by_key[key][response_id]

    def begin(self, key: str | None, response_id: str, cancel: Callable[[], None]) -> None:
        """Records that a response runs, and what cancels it."""
        self._running[key, response_id] = cancel

    def end(self, key: str | None, response_id: str) -> None:
        """Records that a response does not run any more."""
        self._running.pop((key, response_id), None)

    def cancel(self, key: str | None, response_id: str) -> bool:
        """Cancels a response; returns whether it ran."""
        cancel = self._running.get((key, response_id))
        if cancel is not None:
            cancel()
        return cancel is not None

    def _fresh(self, key: str | None) -> collections.OrderedDict[str, StoredResponse]:
        """Returns the responses of a key, without those that are too old."""
        found = self._by_key.setdefault(key, collections.OrderedDict())
        while found and next(iter(found.values())).stored_s + self._max_age_s <= self._clock():
            found.popitem(last=False)
        return found
