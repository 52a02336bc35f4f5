"""Tool calls whose arguments are tags in each other, as MiniMax M3 writes them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from torchax_serve.sampling.schema_facts import parts_of
from torchax_serve.server.call_stream import CallPiece, argument_piece, json_text, merged
from torchax_serve.server.schema_types import types_of

ITEM = "item"
"""Name of the tags of an array."""


@dataclasses.dataclass
class _Tag:
    key: str
    texts: list[str] = dataclasses.field(default_factory=list)
    tags: list[_Tag] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class NestedCalls:
    """A call whose arguments are tags, each a piece as soon as it is complete.

    The tags in an argument are its properties, or its items. Texts have the types that the function's schema has for
    them; those that no schema is about are texts.

    Args:
        name: Name of the function.
        prefix: Text in front of each tag; without it ``<`` is text.
        schema: Of the function's arguments.
    """

    is_inside = False

    def __init__(self, name: str, prefix: str, schema: Any) -> None:
        self._name, self._schema = name, schema if isinstance(schema, Mapping) else {}
        self._prefix = prefix
        self._tag = re.compile(rf"{re.escape(prefix)}\s*<(/?)([^<>\n]+)>")
        self._buffer, self._num_read = "", 0
        self._open: list[_Tag] = []
        self._has_arguments = False
        self.end: int | None = None
        self.rest = ""

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        found: list[CallPiece] = []
        self._buffer += text
        while self.end is None:
            begin = self._buffer.find(self._prefix)
            tag = self._tag.match(self._buffer, begin) if begin >= 0 else None
            before = self._buffer if begin < 0 else self._buffer[:begin]
            if begin < 0:  # the prefix may have begun
                before = before[: len(before) - _num_begun(before, self._prefix)]
            self._take_text(before)
            if self.end is not None or tag is None:
                self._drop(len(before))
                break
            self._drop(tag.end())
            found += self._take_tag(*tag.groups())
        return merged(found)

    def close(self) -> list[CallPiece]:
        """Returns the end of the arguments, if there were any and none is cut."""
        is_complete = self._has_arguments and not self._open
        return [CallPiece(None, "}", is_last=True)] if is_complete else []

    def _drop(self, num_chars: int) -> None:
        self._num_read += num_chars
        self._buffer = self._buffer[num_chars:]

    def _take_text(self, text: str) -> None:
        if self._open:
            self._open[-1].texts.append(text)
        elif text.strip():
            self.end = self._num_read + len(text) - len(text.lstrip())

    def _take_tag(self, slash: str, key: str) -> list[CallPiece]:
        """Takes a tag; returns the argument that it completes."""
        if not slash:
            tag = _Tag(key)
            if self._open:
                self._open[-1].tags.append(tag)
            self._open.append(tag)
            return []
        while self._open and any(each.key == key for each in self._open):  # a tag in it may have no end
            tag = self._open.pop()
            if tag.key == key:
                break
        else:
            return []
        if self._open:
            return []
        schema = _child(self._schema, tag.key, self._schema)
        name = None if self._has_arguments else self._name
        piece = argument_piece(name, tag.key, _text_of(tag, schema, self._schema))
        self._has_arguments = True
        return [piece]


def _num_begun(text: str, prefix: str) -> int:
    """Returns how many characters at the end of a text begin a prefix."""
    return next((size for size in range(min(len(prefix) - 1, len(text)), 0, -1) if text.endswith(prefix[:size])), 0)


def _text_of(tag: _Tag, schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the JSON text of a tag's value."""
    types = types_of(schema, root)
    if not tag.tags:
        return json_text(_leaf(tag.text, types), tag.text)
    is_list = all(each.key == ITEM for each in tag.tags) and ("array" in types or "object" not in types)
    texts = [_text_of(each, _child(schema, None if is_list else each.key, root), root) for each in tag.tags]
    if is_list:
        return f"[{', '.join(texts)}]"
    by_key = dict(zip([each.key for each in tag.tags], texts, strict=True))  # of tags of one name the last
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {text}' for key, text in by_key.items())}}}"


def _child(schema: Any, key: str | None, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a property, or of items where `key` is None; True if there is none."""
    for part in parts_of(schema, root):
        properties = part.get("properties")
        if key is None and "items" in part:
            return part["items"]
        if key is not None and isinstance(properties, Mapping) and key in properties:
            return properties[key]
    further = [part["additionalProperties"] for part in parts_of(schema, root) if "additionalProperties" in part]
    return further[0] if key is not None and further else True


def _leaf(text: str, types: list[str]) -> Any:
    """Returns the value of a text by the types that it may have."""
    if not text.strip() and {"array", "object"} & set(types) and "string" not in types:
        return [] if "array" in types else {}
    if not types or types == ["string"]:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
    name = kind.get(type(value), "string")
    return value if name in types or (name == "integer" and "number" in types) else text
