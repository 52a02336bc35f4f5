"""Requests of interfaces whose clients send new fields each month.

What is unknown is noted once, and has no effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import pydantic

from torchax_serve.server.errors import ApiError
from torchax_serve.server.notes import note_once
from torchax_serve.server.request_fields import FAIL_FAST, ApiRequest
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
    except ApiError as error:
        field = re.split(r"[.\[]", error.param or "")[0]
        if (name := names.get(field)) is not None:
            error.message = re.sub(rf"\b{field}\b(\[\d+\](\.\w+)*)*", name, error.message)
            error.param = name
        raise


def as_parts_of(kind: str) -> pydantic.BeforeValidator:
    """Returns a validator that takes a text in place of a list with one part of a kind."""
    return pydantic.BeforeValidator(lambda given: [{"type": kind, "text": given}] if isinstance(given, str) else given)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
