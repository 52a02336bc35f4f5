"""What a JSON schema says about all its values: types, properties and own values."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARTS = ("allOf", "anyOf", "oneOf")
"""Keywords whose values are parts of a combined schema."""
NO_RULES: Sequence[str] = (
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "$defs"),
    *("definitions", "deprecated", "readOnly", "writeOnly"),
)
"""Keywords that say nothing about values; definitions are looked up where a reference names them."""
MAX_LEVEL = 2
"""Objects in each other in which values are looked for that tell schemas apart."""
_LITERAL = re.compile(r"(?:\\[./\-+*?()\[\]{}^$]|[\w/:@#%&=,;~ -])(?![?*{])", re.ASCII)
"""A character of a regular expression that stands for itself, once at least."""
_ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def types_in(schema: Mapping[str, Any]) -> Any:
    """Returns the types of a schema, in small letters; None for a value of any type."""
    kinds = schema.get("type")
    names = {each.upper(): each for each in _ALL} | {"any": None, "ANY": None}
    if isinstance(kinds, str):
        return names.get(kinds, kinds)
    if not isinstance(kinds, list):
        return kinds
    found = [names.get(each, each) if isinstance(each, str) else each for each in kinds]
    return None if None in found else found


def target_of(reference: Any, root: Any) -> Any:
    """Returns the part of a schema that a reference names; None for one that names none in it."""
    parts = str(reference).split("/")
    found = root if parts[0] == "#" else None
    for part in parts[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def parts_of(schema: Any, root: Any, keys: Sequence[str] = PARTS) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all parts of it, those of parts and references included.

    Args:
        schema: The schema.
        root: The whole of it, for references.
        keys: Keywords whose values are looked into.
    """
    waiting, seen = [schema], set[str]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        if "$ref" in part and (reference := str(part["$ref"])) not in seen:
            seen.add(reference)
            waiting.append(target_of(reference, root))
        for key in keys:
            waiting += part[key] if isinstance(part.get(key), list) else []


def names_of(schema: Any, root: Any) -> frozenset[str]:
    """Returns the names of properties of a schema and of all its parts."""
    found: set[str] = set()
    for part in parts_of(schema, root):
        properties, required = part.get("properties"), part.get("required")
        found |= set(properties) if isinstance(properties, Mapping) else set()
        found |= {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return frozenset(found)


def shapes_of(schema: Any, root: Any) -> frozenset[tuple[str, str]]:
    """Returns names of properties of a schema and its parts, with their schemas as JSON texts.

    The text is empty for a name without a schema, and for one whose schema all values follow.
    """
    found: dict[str, set[str]] = {name: set() for name in names_of(schema, root)}
    for part in parts_of(schema, root):
        for name, each in _properties_of(part).items():
            if isinstance(each, Mapping) and each:
                found.setdefault(name, set()).add(json.dumps(each))
    for part in parts_of(schema, root, ("allOf",)):
        found |= {name: set() for name in _properties_of(part)}
    return frozenset((name, text) for name, texts in found.items() for text in texts or {""})


def _properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What all values of a schema have.

    Attributes:
        types: Their types.
        values: JSON texts of the values themselves; None for any.
        required: Properties that all objects have.
        properties: Facts of properties by name.
        is_closed: Whether objects have no further properties.
        prefixes: Texts that the texts begin with, all of them.
    """

    types: frozenset[str] = _ALL
    values: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    properties: Mapping[str, Facts] = dataclasses.field(default_factory=dict)
    is_closed: bool = False
    prefixes: frozenset[str] = frozenset()

    def joined(self, other: Facts) -> Facts:
        """Returns what values have that follow both schemas."""
        values = other.values if self.values is None else self.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        properties = dict(self.properties)
        for name, facts in other.properties.items():
            properties[name] = properties[name].joined(facts) if name in properties else facts
        return Facts(
            _common(self.types, other.types),
            values,
            self.required | other.required,
            properties,
            self.is_closed or other.is_closed,
            self.prefixes | other.prefixes,
        )

    def excludes(self, other: Facts) -> bool:
        """Returns whether no value follows both schemas."""
        if not _common(self.types, other.types):
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        if _common(self.types, other.types) == frozenset({"string"}) and any(
            not (one.startswith(another) or another.startswith(one))
            for one in self.prefixes
            for another in other.prefixes
        ):
            return True
        for own, its in ((self, other), (other, self)):
            if own.is_closed and its.required - own.properties.keys():
                return own.types == its.types == frozenset({"object"}) or own._are_objects(its)
        shared = self.required & other.required & self.properties.keys() & other.properties.keys()
        return self._are_objects(other) and any(
            self.properties[name].excludes(other.properties[name]) for name in shared
        )

    def _are_objects(self, other: Facts) -> bool:
        return _common(self.types, other.types) == frozenset({"object"})


def _common(types: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    """Returns the types of values that have both; each integer is a number."""
    found = types & others
    for one, another in ((types, others), (others, types)):
        if "integer" in one and "number" in another:
            found |= {"integer"}
    return found


def _prefixes_of(pattern: Any) -> frozenset[str]:
    """Returns the text that all texts of a regular expression begin with, if it shows one."""
    if not isinstance(pattern, str) or not pattern.startswith("^") or "|" in pattern:
        return frozenset()
    found, place = "", 1
    while (match := _LITERAL.match(pattern, place)) is not None:
        found, place = found + match[0].removeprefix("\\"), match.end()
    return frozenset({found} if found else ())


def facts_of(schema: Any, root: Any, level: int = 0) -> Facts | None:
    """Returns what all values of a schema have; None for a schema without values.

    Args:
        schema: The schema.
        root: The whole of it, for references.
        level: Objects around its values; facts of properties are looked for in few of them.
    """
    if schema is True:
        return Facts()
    if not isinstance(schema, Mapping):
        return None
    found = Facts()
    for part in parts_of(schema, root, ("allOf",)):
        kinds = part.get("type")
        values = [part["const"]] if "const" in part else part.get("enum")
        shapes = _properties_of(part) if level < MAX_LEVEL else {}
        known = {name: facts_of(each, root, level + 1) for name, each in shapes.items()}
        own = Facts(
            _ALL if kinds is None else frozenset([kinds] if isinstance(kinds, str) else kinds),
            frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None,
            frozenset(part.get("required") or ()),
            {name: facts for name, facts in known.items() if facts is not None},
            part.get("additionalProperties") is False and "patternProperties" not in part and level < MAX_LEVEL,
            _prefixes_of(part.get("pattern")),
        )
        found = found.joined(own)
    return found
