"""``truncation: auto`` of the Responses interface: the last items that there is room for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torchax_serve.server.chat import read_prompt
from torchax_serve.server.errors import ApiError
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.responses.schemas import CallOutputItem, MessageItem, ResponsesRequest
from torchax_serve.server.responses.translation import chat_of
from torchax_serve.server.template_roles import SYSTEM
from torchax_serve.server.tools import plan_tools

TOO_LONG = "context_length_exceeded"
"""Code of the error for a prompt that the model has no room for."""


def last_items(body: ResponsesRequest, items: Sequence[Any], service: ModelService) -> list[Any]:
    """Returns the most of the last items whose prompt leaves room for an answer.

    It is called in a thread. System messages stay, and so does the user's last message. If nothing can be dropped that
    makes it fit, the prompt is too long still, which its submission tells.

    Args:
        body: The request, whose other fields are part of the prompt.
        items: All items of the conversation, oldest first.
        service: The model.
    """
    begins = _begins(items)
    if not begins:
        return list(items)
    # The more items are dropped the shorter is the prompt, so that few of the places have to be tried.
    index = bisect.bisect_left(begins, True, key=lambda begin: _fits(body, _kept(items, begin), service))
    return _kept(items, begins[min(index, len(begins) - 1)])


def _begins(items: Sequence[Any]) -> list[int]:
    """Returns the places from which on items can stand alone, no result without its call."""
    found, open_calls = [], set[str]()
    for index, item in enumerate(items):
        if index and not open_calls:
            found.append(index)
        if isinstance(item, CallOutputItem):
            open_calls.discard(item.call_id)
        elif (call_id := getattr(item, "call_id", None)) is not None:
            open_calls.add(call_id)
    return found


def _kept(items: Sequence[Any], begin: int) -> list[Any]:
    """Returns the items from a place on, with the system messages and one of the user."""
    before, behind = items[:begin], items[begin:]
    kept = [each for each in before if _role(each) in SYSTEM]
    if not any(_role(each) == "user" for each in behind):
        kept += [each for each in before if _role(each) == "user"][-1:]
    return [*kept, *behind]


def _role(item: Any) -> str | None:
    return item.role if isinstance(item, MessageItem) else None


def _fits(body: ResponsesRequest, items: Sequence[Any], service: ModelService) -> bool:
    chat = chat_of(body.model_copy(update={"input": list(items)}), service)
    plan = plan_tools(chat, service.family, service.special_ids, template=service.template)
    try:
        num_tokens = len(read_prompt(service, chat, plan).token_ids)
    except ApiError as error:
        if error.code != TOO_LONG:
            raise
        return False
    return service.max_model_len is None or num_tokens < service.max_model_len
