"""How families spell tool calls, and the grammars of answers that are held to them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchax_serve.sampling.grammar import JSON_OPTIONS, closed
from torchax_serve.server.dialect_grammar import DialectRules
from torchax_serve.server.errors import bad_request

_TEXT = r"TEXT: /(.|\n)*/"


@dataclasses.dataclass(frozen=True)
class CallForm:
    """Text of tool calls.

    Attributes:
        begin, middle, end: Text in front of a call's name, between it and its arguments, and behind them.
        between: Text between two calls; None where an answer has one call only.
        opening, closing: Text around all calls.
        quotes_name: Whether the name is a JSON string.
        argument: Text in front of an argument's name, between it and its value, and behind that; None where all
            arguments are one JSON object.
        delimiter: Text around strings, where the object has bare keys (`torchax_serve.server.dialect_grammar`).
    """

    begin: str
    middle: str
    end: str
    between: str | None = "\n"
    opening: str = ""
    closing: str = ""
    quotes_name: bool = False
    argument: tuple[str, str, str] | None = None
    delimiter: str | None = None


def call_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    special_ids: Mapping[str, int],
    *,
    is_forced: bool,
    max_calls: int | None,
) -> str:
    """Returns a grammar, in Lark's syntax, of answers with calls of `tools`.

    Args:
        form: How calls are spelled.
        tools: Functions that may be called.
        special_ids: Special tokens of the tokenizer, which texts of a grammar do not match.
        is_forced: Whether the answer is calls only; else it is any text with calls.
        max_calls: Most calls; None for any number.

    Raises:
        ApiError: 400 for names of arguments that the form cannot have.
    """
    return "\n".join(_Rules(form, tools, special_ids, is_forced=is_forced, max_calls=max_calls).lines())


class _Rules:
    def __init__(
        self,
        form: CallForm,
        tools: Sequence[Mapping[str, Any]],
        special_ids: Mapping[str, int],
        *,
        is_forced: bool,
        max_calls: int | None,
    ) -> None:
        self._form, self._tools, self._special_ids = form, tools, special_ids
        self._is_forced, self._max_calls = is_forced, max_calls
        self._specials = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or r"(?!)")

    def lines(self) -> Iterator[str]:
        """Yields the rules."""
        form = self._form
        lead = form.opening + form.begin
        trigger, rest = ("", lead) if self._is_forced else self._split(lead)
        is_single = self._max_calls == 1 or form.between is None
        more = "" if is_single else f" ({self._literal(form.between or '')} any_call)*"
        calls = f"any_first{more} {self._literal(form.closing)}"
        if self._is_forced:
            yield f"start: {calls}"
        else:
            yield "start: (trigger calls)* TEXT"
            yield f"calls: {calls}"
            yield trigger
        yield "any_first: " + " | ".join(f"{self._literal(rest)} call_{index}" for index in range(len(self._tools)))
        if not is_single:
            begin = self._literal(form.begin)
            yield "any_call: " + " | ".join(f"{begin} call_{index}" for index in range(len(self._tools)))
        for index, tool in enumerate(self._tools):
            yield from self._call(index, tool["function"])
        yield _TEXT

    def _split(self, lead: str) -> tuple[str, str]:
        """Returns the rule of the text up to the beginning of a call, and its rest."""
        found = self._specials.match(lead)
        if found is not None:
            return f"trigger: TEXT {self._literal(found[0])}", lead[found.end() :]
        begin = lead.partition('"name"')[0] or lead
        return f"trigger[lazy]: TEXT {_quoted(begin)}", lead[len(begin) :]

    def _call(self, index: int, function: Mapping[str, Any]) -> Iterator[str]:
        """Yields the rules of a call behind its beginning."""
        form, name = self._form, str(function["name"])
        shown = _quoted(json.dumps(name) if form.quotes_name else name)
        schema = function.get("parameters") or {"type": "object"}
        head, tail = f"call_{index}: {shown} {self._literal(form.middle)}", self._literal(form.end)
        if form.delimiter is not None:
            rules = self._dialect(index, schema)
            is_free = not (self._is_forced or function.get("strict"))
            yield f"{head} {rules.value({'type': 'object'} if is_free else {'type': 'object', **schema})} {tail}"
            yield from rules.lines()
            if index == 0 and form.delimiter not in self._special_ids:
                yield f"string[lazy]: TEXT {_quoted(form.delimiter)}"
            return
        if form.argument is None:
            is_free = not (self._is_forced or function.get("strict"))
            held = {"type": "object"} if is_free else closed(schema)
            yield f"{head} {_json(held)} {tail}"
            return
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        parts = []
        for number, (key, value) in enumerate(properties.items()):
            rule = f"argument_{index}_{number}"
            parts.append(rule if key in required else f"{rule}?")
            yield f"{rule}: {self._argument(name, key, value, schema)}"
        yield f"{head} {' '.join(parts)} {tail}"
        if index == 0:
            yield f"string[lazy]: TEXT {_quoted(form.argument[2])}"

    def _dialect(self, index: int, schema: Mapping[str, Any]) -> DialectRules:
        """Returns the maker of rules of values with bare keys."""
        assert self._form.delimiter is not None
        is_special = self._form.delimiter in self._special_ids
        return DialectRules(f"v{index}", self._literal(self._form.delimiter), schema, _json, is_special=is_special)

    def _argument(self, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        assert self._form.argument is not None
        begin, middle, end = self._form.argument
        if not re.fullmatch(r"[^<>\n]+", key):
            message = f"tools: expected names of arguments without <, > and line breaks, got {key[:40]!r} of {name}"
            raise bad_request(message, "tools", "invalid_value")
        head = self._literal(begin + key + middle)
        values = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else []
        )
        if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
            return f"{head} ({' | '.join(map(_quoted, values))}) {self._literal(end)}"
        if isinstance(schema, dict) and schema.get("type") == "string":
            return f"{head} string"
        shared = {field: root[field] for field in ("$defs", "definitions") if field in root}
        held = {**shared, **closed(schema)} if isinstance(schema, dict) else schema
        return f"{head} {_json(held)} {self._literal(end)}"

    def _literal(self, text: str) -> str:
        """Returns a text of the answer in the grammar, special tokens by their ids."""
        parts, begin = [], 0
        for found in self._specials.finditer(text):
            parts += [_quoted(text[begin : found.start()])] if found.start() > begin else []
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            begin = found.end()
        parts += [_quoted(text[begin:])] if begin < len(text) else []
        return " ".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    held = {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(held)}"
