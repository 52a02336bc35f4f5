"""JSON schemas as grammars need them: closed objects, no keyword that holds nothing back."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.schema_facts import PARTS, Facts, facts_of, names_of, parts_of, shapes_of, target_of
from torchax_serve.sampling.schema_keywords import in_fewer_keywords
from torchax_serve.sampling.schema_negation import all_of, any_of, negation_of
from torchax_serve.sampling.schema_numbers import with_numbers_held

MAX_NODES = 40_000
"""Most parts and properties of a closed schema; in a combined one each part has the properties of the others."""
MAX_SHAPES = 16
"""Number of schemas of one property from which on its values are not told apart."""
_SAYS_FURTHER = ("additionalProperties", "patternProperties", "propertyNames")
"""Keywords that say which further properties an object may have."""
_OF_SCHEMAS = ("properties", "patternProperties")
_OF_SCHEMA = ("items", "additionalItems", "additionalProperties")
_LISTS = ("prefixItems", "items")
MAX_CHOICES = 64
"""Most sets of properties that a number of properties leaves."""


class _Group(NamedTuple):
    """What else a schema belongs to.

    Attributes:
        shapes: Properties that other parts of the combined schema have: names, and schemas as JSON texts.
        forbidden: Properties that this part may not have, as they are another part's of ``oneOf``.
        is_alternative: Whether it is a part of ``anyOf`` or ``oneOf``, next to which other parts hold nothing back.
        is_open: Whether another part says which further properties there are.
    """

    shapes: frozenset[tuple[str, str]] = frozenset()
    forbidden: frozenset[str] = frozenset()
    is_alternative: bool = False
    is_open: bool = False


def closed(schema: Any) -> Any:
    """Returns a schema whose objects have no further properties where it does not say.

    What follows it is valid.

    Models would else write properties without end. Parts of a combined schema (``anyOf``, ``oneOf``, ``allOf``,
    ``$ref``) have the properties of the others as well; parts of a ``oneOf`` lack those by which another would match,
    too. Keywords that hold no value back, and formats that are not known, are left out: by the specification, these
    are annotations.
    """
    return _Closer(in_fewer_keywords(schema)).root() if isinstance(schema, dict) else schema


class _Closer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[tuple[str, _Group], str] = {}
        self._defs: dict[str, Any] = {}
        self._num_nodes = 0

    def root(self) -> dict[str, Any]:
        """Returns the closed schema, with the definitions that it refers to."""
        found = self._schema(self._root, _Group())
        return {**found, "$defs": self._defs} if self._defs else found

    def _count(self, num_nodes: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise InvalidArgumentError(f"expected a schema of at most {MAX_NODES} parts and properties, got more")

    def _schema(self, schema: Any, group: _Group) -> Any:
        self._count(1)
        if isinstance(schema, list):
            return [self._schema(each, _Group()) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return {"$ref": self._reference(schema["$ref"], group)}
        schema = with_numbers_held(schema)
        found = {key: self._inner(key, value) for key, value in schema.items() if key not in PARTS}
        members = [key for key in PARTS if self._has_objects(schema.get(key))]
        has_own = isinstance(schema.get("properties"), dict)
        is_joined = has_own + len(members) + (len(schema.get("allOf") or ()) > 1) > 1
        shapes = group.shapes | (shapes_of(schema, self._root) if is_joined or has_own else frozenset())
        says = group.is_open or self._says_further(schema)
        inner = group._replace(shapes=shapes if is_joined and not says else group.shapes, is_open=says)
        for key in PARTS:
            if isinstance(schema.get(key), list):
                self._add_parts(found, key, schema, inner)
        if schema.get("unevaluatedProperties") is False:
            del found["unevaluatedProperties"]
            has_own, says = True, False
        is_object = has_own or (bool(group.shapes) and schema.get("type") in (None, "object") and "required" in schema)
        if is_object and not says:
            found = self._closed_object(found, schema, group._replace(shapes=shapes))
        elif group.forbidden:
            found["properties"] = {**(found.get("properties") or {}), **dict.fromkeys(sorted(group.forbidden), False)}
        return _without_counts(found)

    def _inner(self, key: str, value: Any) -> Any:
        if key in _OF_SCHEMAS and isinstance(value, dict):
            return {name: self._schema(each, _Group()) for name, each in value.items()}
        if key in _OF_SCHEMA or (key in _LISTS and isinstance(value, list)):
            return self._schema(value, _Group())
        return value

    def _add_parts(self, found: dict[str, Any], key: str, schema: Mapping[str, Any], group: _Group) -> None:
        """Adds closed parts of a combined schema; of a ``oneOf`` such that exclude each other."""
        parts = schema[key]
        forbidden = self._exclusive(schema) if key == "oneOf" else None
        if key == "oneOf" and forbidden is None and (others := self._without_others(parts)) is not None:
            parts, forbidden = others, [frozenset()] * len(parts)
        if forbidden is not None and "anyOf" not in schema:
            closed_parts = [
                self._schema(part, group._replace(forbidden=group.forbidden | each, is_alternative=True))
                for part, each in zip(parts, forbidden, strict=True)
            ]
            found["anyOf"] = closed_parts
            return
        found[key] = [self._schema(part, group._replace(is_alternative=key != "allOf")) for part in parts]

    def _exclusive(self, schema: Mapping[str, Any]) -> list[frozenset[str]] | None:
        """Returns the properties that each part of a ``oneOf`` lacks, so that no other matches.

        None where some parts would still match together.
        """
        base = facts_of({key: value for key, value in schema.items() if key != "oneOf"}, self._root)
        facts = [facts_of(part, self._root) for part in schema["oneOf"]]
        if base is None or None in facts:
            return None
        self._count(len(facts) ** 2 // 16)
        known: list[Facts] = [base.joined(each) for each in facts if each is not None]
        found = [set[str]() for _ in known]
        for index, own in enumerate(known):
            for other in known[:index] + known[index + 1 :]:
                if own.excludes(other):
                    continue
                lacking = other.required - own.required
                if not lacking:
                    return None
                found[index].add(min(lacking, key=lambda name: (name in own.properties, name)))
        return [frozenset(each) for each in found]

    def _without_others(self, parts: list[Any]) -> list[Any] | None:
        """Returns the parts of a ``oneOf``, each without the values of the others.

        None where no grammar holds that.
        """
        facts = [facts_of(part, self._root) for part in parts]
        found = []
        for index, part in enumerate(parts):
            negations = [
                negation_of(other, self._root, are_integers=_are_integers(facts[index]))
                for place, other in enumerate(parts)
                if place != index and not _excludes(facts[index], facts[place])
            ]
            if any(each is None for each in negations):
                return None
            found.append(all_of([part, *negations]))
        return found

    def _has_objects(self, parts: Any) -> bool:
        return isinstance(parts, list) and any(names_of(part, self._root) for part in parts)

    def _says_further(self, schema: Mapping[str, Any]) -> bool:
        """Returns whether a schema or a part of it says which further properties there are."""
        parts = parts_of(schema, self._root) if schema.get("properties") else [schema]
        return any(
            any(key in part for key in _SAYS_FURTHER) or part.get("unevaluatedProperties", True) not in (True, False)
            for part in parts
        )

    def _closed_object(
        self,
        found: dict[str, Any],
        schema: Mapping[str, Any],
        group: _Group,
    ) -> dict[str, Any]:
        """Returns an object's schema with its own properties and those of the other parts only."""
        own = found.get("properties") or {}
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        others: dict[str, list[Any]] = {name: [] for name in dict.fromkeys([*own, *required])}
        self._count(len(group.shapes))
        for name, text in sorted(group.shapes):
            is_shown = text and group.is_alternative
            others.setdefault(name, []).extend([self._schema(json.loads(text), _Group())] if is_shown else [])
        properties = {
            name: own[name] if name in own else _any_of(found_shapes)
            for name, found_shapes in others.items()
            if name not in group.forbidden
        }
        return {**found, "properties": properties, "additionalProperties": False}

    def _reference(self, reference: Any, group: _Group) -> Any:
        """Returns a reference to the closed form of a definition in a group."""
        target = target_of(reference, self._root)
        if target is None:
            return reference
        key = (str(reference), group)
        if key not in self._names:
            stem = str(reference).rpartition("/")[2].strip("#") or "root"
            name = stem if stem not in self._defs else f"{stem}_{len(self._names)}"
            self._names[key] = name
            self._defs[name] = True  # it may be in itself
            self._defs[name] = self._schema(target, group)
        return f"#/$defs/{self._names[key].replace('~', '~0').replace('/', '~1')}"


