"""Types of the arguments of tools, for calls that write each argument as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.sampling.schema_facts import parts_of, target_of, types_in

_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_OF_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}


def typed_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools whose arguments have the types that their schemas say in any way.

    These are also those of references, of listed values and of the parts of a combined schema.
    """
    return [{**tool, "function": _typed(tool["function"])} if "function" in tool else dict(tool) for tool in tools]


def _typed(function: Mapping[str, Any]) -> dict[str, Any]:
    root = function.get("parameters")
    if not isinstance(root, Mapping):
        return dict(function)
    properties = {
        name: {"type": types} if (types := types_of(schema, root)) else schema
        for name, schema in _properties(root, root).items()
    }
    return {**function, "parameters": {**root, "properties": properties}}


def _properties(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of all properties, those of the parts of a combined schema included."""
    found: dict[str, Any] = {}
    for part in parts_of(schema, root):
        own = part.get("properties")
        for name, each in own.items() if isinstance(own, Mapping) else ():
            found.setdefault(name, each)
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Returns the types of the values that follow a schema, the likeliest first."""
    found: list[str] = []
    is_nullable = False
    for part in parts_of(schema, root):
        own = _own_types(part)
        found += own
        is_nullable = is_nullable or part.get("nullable") is True
        if part is schema and own:  # parts say no more
            break
    return list(dict.fromkeys([*found, "null"] if is_nullable and found else found))


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    declared = types_in(schema)
    if declared is not None:
        found = [declared] if isinstance(declared, str) else [each for each in declared if isinstance(each, str)]
    elif "const" in schema:
        found = [_KINDS.get(type(schema["const"]), "string")]
    elif isinstance(schema.get("enum"), list):
        found = [_KINDS.get(type(value), "string") for value in schema["enum"]]
    else:
        found = [kind for key, kind in _OF_KEYWORD.items() if key in schema][:1]
    return found


def kind_of(value: Any) -> str:
    """Returns the type of a JSON value."""
    return _KINDS[type(value)]


def values_of(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that follow a schema, where it lists them; None elsewhere."""
    if not isinstance(schema, Mapping):
        return None
    if set(schema) == {"$ref"}:
        schema = target_of(schema["$ref"], root)
    if isinstance(schema, Mapping) and set(schema) in ({"anyOf"}, {"oneOf"}):
        parts = [values_of_part(part) for part in next(iter(schema.values()))]
        known = [value for part in parts if part is not None for value in part]
        return known if known and all(part is not None for part in parts) else None
    return values_of_part(schema)


def values_of_part(schema: Any) -> list[Any] | None:
    """Returns the values that a schema without parts lists; None for any others."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return list(schema["enum"])
    return [None] if schema.get("type") == "null" else None
