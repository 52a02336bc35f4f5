"""Regular expressions of schemas without look-ahead, which grammars do not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANY = r"[\s\S]*"
_CLASS = r"\[\^?(?:\\.|[^\\\]])+\]"
_LITERAL = r"(?:\\[^a-zA-Z0-9]|[^\\^$.|?*+()\[\]{}])"
"""A character that stands for itself."""
_ONLY_OF_CLASS = re.compile(rf"\^?({_CLASS})\*\$")
_FREE_OF = re.compile(rf"\.\*({_LITERAL}+)")
_LITERALS = re.compile(rf"{_LITERAL}+")
_ONE_OF_CLASS = re.compile(_CLASS)


def without_look_ahead(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema whose ``pattern`` has no look-ahead at its begin.

    Further patterns are in its place.

    ``^(?=X)Y`` is what begins with X and follows Y. ``^(?!X)Y`` is what follows Y and does not begin with X, where X is
    a text, a class of characters, a text somewhere (``.*``), or texts of one class of characters alone. pydantic's
    decimal numbers and Zod's addresses of mail are such patterns. Others stay as they are, which a grammar refuses.
    """
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith(("^(?=", "^(?!")):
        return schema
    found, rest = [], pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        end = _end_of_group(rest)
        body = None if end is None else rest[3 : end - 1]
        if end is None or body is None or "(?=" in body or "(?!" in body or "(?<" in body:
            return schema
        parts = [rf"^(?:{body})"] if rest[2] == "=" else _opposites(body)
        if parts is None:
            return schema
        found += parts
        rest = rest[end:]
    kept = {**schema, "pattern": f"^{rest}"}
    return {**kept, "allOf": [*(schema.get("allOf") or ()), *({"pattern": each} for each in found)]}


def _end_of_group(text: str) -> int | None:
    """Returns where the group ends that a regular expression begins with; None without an end."""
    depth, place = 0, 0
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 1
        elif char == "[":
            found = re.compile(_CLASS).match(text, place)
            place = place if found is None else found.end() - 1
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return place + 1
        place += 1
    return None


def _opposites(body: str) -> list[str] | None:
    """Returns patterns of texts that do not begin as `body` says; None where none is known."""
    if (found := _ONLY_OF_CLASS.fullmatch(body)) is not None:
        return [_other(found[1])]
    if _ONE_OF_CLASS.fullmatch(body):
        return [rf"^(?:{_other(body)}{_ANY})?$"]
    if _LITERALS.fullmatch(body):
        return [rf"^{_no_prefix(_literals(body))}$"]
    if (found := _FREE_OF.fullmatch(body)) is not None and len(texts := _literals(found[1])) <= 2:
        first, last = texts[0], texts[-1]
        if len(texts) == 1:
            return [f"^[^{first}]*$"]
        if first == last:
            return [f"^(?:{first}?[^{first}])*{first}?$"]
        return [f"^(?:[^{first}]|{first}+[^{first}{last}])*{first}*$"]
    return None


def _literals(text: str) -> list[str]:
    """Returns the characters that a pattern of literals has, as classes have them."""
    return [re.escape(each[-1]) if not each[-1].isalnum() else each for each in re.findall(_LITERAL, text)]


def _other(of_class: str) -> str:
    """Returns the class of all characters that are not of another one."""
    return f"[{of_class[2:]}" if of_class.startswith("[^") else f"[^{of_class[1:]}"


def _no_prefix(texts: list[str]) -> str:
    """Returns a pattern of the texts that do not begin with some characters."""
    found = f"(?:[^{texts[-1]}]{_ANY})?"
    for each in reversed(texts[:-1]):
        found = f"(?:[^{each}]{_ANY}|{each}{found})?"
    return found
