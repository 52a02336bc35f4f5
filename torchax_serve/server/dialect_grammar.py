"""Grammars of JSON with bare keys and delimited strings, as Gemma 4 writes arguments."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.flat_schema import alternatives_of
from torchax_serve.sampling.json_schema import closed
from torchax_serve.sampling.schema_facts import PARTS
from torchax_serve.server.errors import bad_request

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_NUMBER_KEYS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYS: Mapping[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": _NUMBER_KEYS,
    "number": _NUMBER_KEYS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_MOST = 1 << 16
"""Most items and characters that a schema may ask for."""


class DialectRules:
    """Makes the rules, in Lark's syntax, of values that follow JSON schemas.

    Members of an object stand in the order of their names, as templates sort them.

    Args:
        prefix: Beginning of the names of rules.
        delimiter: Terms of the grammar for the text around a string.
        spelled: That text.
        root: The schema; its closed form is `root`, to which its references refer.
        json_rule: Returns the term of a JSON text that follows a schema.
        is_special: Whether the delimiter is a special token, which no text of a grammar matches; else strings end with
            the rule ``string``.
    """

    def __init__(
        self,
        prefix: str,
        delimiter: str,
        spelled: str,
        root: Mapping[str, Any],
        json_rule: Callable[[Any], str],
        *,
        is_special: bool,
    ) -> None:
        self._prefix, self._delimiter, self._json = prefix, delimiter, json_rule
        self._text = _without(spelled)
        self._given = root
        self._is_special = is_special
        self._rules: dict[str, str] = {}
        self._by_ref: dict[str, str] = {}

    @functools.cached_property
    def root(self) -> Any:
        """The schema without keywords that hold no value back, and with closed objects."""
        return closed(self._given)

    def lines(self) -> Iterator[str]:
        """Yields the rules that were made."""
        for name, body in self._rules.items():
            yield f"{name}: {body}"

    def value(self, schema: Any) -> str:
        """Returns a term for the values that follow a schema.

        Raises:
            ApiError: 400 for a keyword that cannot be honoured, by its name.
        """
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise _refused("a schema that is false" if schema is False else "a schema that is no object")
        if set(schema) == {"$ref"}:
            return self._referred(schema)
        if "oneOf" in schema:
            raise _refused("oneOf with parts that a value may follow together")
        if any(key in schema for key in (*PARTS, "$ref")):
            return self._combined(schema)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._one_of([self._literal(each) for each in values])
        kinds = schema.get("type", _kind_of(schema))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds is None:
            _check_keys(schema, set())
            return self._any()
        _check_keys(schema, {"type"}.union(*(_KEYS.get(kind, set()) for kind in kinds)))
        return self._one_of([self._of_kind(kind, schema) for kind in kinds])

    def _combined(self, schema: Mapping[str, Any]) -> str:
        """Returns a term for the values that follow a combined schema."""
        if set(schema) - _ANNOTATIONS == {"anyOf"}:
            return self._one_of([self.value(each) for each in schema["anyOf"]])
        try:
            found = alternatives_of(schema, self.root)
        except InvalidArgumentError as error:
            raise _refused(str(error).partition(", got ")[2]) from error
        if not found:
            raise _refused("a schema that no value follows")
        return self._one_of([self.value(each) for each in found])

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        if kind not in _KEYS:
            raise _refused(f"the type {kind!r:.40}")
        return self._json({"type": kind, **{key: schema[key] for key in _KEYS[kind] if key in schema}})

    def _string(self, schema: Mapping[str, Any]) -> str:
        pattern, bounds = schema.get("pattern"), _bounds(schema, "minLength", "maxLength")
        if pattern is not None and bounds:
            raise _refused("pattern next to minLength or maxLength")
        if pattern is not None:
            begin = "" if str(pattern).startswith("^") else r"(.|\n)*"
            end = "" if re.search(r"(?<!\\)(\\\\)*\$\Z", str(pattern)) else r"(.|\n)*"
            body = f"{begin}({str(pattern).removeprefix('^').removesuffix('$' if not end else '')}){end}"
        else:
            body = f"[^<]{bounds}" if bounds else self._text
        if not self._is_special and pattern is None and not bounds:
            return self._rule("text", f"{self._delimiter} string")
        text = self._rule("TEXT", f"/{body.replace('/', chr(92) + '/')}/")
        return self._rule("string", f"{self._delimiter} {text} {self._delimiter}")

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, bounds = self.value(schema.get("items", True)), _bounds(schema, "minItems", "maxItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        further = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}" if bounds else "*"
        items = f'{item} ("," {item}){further}'
        return self._rule("array", f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        further = schema.get("additionalProperties", not properties)
        if further is not False:
            if properties and schema.get("additionalProperties") is not None:
                raise _refused("additionalProperties next to properties")
            pair = f'/[A-Za-z0-9_]+/ ":" {self.value(further)}'
            return self._rule("object", f'"{{" ({pair} ("," {pair})*)? "}}"')
        members = sorted((properties or {}).items(), key=lambda member: member[0].lower())
        if any(not re.fullmatch(r"\w+", key) for key, _ in members):
            raise _refused("names of arguments with other characters than letters, digits and _")
        required = set(schema.get("required") or ())
        if missing := required - {key for key, _ in members}:
            raise _refused(f"a required argument without a schema ({sorted(missing)[0]!r:.60})")
        parts = [(self._rule("member", f'"{key}:" {self.value(value)}'), key in required) for key, value in members]
        body, rules = in_order(parts, '","', f"{self._prefix}_behind{len(self._rules)}")
        self._rules.update(rules)
        return self._rule("object", f'"{{" {body} "}}"')

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
            return (
                f"({self._delimiter} {text} {self._delimiter})" if value else f"({self._delimiter} {self._delimiter})"
            )
        if isinstance(value, (Mapping, list)):
            raise _refused("enum or const with objects or arrays")
        return json.dumps(json.dumps(value))

    def _referred(self, schema: Mapping[str, Any]) -> str:
        reference = schema["$ref"]
        if reference not in self._by_ref:
            self._by_ref[reference] = name = f"{self._prefix}_ref{len(self._by_ref)}"
            self._rules[name] = self.value(self._target(reference))
        return self._by_ref[reference]

    def _target(self, reference: Any) -> Any:
        found: Any = self.root
        parts = str(reference).split("/")
        for part in parts[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise _refused(f"$ref to {reference!r:.60}")
        return found

    def _any(self) -> str:
        name = f"{self._prefix}_any"
        if name not in self._rules:
            self._rules[name] = ""  # it is in itself
            pair = f'/[A-Za-z0-9_]+/ ":" {name}'
            scalars = [self._json({"type": kind}) for kind in ("number", "boolean", "null")]
            array, mapping = f'"[" ({name} ("," {name})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"'
            self._rules[name] = " | ".join([self._string({}), *scalars, f"({array})", f"({mapping})"])
        return name

    def _one_of(self, terms: Sequence[str]) -> str:
        return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"

    def _rule(self, kind: str, body: str) -> str:
        name = f"{self._prefix}_{kind}{len(self._rules)}"
        self._rules[name.upper() if kind == "TEXT" else name] = body
        return name.upper() if kind == "TEXT" else name


def _without(delimiter: str) -> str:
    """Returns a pattern of texts without the first three characters of a delimiter.

    With them, it could be spelled by other tokens than its own.
    """
    first, second, third = (f"\\x{{{ord(char):x}}}" for char in delimiter[:3])
    begun = f"{first}+{second}"
    return f"([^{first}]|({begun})*{first}+([^{first}{second}]|{second}[^{third}{first}]))*({begun})*{first}*"


def in_order(parts: Sequence[tuple[str, bool]], separator: str, name: str) -> tuple[str, dict[str, str]]:
    """Returns terms for parts that stand in this order, and the rules that they need.

    Args:
        parts: Name of each part's rule, and whether it must be there.
        separator: Term between two parts; empty for none.
        name: Beginning of the names of rules.
    """
    if not separator:
        return " ".join(part if is_required else f"{part}?" for part, is_required in parts), {}
    rules: dict[str, str] = {}
    behind, first, may_be_empty = "", "", True  # parts behind another one; parts of which there is one at least
    for part, is_required in reversed(parts):
        begun = f"{part} {behind}".strip()
        if is_required or not first:
            first = begun
        else:
            rules[alternative := f"{name}_{len(rules)}"] = first
            first = f"({begun} | {alternative})"
        may_be_empty = may_be_empty and not is_required
        here = f"{separator} {part}" if is_required else f"({separator} {part})?"
        rules[follows := f"{name}_{len(rules)}"] = f"{here} {behind}".strip()
        behind = follows
    return f"({first})?" if first and may_be_empty else first, rules


def _kind_of(schema: Mapping[str, Any]) -> str | None:
    """Returns the type that a schema's keywords are about; None for a schema without any."""
    keys = {"properties": "object", "additionalProperties": "object", "items": "array"}
    return next((kind for key, kind in keys.items() if key in schema), None)


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> str:
    found = schema.get(least, 0), schema.get(most)
    for value in found:
        if value is not None and (not isinstance(value, int) or not 0 <= value <= _MOST):
            raise _refused(f"{least} or {most} beyond 0 to {_MOST}")
    return "" if found == (0, None) else f"{{{found[0]},{'' if found[1] is None else found[1]}}}"


def _check_keys(schema: Mapping[str, Any], known: set[str]) -> None:
    if further := [key for key in schema if key not in known | _ANNOTATIONS]:
        raise _refused(f"the keyword {further[0]!r:.60}")


def _refused(what: str) -> Exception:
    return bad_request(
        f"tools: expected schemas that calls of this model can be held to, got {what}", "tools", "invalid_value"
    )
