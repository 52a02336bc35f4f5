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
from torchax_serve.server.dialect_grammar import DialectRules, in_order
from torchax_serve.server.errors import bad_request
from torchax_serve.server.schema_types import kind_of, types_of, values_of

_TEXT = r"TEXT: /(.|\n)*/"
_KINDS = ("string", "number", "boolean", "null", "array", "object")
_MOST = 2**53 - 1
"""Largest integer of a call in Python."""


@dataclasses.dataclass(frozen=True)
class CallForm:
    """Text of tool calls.

    Attributes:
        begin, middle, end: Text in front of a call's name, between it and its arguments, and behind them.
        between: Text between two calls; None where an answer has one call only.
        opening, closing: Text around all calls.
        quotes_name: Whether the name is a JSON string.
        argument: Text in front of an argument's name, between it and its value, and behind that; None where all
            arguments are one JSON object. In the second, ``{kind}`` stands for the name of the value's type, and
            ``{is_text}`` for whether it is a text; in the third, ``{key}`` for the argument's name.
        quote: Text for a quotation mark in an argument's name; empty where names have none.
        nested: Text in front of each tag, where arrays and objects are tags in that of the argument; else empty.
        index: Text between the name and a number; empty where there is none.
        id: Pattern of the id in front of the name, and the text behind it; None where there is none.
        named: Text between two arguments of a call in Python; None for other calls.
        text: Text in front of an answer that is no call, where calls begin without a text of the format.
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
    quote: str = ""
    nested: str = ""
    delimiter: str | None = None
    index: str = ""
    id: tuple[str, str] | None = None
    named: str | None = None
    text: str = ""


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
        self._tags: dict[tuple[str, str], tuple[str, str]] = {}
        """Names and bodies of the rules of tags in others, by their names and schemas."""
        self._specials = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or r"(?!)")

    def lines(self) -> Iterator[str]:
        """Yields the rules."""
        form = self._form
        lead = form.opening + form.begin
        trigger, rest = ("", lead) if self._is_forced else self._split(lead or form.between or "")
        is_single = self._max_calls == 1 or form.between is None
        more = "" if is_single else " any_call*"
        calls = f"any_first{more} {self._literal(form.closing)}"
        if self._is_forced:
            yield f"start: {calls}"
        else:
            yield f"start: {f'calls | {self._literal(form.text)} ' if form.text else ''}(trigger calls)* TEXT"
            yield f"calls: {calls}"
            yield trigger
        yield "any_first: " + " | ".join(f"{self._literal(rest)} call_{index}" for index in range(len(self._tools)))
        if not is_single:
            begin = self._literal(f"{form.between}{form.begin}")
            yield "any_call: " + " | ".join(f"{begin} call_{index}" for index in range(len(self._tools)))
        for index, tool in enumerate(self._tools):
            yield from self._call(index, tool["function"])
        yield _TEXT

    def _split(self, lead: str) -> tuple[str, str]:
        """Returns the rule of the text up to the beginning of a call, and its rest."""
        found = self._specials.search(lead)
        if found is not None:
            return f"trigger: {_text_until(lead[: found.start()])} {self._literal(found[0])}", lead[found.end() :]
        begin = lead.partition('"name"')[0] or lead
        return f"trigger[lazy]: TEXT {_quoted(begin)}", lead[len(begin) :]

    def _call(self, index: int, function: Mapping[str, Any]) -> Iterator[str]:
        """Yields the rules of a call behind its beginning."""
        form, name = self._form, str(function["name"])
        shown = _quoted(json.dumps(name) if form.quotes_name else name)
        schema = function.get("parameters") or {"type": "object"}
        schema = {key: value for key, value in schema.items() if key != "nullable"}  # arguments are an object
        shown += f" {self._literal(form.index)} /[0-9]{{1,4}}/" if form.index else ""
        shown = f"/{form.id[0]}/ {self._literal(form.id[1])} {shown}" if form.id is not None else shown
        head, tail = f"call_{index}: {shown} {self._literal(form.middle)}", self._literal(form.end)
        if form.delimiter is not None:
            rules = self._dialect(index, schema)
            is_free = not (self._is_forced or function.get("strict"))
            yield f"{head} {rules.value({'type': 'object'} if is_free else {'type': 'object', **rules.root})} {tail}"
            yield from rules.lines()
            if index == 0 and form.delimiter not in self._special_ids:
                yield self._string(form.delimiter)
            return
        if form.argument is None and form.named is None:
            is_free = not (self._is_forced or function.get("strict"))
            held = {"type": "object"} if is_free else closed(schema)
            yield f"{head} {_json(held)} {tail}"
            return
        root = closed(schema)
        bodies, number = list[str](), 0
        for each in _objects(root, name):
            required, parts = each.get("required") or (), list[tuple[str, bool]]()
            for key, value in (each.get("properties") or {}).items():
                rule, number = f"argument_{index}_{number}", number + 1
                parts.append((rule, key in required))
                yield f"{rule}: {self._argument(name, key, value, root)}"
            body, further = in_order(parts, _quoted(form.named) if form.named else "", f"rest_{index}_{len(bodies)}")
            yield from (f"{rule}: {text}" for rule, text in further.items())
            bodies.append(body)
        is_one = len(bodies) == 1
        yield f"{head} {bodies[0] if is_one else '(' + ' | '.join(f'({body})' for body in bodies) + ')'} {tail}"
        if index == 0 and form.argument is not None:
            yield self._string(form.nested or form.argument[2])
        if index == len(self._tools) - 1:
            yield from (f"{rule}: {body}" for rule, body in self._tags.values())

    def _string(self, end: str) -> str:
        """Returns the rule of any text and the text behind it."""
        if (found := self._specials.search(end)) is None:
            return f"string[lazy]: TEXT {_quoted(end)}"
        return f"string: {_text_until(end[: found.start()])} {self._literal(end[found.start() :])}"

    def _dialect(self, index: int, schema: Mapping[str, Any]) -> DialectRules:
        """Returns the maker of rules of values with bare keys."""
        assert self._form.delimiter is not None
        is_special = self._form.delimiter in self._special_ids
        delimiter = self._form.delimiter
        return DialectRules(f"v{index}", self._literal(delimiter), delimiter, schema, _json, is_special=is_special)

    def _argument(self, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns the body of the rule of an argument."""
        if self._form.named is not None:
            if not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
                raise _bad_name(key, name, "of letters, digits and _")
            terms = " | ".join(_python_terms(schema, root))
            return f"{_quoted(f'{key}=')} ({self._checked(terms, name, key)})"
        assert self._form.argument is not None
        begin, middle, end = self._form.argument
        has_quotes = '"' in begin and not self._form.quote
        if not re.fullmatch(r"[^<>\n]+", key) or (has_quotes and '"' in key):
            others = "<, >, quotes" if has_quotes else "<, >"
            raise _bad_name(key, name, f"without {others} and line breaks")
        if self._form.nested:
            return self._tag(name, key, schema, root)
        key = key.replace('"', self._form.quote or '"')
        behind, found = self._literal(end), []
        kinds: Sequence[str | None] = _KINDS if "{" in middle else (None,)
        for kind in kinds:
            text = middle.replace("{kind}", str(kind)).replace("{is_text}", json.dumps(kind == "string"))
            if value := self._value(schema, root, kind, behind):
                found.append(f"{self._literal(begin + key + text)} {value}")
        return self._checked(" | ".join(found), name, key)

    def _tag(self, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns the body of the rule of a tag, whose value may be tags."""
        assert self._form.argument is not None
        begin, middle, end = (text.replace("{key}", key) for text in self._form.argument)
        close, found = self._literal(end), list[str]()
        kinds = types_of(schema, root)
        if (values := values_of(schema, root)) is not None:
            found = [value] if (value := self._value(schema, root, None, close)) else []
        elif "string" in kinds or not kinds:
            pattern = _pattern(schema)
            rest = self._literal(end.removeprefix(self._form.nested))
            found.append(f"string {rest}" if pattern is None else f"/{pattern}/ {close}")
        for kind in () if values is not None else kinds:
            held = None if kind == "string" else _of_kind(schema, root, kind)
            if held is not None:
                is_number = kind == "integer" and "number" in kinds
                inner = self._inner(name, held, kind, root) or ("" if is_number else [_json(held)])
                found += [f"{each} {close}".strip() for each in inner]
        return f"{self._literal(begin + key + middle)} ({self._checked(' | '.join(found), name, key)})"

    def _inner(self, name: str, schema: Any, kind: str, root: Mapping[str, Any]) -> list[str]:
        """Returns the terms of the tags of an array or an object; none where it is JSON text."""
        found = []
        for each in alternatives_of(schema, root) if kind in ("array", "object") else ():
            if kind == "array" and isinstance(each.get("items"), dict) and "prefixItems" not in each:
                least, most = each.get("minItems", 0), each.get("maxItems", "")
                item = "" if most == 0 else self._tag_rule(name, "item", each["items"], root)
                found.append(f"{item}{{{least},{most}}}" if item else "")
            elif kind == "object" and each.get("properties") and each.get("additionalProperties") is False:
                required = each.get("required") or ()
                parts = [
                    (self._tag_rule(name, key, value, root), key in required)
                    for key, value in each["properties"].items()
                    if value is not False
                ]
                found.append(in_order(parts, "", "")[0])
            else:
                found.append(_json(_with_definitions(each, root)))
        return found

    def _tag_rule(self, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns the name of the rule of a tag in another, which may be in itself."""
        if not re.fullmatch(r"[^<>\n]+", key):
            raise _bad_name(key, name, "without <, > and line breaks")
        known = key, json.dumps([schema, root], sort_keys=True)
        if known not in self._tags:
            rule = f"tag_{len(self._tags)}"
            self._tags[known] = rule, ""
            self._tags[known] = rule, self._tag(name, key, schema, root)
        return self._tags[known][0]

    def _checked(self, terms: str, name: str, key: str) -> str:
        if not terms:
            message = f"tools: expected a schema of {key} of {name} that a value follows, got one that none follows"
            raise bad_request(message, "tools", "invalid_value")
        return terms

    def _value(self, schema: Any, root: Mapping[str, Any], kind: str | None, behind: str) -> str:
        """Returns the terms of a value and of the text behind it; none for a value of another kind."""
        if (values := values_of(schema, root)) is not None:
            values = [each for each in values if kind in (None, _shown_kind(each))]
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
            return f"({' | '.join(map(_quoted, texts))}) {behind}" if texts else ""
        kinds = types_of(schema, root)
        is_text = "string" in kinds or not kinds
        if kind in (None, "string") and is_text:
            pattern = _pattern(schema)
            return "string" if pattern is None else f"/{pattern}/ {behind}"
        if kind is None:
            return f"{_json(_with_definitions(schema, root))} {behind}"
        held = _of_kind(schema, root, kind)
        return "" if held is None else f"{_json(held)} {behind}"

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


def _text_until(text: str) -> str:
    """Returns the terminal of any text that ends with `text`, in front of a special token."""
    escaped = re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
    return rf"/(.|\n)*{escaped}/" if text else "TEXT"


def _bad_name(key: str, name: str, expected: str) -> Exception:
    message = f"tools: expected names of arguments {expected}, got {key[:40]!r} of {name}"
    return bad_request(message, "tools", "invalid_value")


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {**({"$defs": root["$defs"]} if "$defs" in root else {}), **schema}


def _shown_kind(value: Any) -> str:
    """Returns the type of a value, as forms of calls name it."""
    return kind_of(value).replace("integer", "number")


def _of_kind(schema: Any, root: Mapping[str, Any], kind: str) -> Any:
    """Returns a schema's values of a type; None without any."""
    kinds = types_of(schema, root)
    if kind == "number" and "number" not in kinds and "integer" in kinds:
        kind = "integer"
    if not kinds:
        return {"type": kind}
    held = _with_definitions(schema, root)
    if kind not in kinds or not isinstance(held, dict):
        return None
    if len(kinds) == 1:
        return held
    definitions = {key: value for key, value in held.items() if key == "$defs"}
    return {**definitions, "allOf": [{"type": kind}, {key: held[key] for key in held if key != "$defs"}]}


def _python_terms(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yields the alternatives of a value in a call of Python."""
    names = {"true": "True", "false": "False", "null": "None"}
    if (values := values_of(schema, root)) is not None:
        for value in values:
            text = json.dumps(value, ensure_ascii=False)
            yield _quoted(names.get(text, text))
            if isinstance(value, str) and not re.search(r"['\\\x00-\x1f]", value):
                yield _quoted(f"'{value}'")
        return
    for kind in _KINDS:
        held = _of_kind(schema, root, kind)
        if held is None:
            continue
        if kind in ("boolean", "null"):
            yield '"True" | "False"' if kind == "boolean" else '"None"'
            continue
        if types_of(held, root) == ["integer"]:
            held = {"minimum": -_MOST, "maximum": _MOST, **held}
        yield _json(held)
        if kind == "string" and _pattern(schema) is None and "format" not in schema:
            yield '"\'" /[^\'\\\\\\x00-\\x1f]*/ "\'"'


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
