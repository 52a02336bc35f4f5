"""JSON schemas in fewer keywords: some are written as parts of a combined schema."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.schema_facts import NO_RULES, PARTS, target_of, types_in
from torchax_serve.sampling.schema_negation import MAX_LEVEL, TYPES, all_of, any_of, is_same, negation_of
from torchax_serve.sampling.schema_patterns import without_look_ahead

MAX_NODES = 40_000
"""Most parts and properties of a schema."""
MAX_POSITIONS = 16
"""Most items of an array with ``contains``: each may be the one that it names."""
MAX_ARRAYS = 400
"""Most arrays without equal items that are listed."""
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
_OF_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_OF_LIST = ("prefixItems", "items", *PARTS)
_OF_PLACE = ("$ref", "if", "dependentSchemas", "dependencies", "contains", "additionalItems")
"""Keywords next to which what is not evaluated is another thing than what is further."""
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
    "minProperties": (0,),
}
"""Values with which a keyword holds nothing back."""
_OF_VALUES = ("enum", "const", "not", "if", "$ref", *PARTS)
"""Keywords that hold ``null`` back beside a list of types that has it."""
_OF_IF = "x-of-if"
"""Key next to a ``not`` that stands for the opposite of an ``if``."""
_UNKNOWN = ("$dynamicRef", "$recursiveRef")


def in_fewer_keywords(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema of the same values, whose references name its own definitions alone.

    It has neither ``if``, ``not``, ``contains``, ``propertyNames`` nor dependencies. Annotations, and keywords that
    hold no value back, are left out. ``nullable: true`` of OpenAPI 3.0, which JSON Schema does not know, adds ``null``.

    Raises:
        InvalidArgumentError: No grammar holds one of these keywords, which it names, or the schema is too large.
    """
    expanded = _Expansion(root).root()
    return _Plain(expanded).root()


