"""Requests of interfaces whose clients send new fields each month.

What is unknown is noted once, and has no effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import pydantic

from model_adapters.errors import ChatTemplateError
from torchax_serve.server.errors import ApiError, api_error_of, bad_request
from torchax_serve.server.notes import note_once
from torchax_serve.server.request_fields import FAIL_FAST, ApiRequest, notes_of, with_integers
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.validation.argument_checks import short_repr

Part = TypeVar("Part")
FastList = Annotated[list[Part], FAIL_FAST]
"""A list whose check ends at the first wrong item."""
_OPEN = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())


class OpenRequest(ApiRequest):
    """Base of bodies that take unknown fields."""

    model_config = _OPEN


class OpenPart(pydantic.BaseModel):
    """Base of objects in such bodies."""

    model_config = _OPEN

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_integers(cls, given: Any) -> Any:
        return with_integers(cls, given) if isinstance(given, dict) else given


_OF_CHATS = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "n", "best_of", "tools", "tool_choice", "include_reasoning"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    }
)
"""Fields of chats that the other answers have no place for, or that have other names there."""
PASSED_ON = frozenset(
    name for name, note in notes_of(ChatRequest).items() if note.effect == "honoured" and name not in _OF_CHATS
)
"""Fields of chats that change answers, and that bodies of other interfaces may have."""
_DERIVED = frozenset({"continue_final_message", "parallel_tool_calls"})
"""Fields of chats that a translation sets, and that a request may set otherwise."""


def with_passed_on(fields: Mapping[str, Any], body: OpenRequest) -> dict[str, Any]:
    """Returns the fields of a chat, with those that a body has under the names of chats.

    Raises:
        ApiError: 400 for a field that the body has under the name of its own interface as well.
    """
    found = without_none(fields)
    for name, given in (body.model_extra or {}).items():
        if name not in PASSED_ON or given is None:
            continue
        own = found.get(name)
        if isinstance(own, dict) and isinstance(given, dict) and name == "chat_template_kwargs":
            given = own | given
        elif own is not None and own != given and name not in _DERIVED:
            message = f"{name}: expected none with the field of this interface for it, got both; leave one of them out"
            raise bad_request(message, name, "invalid_value")
        found[name] = given
    return found


def note_unknown(body: OpenRequest, route: str) -> None:
    """Notes the fields of a body that are unknown, each once."""
    for path in _unknown(body, ""):
        note_once(f"{route}: the field {short_repr(path[:100])} is unknown and has no effect")


def _unknown(value: Any, path: str) -> Iterator[str]:
    """Yields the paths of unknown fields, without the numbers of items."""
    if isinstance(value, list):
        for each in value:
            yield from _unknown(each, path)
    elif isinstance(value, pydantic.BaseModel):
        for name in value.model_extra or ():
            if not path and name in PASSED_ON:
                continue
            yield f"{path}{name}"
        for name in value.model_fields_set:
            yield from _unknown(getattr(value, name), f"{path}{name}.")


@contextlib.contextmanager
def names_of_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field that an error of a chat is about, as the request has it.

    Args:
        names: Fields of the request by the chat's, where they differ, and those whose items are counted otherwise.
    """
    try:
        yield
    except (ApiError, ChatTemplateError) as given:
        error = api_error_of(given)
        field = re.split(r"[.\[]", error.param or "")[0]
        if (name := names.get(field)) is not None:
            error.message = re.sub(rf"\b{field}\b(\[\d+\](\.\w+)*)*", name, error.message)
            error.param = name
        raise error from (given if error is not given else given.__cause__)


def as_parts_of(kind: str) -> pydantic.BeforeValidator:
    """Returns a validator that takes a text in place of a list with one part of a kind."""
    return pydantic.BeforeValidator(lambda given: [{"type": kind, "text": given}] if isinstance(given, str) else given)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
