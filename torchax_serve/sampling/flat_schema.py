"""Combined JSON schemas as alternatives without parts, for grammars that are not of JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.schema_facts import PARTS, target_of

MAX_PARTS = 512
"""Most parts of a schema, those of references included."""
MAX_ALTERNATIVES = 64
"""Most alternatives of a schema."""
_LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OF_OBJECTS = ("properties", "required", "additionalProperties")


def alternatives_of(schema: Any, root: Any) -> list[dict[str, Any]]:
    """Returns schemas without parts and references, of which a value follows one at least.

    Args:
        schema: A schema that `torchax_serve.sampling.json_schema.closed` has returned, or a part of it.
        root: The whole of it, for references.

    Raises:
        InvalidArgumentError: Keywords of parts that cannot be joined, or too many alternatives.
    """
    return _alternatives(schema, root, itertools.count())


def _alternatives(schema: Any, root: Any, count: Iterator[int]) -> list[dict[str, Any]]:
    if next(count) > MAX_PARTS:
        raise InvalidArgumentError(f"expected at most {MAX_PARTS} parts of a combined schema, got more")
    if not isinstance(schema, Mapping):
        raise InvalidArgumentError("expected a schema that is an object, got another")
    found = [{key: value for key, value in schema.items() if key not in (*PARTS, "$ref", "$defs")}]
    groups = [[part] for part in schema.get("allOf") or ()]
    if "$ref" in schema:
        groups.append([target_of(schema["$ref"], root)])
    groups += [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
    for group in groups:
        parts = [each for part in group if part is not False for each in _alternatives(_object(part), root, count)]
        joined = [_joined(one, other) for one in found for other in parts]
        found = [each for each in joined if each is not None]
        if len(found) > MAX_ALTERNATIVES:
            raise InvalidArgumentError(f"expected at most {MAX_ALTERNATIVES} alternatives of a schema, got more")
    return found


def _object(schema: Any) -> Any:
    return {} if schema is True else schema


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a schema whose values follow both; None if there are none."""
    found = {**one, **other}
    for key in one.keys() & other.keys() - set(_OF_OBJECTS):
        found[key] = _both(key, one[key], other[key])
        if key in ("type", "enum") and found[key] == []:
            return None
    if any(key in schema for key in ("properties", "required") for schema in (one, other)):
        found |= _both_objects(one, other)
        properties = found["properties"]
        if any(properties.get(name) is False for name in found["required"]):
            return None
        found["properties"] = {name: each for name, each in properties.items() if each is not False}
    return found


def _both(key: str, one: Any, other: Any) -> Any:
    if one == other:
        return one
    if key == "type":
        kinds = [[each] if isinstance(each, str) else each for each in (one, other)]
        common = [kind for kind in kinds[0] if kind in kinds[1]]
        if "integer" not in common and any("integer" in a and "number" in b for a, b in (kinds, kinds[::-1])):
            common.append("integer")
        return common[0] if len(common) == 1 else common
    if key == "enum":
        return [value for value in one if json.dumps(value) in map(json.dumps, other)]
    if key in _LOWEST:
        return max(one, other)
    if key in _HIGHEST:
        return min(one, other)
    raise InvalidArgumentError(f"expected parts of a combined schema that differ in their objects, got two {key}")


def _both_objects(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    own, others = one.get("properties") or {}, other.get("properties") or {}
    properties: dict[str, Any] = {}
    for name in dict.fromkeys([*own, *others]):
        shapes = [
            _object(schema["properties"][name]) if name in (schema.get("properties") or {}) else _further(schema)
            for schema in (one, other)
        ]
        properties[name] = _both_shapes(*shapes)
    required = list(dict.fromkeys([*(one.get("required") or ()), *(other.get("required") or ())]))
    found: dict[str, Any] = {"properties": properties, "required": required}
    if (further := _both_shapes(_further(one), _further(other))) != {}:
        found["additionalProperties"] = further
    return found


def _further(schema: Mapping[str, Any]) -> Any:
    return _object(schema.get("additionalProperties", {}))


def _both_shapes(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one == {} or one == other:
        return other
    return one if other == {} else {"allOf": [one, other]}