def _excludes(one: Facts | None, other: Facts | None) -> bool:
    return one is not None and other is not None and one.excludes(other)


def _are_integers(facts: Facts | None) -> bool:
    return facts is not None and "number" not in facts.types


def _any_of(schemas: list[Any]) -> Any:
    """Returns a schema whose values follow one of several; any values for none."""
    known = [each for each in schemas if each is not False]
    return {} if len(known) not in range(1, MAX_SHAPES) else known[0] if len(known) == 1 else {"anyOf": known}


def _without_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a closed object without numbers of properties that its names imply."""
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return schema
    if isinstance(schema.get("minProperties"), int) and schema["minProperties"] <= len(schema.get("required") or ()):
        schema = {key: value for key, value in schema.items() if key != "minProperties"}
    found = dict(schema)
    names = [name for name, each in (schema.get("properties") or {}).items() if each is not False]
    parts = []
    if isinstance(least := found.get("minProperties"), int) and math.comb(len(names), least) <= MAX_CHOICES:
        del found["minProperties"]
        sets = itertools.combinations(names, least)
        parts.append(any_of({"required": list(each)} for each in sets))
    if isinstance(most := found.get("maxProperties"), int):
        num_absent = max(0, len(names) - most)
        if math.comb(len(names), num_absent) <= MAX_CHOICES:
            del found["maxProperties"]
            sets = itertools.combinations(names, num_absent)
            parts += [any_of({"properties": dict.fromkeys(each, False)} for each in sets)] if num_absent else []
    if parts:
        found["allOf"] = [*(found.get("allOf") or ()), *parts]
    return found
