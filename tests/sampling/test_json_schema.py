"""Grammars of combined schemas: what they take is valid by jsonschema, and valid objects are taken."""

import itertools
import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from torchax_serve.sampling.grammar import json_grammar

TOKENIZER = LLTokenizer("byte")
INTEGER, TEXT = {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["x", "y"]}
ID = {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}
MAIL, PHONE = ({"properties": {key: INTEGER}, "required": [key]} for key in ("mail", "phone"))
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "age": INTEGER}, "required": ["kind"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
NODE = {"type": "object", "properties": {"value": INTEGER, "next": {"$ref": "#/$defs/node"}}, "required": ["value"]}

# (schema, values that it takes, values that it does not take)
CASES = {
    "anyOf beside properties": (
        {**ID, "anyOf": [MAIL, PHONE]},
        [{"id": 1, "mail": 2}, {"id": 1, "phone": 2}, {"id": 1, "mail": 2, "phone": 3}],
        [{"id": 1}, {"mail": 1}, {"id": 1, "other": 1, "mail": 1}],
    ),
    "anyOf of required": (
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}],
    ),
    "oneOf of required": (
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    "oneOf beside properties": (
        {**ID, "oneOf": [MAIL, PHONE]},
        [{"id": 1, "phone": 2}],
        [{"id": 1, "mail": 2, "phone": 3}],
    ),
    "oneOf with a discriminator": (
        {"oneOf": [DOG, CAT]},
        [{"kind": "dog", "age": 3}, {"kind": "cat", "lives": 9}],
        [{"kind": "cow"}],
    ),
    "oneOf of references": (
        {
            "oneOf": [{"$ref": "#/$defs/Dog"}, {"$ref": "#/$defs/Cat"}],
            "$defs": {"Dog": DOG, "Cat": CAT},
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "dog"}],
        [{"kind": "dog", "lives": 1}],
    ),
    "allOf of a base and more": (
        {
            "allOf": [{"$ref": "#/definitions/base"}, {"properties": {"x": TEXT}, "required": ["x"]}],
            "definitions": {"base": ID},
        },
        [{"id": 1, "x": "y"}],
        [{"id": 1}, {"x": "x"}],
    ),
    "allOf beside properties": (
        {**ID, "allOf": [MAIL, {"properties": {"y": TEXT}}]},
        [{"id": 1, "mail": 2, "y": "x"}],
        [{"id": 1, "y": "x"}],
    ),
    "$ref beside properties": (
        {"$defs": {"b": ID}, "$ref": "#/$defs/b", **MAIL},
        [{"id": 1, "mail": 2}],
        [{"mail": 2}],
    ),
    "required alone": (
        {**MAIL, "type": "object", "required": ["mail", "phone"]},
        [{"mail": 1, "phone": [{"a": None}]}],
        [{"mail": 1}],
    ),
    "a recursion": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [{"value": 1, "next": {"value": 2, "next": {"value": 3}}}],
        [{"value": 1, "next": {}}],
    ),
    "a recursion beside properties": (
        {"allOf": [{"$ref": "#/$defs/node"}], "properties": {"top": INTEGER}, "$defs": {"node": NODE}},
        [{"value": 1, "next": {"value": 2}, "top": 1}],
        [{"value": 1, "next": {"value": 2, "top": 1}}],
    ),
    "a reference or null": (
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}], "default": None}},
            "$defs": {"b": ID},
        },
        [{"a": None}, {"a": {"id": 1}}, {}],
        [{"a": 1}],
    ),
    "nested groups": (
        {"allOf": [ID, {"anyOf": [MAIL, {"allOf": [PHONE, {"properties": {"code": TEXT}}]}]}]},
        [{"id": 1, "mail": 1}, {"id": 1, "phone": 1, "code": "x"}],
        [{"id": 1, "code": "x"}],
    ),
    "unevaluatedProperties": (
        {**ID, "allOf": [MAIL], "unevaluatedProperties": False},
        [{"id": 1, "mail": 1}],
        [{"id": 1, "mail": 1, "c": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {"type": "object", "properties": {"a": INTEGER}, "dependentSchemas": {"a": MAIL}},
        [{}, {"a": 1, "mail": 1}],
        [{"a": 1}],
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1, "maxProperties": 5},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": INTEGER},
        [{"abc": 1}, {"a": 1, "b": 2}],
        [{"d": 1}],
    ),
    "not required": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "not": {"required": ["a"]}},
        [{"b": 1}, {}],
        [{"a": 1}],
    ),
    "an unknown format": (
        {"type": "object", "properties": {"a": {"type": "string", "format": "phone-number"}}, "required": ["a"]},
        [{"a": "anything"}],
        [{"a": 1}],
    ),
    "a known format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["today"]),
    "neutral keywords": (
        {
            "type": "array",
            "items": INTEGER,
            "uniqueItems": False,
            "minItems": 1,
            "contains": True,
            "$schema": "https://json-schema.org/draft/2020-12/schema",
        },
        [[1, 1]],
        [[]],
    ),
    "further properties said": (
        {**ID, "additionalProperties": INTEGER, "anyOf": [MAIL, PHONE]},
        [{"id": 1, "mail": 1}, {"id": 1, "phone": 1, "z": 3}],
        [{"id": 1, "z": 1}],
    ),
}


