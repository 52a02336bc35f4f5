"""Fields of response templates for the forms of calls that families share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.response_family import CALL, EACH, OBJECT


def tagged_call(
    opening: str,
    close: str,
    tag: tuple[str, str, str],
    key: str = r"[^>\n]+",
) -> Mapping[str, Any]:
    """Returns the field of a call whose arguments stand between tags.

    Args:
        opening: Pattern in front of them, with the group ``name``.
        close: Text behind them.
        tag: Text in front of an argument's name, and patterns between it and its value, and behind that; the former may
            have the group ``kind``, a word for the value's type.
        key: Pattern of names of arguments.
    """
    begin, middle, end = re.escape(tag[0]), *tag[1:]
    behind = rf"(?=\s*(?:{begin}|{re.escape(close)}|\Z))"
    return {
        "open_pattern": opening,
        "close": close,
        "content": "xml-inline",
        "content_args": {"tag_pattern": rf"{begin}(?P<key>{key}){middle}(?P<value>.*?){end}{behind}"},
        "transform": CALL,
    }


def dialect_call(opening: str, close: str, delimiter: str) -> Mapping[str, Any]:
    """Returns the field of a call whose arguments are JSON with bare keys.

    Args:
        opening: Pattern in front of them, with the group ``name``.
        close: Text behind them.
        delimiter: Text around a string.
    """
    return {
        "open_pattern": opening,
        "close": close,
        "content": "json",
        "content_args": {"string_delims": [[delimiter, delimiter]], "unquoted_keys": True},
        "transform": CALL,
    }


XML_CALL = tagged_call(
    # Qwen3-Coder often leaves <tool_call> out, and Llama 3.1 writes JSON behind the name.
    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?!\s*\{)",
    "</function>",
    ("<parameter=", r">\n?", r"\n?</parameter>"),
)
XML_END = re.compile(r"(?<=</function>)\s*</tool_call>")
NAMED_JSON: Mapping[str, Any] = {
    "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>\s*(?=\{)",
    "close": "</function>",
    "content": "json",
    "transform": CALL,
}
HERMES_CALL: Mapping[str, Any] = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": OBJECT,
}
_MISTRAL_NAMED: Mapping[str, Any] = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[\w-]+))?(?:\[ARGS\])?\s*(?=\{)",
    "content": "json",
    "transform": CALL,
}
_MISTRAL_LIST: Mapping[str, Any] = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?=[\[{])",
    "content": "json",
    "transform": EACH,
    "transform_each": True,
}
INLINE_CALL: Mapping[str, Any] = {
    "repeats": True,
    "open_pattern": r'(?<=\n)(?=\{\s*(?:"type":\s*"function",\s*)?"name":\s*"[\w.-]{1,64}",\s*'
    r'"(?:parameters|arguments)":\s*\{)',
    "content": "json",
    "transform": OBJECT,
}
MISTRAL_CALLS: Sequence[Mapping[str, Any]] = [_MISTRAL_NAMED, _MISTRAL_LIST]


def python_calls(begin: str) -> Mapping[str, Any]:
    """Returns the field of a list of Python's calls, behind a pattern, at the end of an answer."""
    return {
        "open_pattern": begin + r"(?=\[\s*[A-Za-z_][\w.-]*\(\s*(?:\)|\w+\s*=))",
        "close_pattern": r"(?<=\])(?=\s*(?:<\||\Z))",
        "content": "python-call-list",
        "transform": EACH,
        "transform_each": True,
    }