class _Counter:
    def __init__(self) -> None:
        self._num_nodes = 0

    def count(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise InvalidArgumentError(f"expected a schema of at most {MAX_NODES} parts and properties, got more")


def _mapped(schema: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a schema with `function` applied to the schemas in it."""
    found = dict(schema)
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: function(each) for name, each in value.items()}
        elif key in _OF_LIST and isinstance(value, list):
            found[key] = [function(each) for each in value]
        elif key in _OF_SCHEMA and isinstance(value, dict):
            found[key] = function(value)
        elif key == "dependencies" and isinstance(value, dict):
            found[key] = {name: each if isinstance(each, list) else function(each) for name, each in value.items()}
    return found


class _Expansion:
    """Writes conditions as ``anyOf``, and moves what references name to definitions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._source, self._counter = root, _Counter()
        self._names: dict[str, str] = {}
        self._defs: dict[str, Any] = {}
        self._anchors = dict(_anchors(root))

    def root(self) -> dict[str, Any]:
        """Returns the schema, with its definitions."""
        found = self._schema(self._source)
        return {**found, "$defs": self._defs} if self._defs else found

    def _schema(self, schema: Any) -> Any:
        self._counter.count()
        if not isinstance(schema, dict):
            return schema
        for key in _UNKNOWN:
            if key in schema:
                raise InvalidArgumentError(f"expected a schema without {key}, got one; write $ref")
        schema = without_look_ahead(_as_meant(schema))
        if "nullable" in schema:
            return self._schema(_with_null(schema))
        found = _mapped(_without_neutral(schema), self._schema)
        parts = [self._reference(found.pop("$ref"))] if "$ref" in found else []
        if "if" in found:
            parts.append(_branches(found.pop("if"), found.pop("then", True), found.pop("else", True)))
        for key in _DEPENDENCIES:
            given = found.get(key)
            if isinstance(given, dict):
                del found[key]
                parts += [_dependency(name, needed) for name, needed in given.items()]
        if parts:
            found["allOf"] = [*(found.get("allOf") or ()), *parts]
        return parts[0] if len(parts) == 1 and list(found) == ["allOf"] and len(found["allOf"]) == 1 else found

    def _reference(self, reference: Any) -> dict[str, Any]:
        """Returns a reference to a definition, which is what the reference names."""
        target = self._target(str(reference))
        if target is None:
            return {"$ref": reference}
        key = str(reference)
        if key not in self._names:
            stem = re.sub(r"[^\w.-]+", "_", key.rpartition("/")[2].strip("#"), flags=re.ASCII) or "root"
            name = stem if stem not in self._defs else f"{stem}_{len(self._names)}"
            self._names[key] = name
            self._defs[name] = True  # it may be in itself
            self._defs[name] = self._schema(target)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _target(self, reference: str) -> Any:
        base = self._source.get("$id") or self._source.get("id")
        if isinstance(base, str) and base.rstrip("#") and reference.startswith(base.rstrip("#")):
            reference = "#" + reference[len(base.rstrip("#")) :].lstrip("#")
        found = self._anchors.get(reference)
        return target_of(unquote(reference), self._source) if found is None else found


def _as_meant(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema without keywords that are null, and with types as JSON Schema names them.

    Serializers of many languages write null for what is not set. Google's interfaces name types in capitals, and
    "any" is what others call a value of any type.
    """
    found = {key: value for key, value in schema.items() if value is not None or key == "const"}
    kinds = types_in(found)
    if kinds is None:
        found.pop("type", None)
    else:
        found["type"] = kinds
    return found


def _with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without ``nullable``, which takes ``null`` as well if it is.

    Tools that people have are often made from descriptions in OpenAPI 3.0, whose authors expect ``null`` there: also
    next to ``enum`` and ``$ref``, where that specification left it open.
    """
    found = {key: value for key, value in schema.items() if key != "nullable"}
    if schema["nullable"] is not True:
        return found
    kinds = found.get("type")
    if kinds is not None and not found.keys() & set(_OF_VALUES):
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return {**found, "type": [*kinds, *(["null"] if "null" not in kinds else [])]}
    definitions: dict[str, Any] = {key: found.pop(key) for key in ("$defs", "definitions") if key in found}
    return {**definitions, "anyOf": [found, {"type": "null"}]} if found else definitions


def _anchors(root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields schemas with names of their own, and the references that name them."""
    waiting: list[Any] = [*root.values()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            if isinstance(name := part.get("$anchor"), str):
                yield f"#{name}", part
            for key in ("$id", "id"):
                if isinstance(name := part.get(key), str):
                    yield name, part


def _branches(condition: Any, then: Any, otherwise: Any) -> Any:
    """Returns a schema by which values follow one of two, as they follow `condition` or not."""
    return any_of([all_of([condition, then]), all_of([{"not": condition, _OF_IF: True}, otherwise])])


def _dependency(name: str, needed: Any) -> dict[str, Any]:
    """Returns a schema by which an object with a property follows another one."""
    rule = {"required": [name, *needed]} if isinstance(needed, list) else {"allOf": [{"required": [name]}, needed]}
    return {"anyOf": [rule, {"properties": {name: False}}]}


class _Plain:
    """Writes what grammars have no keyword for by those that they have."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._source, self._counter = root, _Counter()

    def root(self) -> dict[str, Any]:
        """Returns the schema, with its definitions."""
        defs = self._source.get("$defs")
        found = self._schema({key: value for key, value in self._source.items() if key != "$defs"})
        found = found if isinstance(found, dict) else {} if found else {"not": {}}
        return {**found, "$defs": {name: self._schema(each) for name, each in defs.items()}} if defs else found

    def _schema(self, schema: Any) -> Any:
        self._counter.count()
        if not isinstance(schema, dict):
            return schema
        found, parts = dict(schema), []
        if "not" in found:
            of_if, given = found.pop(_OF_IF, False), found.pop("not")
            negation = negation_of(given, self._source, are_integers=found.get("type") == "integer")
            if negation is None:
                name = "if" if of_if else "not"
                raise InvalidArgumentError(
                    f"expected {name} with a schema whose opposite a grammar can hold, got {json.dumps(given)[:200]}"
                )
            parts.append(negation)
        if "contains" in found:
            parts.append(_with_one(found))
            found = {
                key: value for key, value in found.items() if key not in ("contains", "minContains", "maxContains")
            }
        if "propertyNames" in found:
            found = _with_names(found, self._of_names(found["propertyNames"]))
        if found.get("uniqueItems") is True:
            found = _without_repetition(found, self._source)
        if parts:
            found["allOf"] = [*(found.get("allOf") or ()), *parts]
        return _mapped(found, self._schema)

    def _of_names(self, schema: Any, level: int = 0) -> Any:
        """Returns a schema of texts without references and parts of other types."""
        if not isinstance(schema, dict) or level > MAX_LEVEL:
            return schema
        found = self._schema(schema)
        if isinstance(found, dict) and set(found) <= {"allOf", "anyOf", "$ref"} and len(found) == 1:
            key, value = next(iter(found.items()))
            parts = [target_of(value, self._source)] if key == "$ref" else value
            parts = [self._of_names(each, level + 1) for each in parts]
            known = [each for each in parts if each is not False and _has_texts(each)]
            if len(known) == 1 and (key != "allOf" or len(parts) == 1):
                return known[0]
            if key == "anyOf" and all(isinstance(each, dict) and set(each) - {"type"} <= {"enum"} for each in known):
                return {"enum": [value for each in known for value in each.get("enum", ())]}
        return found


def _has_texts(schema: Any) -> bool:
    """Returns whether a schema is not one of values of other types alone."""
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) and (
        not isinstance(schema, dict) or isinstance(schema.get("const", ""), str)
    )


def _with_one(schema: Mapping[str, Any]) -> Any:
    """Returns a schema of arrays with an item that follows ``contains``, at an early place.

    It is among the first `MAX_POSITIONS`: a grammar lists the places, and has any number of items
    behind them.
    """
    most, item = schema.get("maxItems"), schema["contains"]
    if schema.get("maxContains") is not None or schema.get("minContains", 1) != 1:
        raise InvalidArgumentError("expected contains without minContains and maxContains, got one of them")
    num_places = min(most, MAX_POSITIONS) if isinstance(most, int) else MAX_POSITIONS
    places = [
        {"type": "array", "prefixItems": [True] * place + [item], "minItems": place + 1} for place in range(num_places)
    ]
    return any_of([*places, {"type": [kind for kind in TYPES if kind != "array"]}])


class _Names(NamedTuple):
    """Names of properties that a schema allows.

    Attributes:
        allows: Returns whether it allows a name.
        listed: The names, if they are some; None: those of `pattern`.
        pattern: A regular expression of the names.
    """

    allows: Callable[[str], bool]
    listed: tuple[str, ...] | None
    pattern: str = ""


def _with_names(schema: Mapping[str, Any], allowed: Any) -> dict[str, Any]:
    """Returns a schema of objects whose properties have `allowed` names only."""
    found = {key: value for key, value in schema.items() if key != "propertyNames"}
    names = _names_of(allowed)
    own = found.get("properties") or {}
    further, patterns = found.get("additionalProperties", True), found.get("patternProperties") or {}
    properties = {name: each if names.allows(name) else False for name, each in own.items()}
    if patterns and names.listed is not None:
        found["patternProperties"] = {}
        properties = {name: _of_name(name, own, patterns, further) for name in {**own, **dict.fromkeys(names.listed)}}
        properties = {name: each if names.allows(name) else False for name, each in properties.items()}
    elif patterns and not all(pattern == names.pattern for pattern in patterns):
        raise InvalidArgumentError(
            f"expected propertyNames next to patternProperties of the same pattern, got {_short(patterns)}"
        )
    if not patterns and names.listed is not None:
        properties |= {name: further for name in names.listed if name not in own}
    elif not patterns and further is not False:
        if further is not True and further != {} and any(names.allows(name) for name in own):
            raise InvalidArgumentError(
                "expected propertyNames with a pattern next to properties without additionalProperties, got "
                f"{json.dumps(further)[:200]}; write patternProperties"
            )
        found["patternProperties"] = {names.pattern: further}
    required = [name for name in found.get("required") or () if not names.allows(name)]
    properties |= dict.fromkeys(required, False)
    return {**found, "properties": properties, "additionalProperties": False}


def _of_name(name: str, own: Mapping[str, Any], patterns: Mapping[str, Any], further: Any) -> Any:
    """Returns the schema of the property of a name, by all keywords that are about it."""
    parts = [own[name]] if name in own else []
    try:
        parts += [each for pattern, each in patterns.items() if re.search(pattern, name) is not None]
    except re.error as error:
        raise InvalidArgumentError(f"expected patterns in patternProperties, got another ({error})") from error
    return all_of(parts) if parts else further


def _short(patterns: Mapping[str, Any]) -> str:
    """Returns the patterns in a few characters, for an error."""
    return ", ".join(patterns)[:200]


def _names_of(schema: Any) -> _Names:
    """Returns the names of properties that a schema allows."""
    if schema is True or (isinstance(schema, dict) and set(schema) <= {"type"} and _has_texts(schema)):
        schema = {"minLength": 0}
    rules = {key: value for key, value in schema.items() if key != "type"} if isinstance(schema, dict) else {}
    if schema is False or rules.keys() <= {"enum", "const"}:
        listed = [] if schema is False else [rules["const"]] if "const" in rules else rules.get("enum", [])
        texts = tuple(each for each in listed if isinstance(each, str))
        return _Names(lambda name: name in texts, texts)
    if rules.keys() == {"pattern"}:
        try:
            compiled = re.compile(rules["pattern"])
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(f"expected a pattern in propertyNames, got another ({error})") from error
        return _Names(lambda name: compiled.search(name) is not None, None, rules["pattern"])
    if rules.keys() <= {"minLength", "maxLength"}:
        least, most = rules.get("minLength", 0), rules.get("maxLength", math.inf)
        bound = "" if most == math.inf else most
        return _Names(lambda name: least <= len(name) <= most, None, rf"^[\s\S]{{{least},{bound}}}$")
    raise InvalidArgumentError(
        "expected propertyNames with pattern, enum, const, or minLength and maxLength, got "
        f"{json.dumps(schema)[:200]}; write patternProperties"
    )


def _without_repetition(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Returns a schema of arrays without equal items, which are listed."""
    found = {key: value for key, value in schema.items() if key != "uniqueItems"}
    least, most = found.get("minItems", 0), found.get("maxItems", math.inf)
    if most <= 1:
        return found
    values = _values_of(found.get("items"), root)
    arrays: list[Any] = []
    if values is not None and "prefixItems" not in found:
        lens = range(least, int(min(most, len(values))) + 1)
        if sum(math.perm(len(values), size) for size in lens) <= MAX_ARRAYS:
            arrays = [list(each) for size in lens for each in itertools.permutations(values, size)]
            kept = {key: value for key, value in found.items() if key not in ("items", "minItems", "maxItems")}
            others = [kind for kind in TYPES if kind != "array"]
            return {**kept, "allOf": [*(kept.get("allOf") or ()), any_of([{"enum": arrays}, {"type": others}])]}
    raise InvalidArgumentError(
        f"expected uniqueItems next to items out of a short enum, with at most {MAX_ARRAYS} arrays in all, got others"
    )


def _values_of(schema: Any, root: Any, level: int = 0) -> Sequence[Any] | None:
    """Returns the values that a schema lists or its bounds leave; None for too many."""
    if isinstance(schema, dict) and set(schema) == {"$ref"} and level < MAX_LEVEL:
        return _values_of(target_of(schema["$ref"], root), root, level + 1)
    if not isinstance(schema, dict):
        return [] if schema is False else None
    if "const" in schema and schema.keys() <= {"const", "type"}:
        return [schema["const"]]
    if isinstance(values := schema.get("enum"), list) and schema.keys() <= {"enum", "type"}:
        return _different(values)
    if schema.keys() == {"anyOf"} and level < MAX_LEVEL:
        parts = [_values_of(each, root, level + 1) for each in schema["anyOf"]]
        return None if None in parts else _different([each for part in parts for each in part or ()])
    kind, bounds = schema.get("type"), schema.keys() - {"type"}
    if kind == "integer" and bounds <= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
        return _integers_of(schema)
    if bounds or kind not in ("boolean", "null"):
        return None
    return [True, False] if kind == "boolean" else [None]


def _different(values: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    for value in values:
        kept += [] if any(is_same(value, each) for each in kept) else [value]
    return kept


def _integers_of(schema: Mapping[str, Any]) -> Sequence[int] | None:
    """Returns the integers between the bounds of a schema; None for too many."""
    least = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    least += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    most = [math.floor(schema["maximum"])] if "maximum" in schema else []
    most += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return range(max(least), min(most) + 1) if least and most and min(most) - max(least) < MAX_ARRAYS else None


def _without_neutral(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without keywords that hold no value back."""
    found = {key: value for key, value in schema.items() if key not in NO_RULES}
    for key, values in _NEUTRAL.items():
        if key in found and any(type(found[key]) is type(value) and found[key] == value for value in values):
            del found[key]
    if "if" not in found or not ("then" in found or "else" in found):
        found = {key: value for key, value in found.items() if key not in ("if", "then", "else")}
    if found.get("contains") is True and "minContains" not in found and "maxContains" not in found:
        found = {**found, "minItems": max(1, found.get("minItems", 0))}
        del found["contains"]
    if found.get("minContains") == 0 and "maxContains" not in found:
        found.pop("contains", None)
    if "contains" not in found:
        found = {key: value for key, value in found.items() if key not in ("minContains", "maxContains")}
    if not found.keys() & {*PARTS, *_OF_PLACE}:
        for key, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in found:
                rest = found.pop(key)
                found.setdefault(other, rest)
    if isinstance(found.get("format"), str) and not _knows_format(found["format"]):
        del found["format"]
    return found


@functools.lru_cache(maxsize=256)
def _knows_format(name: str) -> bool:
    """Returns whether grammars can be made of a format of texts."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": name})
    is_error, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
    return not is_error
