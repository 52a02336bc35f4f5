"""How families spell tool calls, and the grammars of answers that are held to them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.flat_schema import alternatives_of
from torchax_serve.sampling.grammar import JSON_OPTIONS
from torchax_serve.sampling.json_schema import closed
from torchax_serve.server.dialect_grammar import DialectRules
from torchax_serve.server.errors import bad_request
from torchax_serve.server.schema_types import types_of, values_of

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
        has_index: Whether a colon and a number stand behind the name.
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
    has_index: bool = False


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
    try:
        return "\n".join(_Rules(form, tools, special_ids, is_forced=is_forced, max_calls=max_calls).lines())
    except InvalidArgumentError as error:
        raise bad_request(f"tools: {error}", "tools", "invalid_value") from error


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
        schema = {key: value for key, value in schema.items() if key != "nullable"}  # arguments are an object
        shown += r' ":" /[0-9]{1,4}/' if form.has_index else ""
        head, tail = f"call_{index}: {shown} {self._literal(form.middle)}", self._literal(form.end)
        if form.delimiter is not None:
            rules = self._dialect(index, schema)
            is_free = not (self._is_forced or function.get("strict"))
            yield f"{head} {rules.value({'type': 'object'} if is_free else {'type': 'object', **rules.root})} {tail}"
            yield from rules.lines()
            if index == 0 and form.delimiter not in self._special_ids:
                yield f"string[lazy]: TEXT {_quoted(form.delimiter)}"
            return
        if form.argument is None:
            is_free = not (self._is_forced or function.get("strict"))
            held = {"type": "object"} if is_free else closed(schema)
            yield f"{head} {_json(held)} {tail}"
            return
        root = closed(schema)
        bodies, number = [], 0
        for each in _objects(root, name):
            required, parts = each.get("required") or (), []
            for key, value in (each.get("properties") or {}).items():
                rule, number = f"argument_{index}_{number}", number + 1
                parts.append(rule if key in required else f"{rule}?")
                yield f"{rule}: {self._argument(name, key, value, root)}"
            bodies.append(" ".join(parts))
        is_one = len(bodies) == 1
        yield f"{head} {bodies[0] if is_one else '(' + ' | '.join(f'({body})' for body in bodies) + ')'} {tail}"
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
        if not re.fullmatch(r"[^<>\n]+", key) or ('"' in begin and '"' in key):
            others = "<, >, quotes" if '"' in begin else "<, >"
            message = f"tools: expected names of arguments without {others} and line breaks, got {key[:40]!r} of {name}"
            raise bad_request(message, "tools", "invalid_value")
        head = self._literal(begin + key + middle)
        if (values := values_of(schema, root)) is not None:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
            return f"{head} ({' | '.join(map(_quoted, texts))}) {self._literal(end)}"
        kinds = types_of(schema, root)
        if not kinds or "string" in kinds:
            pattern = _pattern(schema)
            return f"{head} string" if pattern is None else f"{head} /{pattern}/ {self._literal(end)}"
        held = (
            {**({"$defs": root["$defs"]} if "$defs" in root else {}), **schema} if isinstance(schema, dict) else schema
        )
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


def _objects(root: Any, name: str) -> list[dict[str, Any]]:
    """Returns the alternatives of a function's arguments."""
    try:
        found = alternatives_of(root, root)
    except InvalidArgumentError as error:
        raise bad_request(f"tools: the schema of {name}: {error}", "tools", "invalid_value") from error
    if not found or "oneOf" in root:
        got = "oneOf with parts that a value may follow together" if found else "one that no value follows"
        message = f"tools: expected a schema of {name} that calls can be held to, got {got}"
        raise bad_request(message, "tools", "invalid_value")
    return found


def _pattern(schema: Any) -> str | None:
    """Returns the regular expression of a text's schema; None for any text."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return None
    if (given := schema.get("pattern")) is not None:
        begin = "" if given.startswith("^") else r"(.|\n)*"
        is_end = re.search(r"(?<!\\)(\\\\)*\$\Z", given) is not None
        body = given.removeprefix("^")
        body = body[:-1] if is_end else body
        return f"{begin}({body}){'' if is_end else r'(.|' + chr(92) + 'n)*'}".replace("/", r"\/")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return None if not least and most is None else rf"(.|\n){{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    held = {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(held)}"
