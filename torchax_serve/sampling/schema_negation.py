"""Negations of JSON schemas, where grammars can hold them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchax_serve.sampling.schema_facts import NO_RULES, target_of

MAX_LEVEL = 16
"""Most schemas in each other that are negated; those that are in themselves have no end."""
MAX_PAIRS = 28
"""Most pairs of parts of a ``oneOf`` that is negated."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
"""Types that exclude each other; integers are numbers."""
_WITHOUT_OPPOSITE = {
    *("pattern", "format", "multipleOf", "patternProperties", "additionalProperties", "propertyNames", "items"),
    *("prefixItems", "additionalItems", "contains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
}
"""Keywords that hold values back, and whose opposite no grammar holds; others that are not known are annotations."""
_BOUNDS: Mapping[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""Type, opposite bound, and distance from the bound, by the keyword of a bound."""


def any_of(schemas: Iterable[Any]) -> Any:
    """Returns a schema of the values that follow one of several."""
    known = [each for each in schemas if each is not False]
    if any(each is True or each == {} for each in known):
        return True
    return False if not known else known[0] if len(known) == 1 else {"anyOf": known}


def all_of(schemas: Iterable[Any]) -> Any:
    """Returns a schema of the values that follow all of several."""
    known = [each for each in schemas if each is not True and each != {}]
    if any(each is False for each in known):
        return False
    return True if not known else known[0] if len(known) == 1 else {"allOf": known}


def negation_of(schema: Any, root: Any, level: int = 0, *, are_integers: bool = False) -> Any:
    """Returns a schema of the values that do not follow one; None where no grammar holds it.

    Args:
        schema: A schema without ``if``, ``dependentRequired`` and other keywords that stand for parts.
        root: The whole of it, for references.
        level: Schemas around it.
        are_integers: Whether the numbers among the values are integers.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping) or level > MAX_LEVEL:
        return None
    found = []
    for key, value in schema.items():
        if key in NO_RULES:
            continue
        negation = _of_type(value, are_integers) if key == "type" else _of_keyword(key, value, schema, root, level)
        if negation is None:
            return None
        found.append(negation)
    return any_of(found)


def _of_keyword(key: str, value: Any, schema: Mapping[str, Any], root: Any, level: int) -> Any:
    """Returns a schema of the values that do not follow one keyword; None for no schema."""
    if key in ("const", "enum"):
        return _not_in([value] if key == "const" else value)
    if key in _BOUNDS:
        return _beyond(key, value)
    if key == "required":
        return _objects(_lacking(name) for name in value)
    if key == "properties":
        parts = {name: negation_of(each, root, level + 1) for name, each in value.items()}
        if None in parts.values():
            return None
        return _objects({"required": [name], "properties": {name: part}} for name, part in parts.items() if part)
    if key == "contains" and not schema.keys() & {"minContains", "maxContains"}:
        part = negation_of(value, root, level + 1)
        return None if part is None else {"type": "array", "items": part}
    return _of_parts(key, value, root, level)


def _of_parts(key: str, value: Any, root: Any, level: int) -> Any:
    """Returns a schema of the values that do not follow the parts of a combined schema."""
    if key == "not":
        return value
    if key == "$ref":
        return negation_of(target_of(value, root), root, level + 1)
    if key not in ("allOf", "anyOf", "oneOf"):
        return None if key in _WITHOUT_OPPOSITE and value is not True and value != {} else False
    parts = [negation_of(each, root, level + 1) for each in value]
    if None in parts:
        return None
    if key == "allOf":
        return any_of(parts)
    pairs = list(itertools.combinations(value, 2)) if key == "oneOf" else []
    if len(pairs) > MAX_PAIRS:
        return None
    return any_of([all_of(parts), *(all_of(pair) for pair in pairs)])


def _objects(schemas: Iterable[Any]) -> Any:
    return any_of({"type": "object", **each} for each in schemas)


def _lacking(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def _of_type(value: Any, are_integers: bool) -> Any:
    kinds = [value] if isinstance(value, str) else list(value)
    if "integer" in kinds and "number" not in kinds:
        if not are_integers:
            return None  # numbers that are no integers
        kinds.append("number")
    others = [kind for kind in TYPES if kind not in kinds]
    return {"type": others} if others else False


def _others_than(kind: str) -> dict[str, Any]:
    return {"type": [each for each in TYPES if each != kind]}


def _beyond(key: str, value: Any) -> Any:
    kind, opposite, distance = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    bound = value + distance
    return False if distance and bound < 0 else {"type": kind, opposite: bound}


def _not_in(values: Any) -> Any:
    """Returns a schema of all values but some; None for lists and objects that are not empty."""
    if not isinstance(values, list):
        return None
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    found: list[Any] = [{"type": "string", "pattern": _pattern_of_others(texts)} if texts else {"type": "string"}]
    found += _between(numbers)
    found += [{"const": each} for each in (True, False) if not any(value is each for value in values)]
    found += [] if None in values else [{"type": "null"}]
    for python_type, kind, least in ((list, "array", "minItems"), (dict, "object", "minProperties")):
        given: list[Any] = [value for value in values if isinstance(value, python_type)]
        if any(given):
            return None
        found.append({"type": kind, least: 1} if given else {"type": kind})
    return any_of(found)


def _between(numbers: Sequence[float]) -> list[Any]:
    """Returns schemas of the numbers between some."""
    if not numbers:
        return [{"type": "number"}]
    pairs = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in itertools.pairwise(numbers)]
    bounds = [{"exclusiveMaximum": numbers[0]}, *pairs, {"exclusiveMinimum": numbers[-1]}]
    return [{"type": "number", **each} for each in bounds]


def _pattern_of_others(texts: Sequence[str]) -> str:
    """Returns a regular expression of all texts but some."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a text ends here
    return f"^{_others(tree)}$"


def _others(node: Mapping[str, Any]) -> str:
    chars = [char for char in node if char]
    if not chars:
        return r"[\s\S]+"
    known = "".join(re.escape(char) for char in chars)
    found = [] if "" in node else [""]
    found += [rf"[^{known}][\s\S]*", *(re.escape(char) + _others(node[char]) for char in chars)]
    return f"(?:{'|'.join(found)})"


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two schemas are written alike."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