def takes(schema, value):
    """Whether the grammar takes a value, in any order of the members of the outer object."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else [value]
    for order in orders:
        matcher = LLMatcher(TOKENIZER, json_grammar(schema))
        assert not matcher.is_error(), matcher.get_error()
        text = json.dumps(dict(order) if isinstance(value, dict) else order, ensure_ascii=False)
        if matcher.consume_tokens(list(text.encode())) and matcher.is_accepting():
            return True
    return False


def sampled(schema, rng, most=400):
    """A random text of the grammar; None if it does not end."""
    matcher, data = LLMatcher(TOKENIZER, json_grammar(schema)), []
    assert not matcher.is_error(), matcher.get_error()
    while not matcher.is_stopped() and len(data) < most:
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        ends = [token for token in allowed if token in b'"}],' or token > 255]
        token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if token > 255 or not matcher.consume_token(token):
            break
        data.append(token)
    return bytes(data).decode("utf-8", "replace") if matcher.is_accepting() else None


@pytest.mark.parametrize("name", CASES)
def test_combined_schemas_take_what_their_authors_expect(name):
    schema, taken, refused = CASES[name]
    for value in taken:
        jsonschema.validate(value, schema)
        assert takes(schema, value), value
    for value in refused:
        assert not takes(schema, value), value


@pytest.mark.parametrize("name", CASES)
def test_what_is_sampled_is_valid(name):
    schema, rng, num_found = CASES[name][0], random.Random(name), 0
    for _ in range(20):
        if (text := sampled(schema, rng)) is not None:
            value = json.loads(text)
            assert isinstance(value, (list, str, dict)) or "type" not in schema
            jsonschema.validate(value, schema)
            num_found += 1
    assert num_found > 3


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": INTEGER}, "not": {"properties": {"a": {"const": 1}}}}, "not"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "array", "contains": INTEGER}, "contains"),
        ({"if": MAIL, "then": PHONE, "type": "object"}, "if"),
        ({"$ref": "https://other/schema"}, "https://other/schema"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)
def test_schemas_that_no_grammar_holds_are_named(schema, said):
    is_error, messages = LLMatcher.validate_grammar_with_warnings(json_grammar(schema))
    assert is_error and said in messages[0]


LEAVES = st.sampled_from([INTEGER, TEXT, {"type": "boolean"}, {"type": ["null", "integer"]}])
NAMES = "abcd"


@st.composite
def object_parts(draw):
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    found = {"properties": {name: draw(LEAVES) for name in names}}
    if draw(st.booleans()):
        found["type"] = "object"
    if required := draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        found["required"] = required
    return found


@st.composite
def schemas(draw):
    found = {"type": "object"}
    if draw(st.booleans()):
        found |= draw(object_parts()) | {"type": "object"}
    defs = {name: draw(object_parts()) for name in ("first", "second")}
    parts = st.one_of(object_parts(), st.sampled_from([{"$ref": "#/$defs/first"}, {"$ref": "#/$defs/second"}]))
    for key in draw(st.lists(st.sampled_from(["allOf", "anyOf", "oneOf"]), max_size=2, unique=True)):
        found[key] = draw(st.lists(parts, min_size=1, max_size=3))
    if draw(st.integers(0, 3)) == 0:
        found["$ref"] = "#/$defs/first"
    if draw(st.integers(0, 3)) == 0:
        found["minProperties"] = 1
    return {**found, "$defs": defs}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), data=st.data())
def test_random_schemas_take_valid_objects_and_no_others(schema, data):
    is_error, messages = LLMatcher.validate_grammar_with_warnings(json_grammar(schema))
    if is_error:  # no grammar tells the parts of this oneOf apart, or no value follows the schema
        assert "oneOf" in messages[0] or "Unsatisfiable" in messages[0] or "unsatisfiable" in messages[0], messages
        assume(False)
    validator = jsonschema.Draft202012Validator(schema)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    for _ in range(3):
        if (text := sampled(schema, rng, 120)) is not None:
            validator.validate(json.loads(text))
    mentioned = {name for part in [schema, *schema["$defs"].values()] for name in part.get("properties", {})}
    mentioned |= {
        name
        for key in ("allOf", "anyOf", "oneOf")
        for part in schema.get(key, ())
        for name in part.get("properties", {})
    }
    values = st.sampled_from([1, "x", True, None, 7])
    value = data.draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=4))
    if "oneOf" not in schema and value.keys() <= mentioned and validator.is_valid(value):
        assert takes(schema, value) or not _is_expected(schema, value), value


def _is_expected(schema, value):
    """Whether all members of an object are described by the parts that it follows; others may be left out."""
    described = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        described |= set(part.get("properties", {})) | set(part.get("required", ()))
        if "$ref" in part:
            waiting.append(schema["$defs"][part["$ref"].rpartition("/")[2]])
        waiting += part.get("allOf", [])
        waiting += [
            each
            for each in part.get("anyOf", ())
            if jsonschema.Draft202012Validator({**each, "$defs": schema["$defs"]}).is_valid(value)
        ]
    allowed = {name: [] for name in value}
    for name in value:
        allowed[name] = name in described
    return all(allowed.values())
