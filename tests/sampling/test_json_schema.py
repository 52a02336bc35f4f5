"""Grammars of combined schemas: what they take is valid by jsonschema, and valid objects are taken."""

import decimal
import functools
import itertools
import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling.grammar import json_grammar

TOKENIZER = LLTokenizer("byte")
INTEGER, TEXT = {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["x", "y"]}
ID = {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}
MAIL, PHONE = ({"properties": {key: INTEGER}, "required": [key]} for key in ("mail", "phone"))
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "age": INTEGER}, "required": ["kind"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
KINDS = {"enum": ["car", "bike", "boat"]}
WHEELS = {"type": "object", "properties": {"kind": KINDS, "wheels": INTEGER, "sails": INTEGER}, "required": ["kind"]}
NODE = {"type": "object", "properties": {"value": INTEGER, "next": {"$ref": "#/$defs/node"}}, "required": ["value"]}

MAIL_PATTERN = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"

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
    "if, then and else": (
        {
            **WHEELS,
            "if": {"properties": {"kind": {"const": "boat"}}},
            "then": {"required": ["sails"]},
            "else": {"properties": {"sails": False}, "required": ["wheels"]},
        },
        [{"kind": "boat", "sails": 1}, {"kind": "car", "wheels": 4}, {"kind": "boat", "wheels": 0, "sails": 2}],
        [{"kind": "boat"}, {"kind": "car", "wheels": 4, "sails": 1}, {"kind": "bike"}],
    ),
    "a chain of if": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "required": ["kind"],
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                    "then": {"properties": {name: INTEGER}, "required": [name]},
                }
                for kind, name in [("car", "wheels"), ("boat", "sails"), ("plane", "wings")]
            ],
        },
        [{"kind": "car", "wheels": 4}, {"kind": "boat", "sails": 1}, {"kind": "foot"}, {"kind": "ca"}],
        [{"kind": "car"}, {"kind": "boat", "wings": 1}, {"kind": "plane"}],
    ),
    "if without else": (
        {"type": "integer", "minimum": 0, "maximum": 99, "if": {"minimum": 50}, "then": {"multipleOf": 10}},
        [3, 49, 50, 90],
        [51, 100],
    ),
    "not a value": ({"type": "string", "not": {"enum": ["a", "ab", ""]}}, ["b", "abc", "aa", "\n"], ["a", "ab", ""]),
    "not a number": ({"type": "integer", "minimum": 0, "not": {"enum": [3, 5]}}, [0, 4, 6, 35], [3, 5]),
    "not a type": ({"not": {"type": ["object", "array", "string", "number"]}}, [None, True], [1, "a", [], {}]),
    "not one of several": (
        {**ID, "properties": {"id": INTEGER, "a": INTEGER, "b": INTEGER}, "not": {"anyOf": [{"required": ["a"]}]}},
        [{"id": 1}, {"id": 1, "b": 1}],
        [{"id": 1, "a": 1}],
    ),
    "not a property's value": (
        {"type": "object", "properties": {"a": INTEGER}, "not": {"properties": {"a": {"const": 1}}}},
        [{"a": 2}, {"a": 11}],
        [{"a": 1}, {}],
    ),
    "oneOf of overlapping numbers": (
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 5, "maximum": 20}]},
        [0, 4, 10, 20],
        [5, 9, 21],
    ),
    "oneOf of texts with other beginnings": (
        {"oneOf": [{"type": "string", "pattern": "^https?://.+$"}, {"type": "string", "pattern": "^\\./.+$"}]},
        ["http://a", "./b"],
        ["/b"],
    ),
    "contains": (
        {"type": "array", "items": INTEGER, "contains": {"const": 7}, "maxItems": 3},
        [[7], [1, 7], [1, 7, 7]],
        [[], [1, 2, 3], [1, 2, 3, 7]],
    ),
    "contains in arrays of any length": (
        {"type": "array", "items": INTEGER, "contains": {"const": 7}},
        [[7], [1] * 15 + [7], [1, 7] + [2] * 30],
        [[], [1, 2, 3]],
    ),
    "contains beside a large maxItems": (
        {"type": "array", "items": INTEGER, "contains": {"minimum": 7}, "maxItems": 20},
        [[7], [1, 9] + [2] * 18],
        [[1], [9] + [2] * 20],
    ),
    "not contains": (
        {"type": "array", "items": INTEGER, "not": {"contains": {"minimum": 7}}},
        [[], [1, 6]],
        [[7], [1, 9]],
    ),
    "uniqueItems of bounded integers": (
        {
            "type": "array",
            "items": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0, "maximum": 3}, {"type": "null"}]},
            "uniqueItems": True,
        },
        [[], [1, 2, 3], [None, 3]],
        [[1, 1], [None, None], [0], [4], ["1"]],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["c", "a"], ["b", "c", "a"]],
        [[], ["a", "a"], ["a", "b", "a"], ["d"]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [INTEGER, TEXT], "items": False, "minItems": 1},
        [[1], [1, "x"]],
        [[], ["x"], [1, "x", 1]],
    ),
    "patternProperties": (
        {
            "type": "object",
            "properties": {"a_x": INTEGER},
            "patternProperties": {"^a_": {"type": "integer", "minimum": 5}},
            "additionalProperties": False,
        },
        [{"a_x": 6, "a_y": 7}, {"a_z": 100}],
        [{"a_x": 4}, {"a_y": 4}, {"b": 6}],
    ),
    "propertyNames beside properties": (
        {
            "type": "object",
            "properties": {"ab": INTEGER, "x": INTEGER},
            "propertyNames": {"pattern": "^[a-c]+$"},
        },
        [{"ab": 1}, {"ab": 1, "c": True}],
        [{"x": 1}, {"ab": "c"}, {"d": True}],
    ),
    "propertyNames out of a list": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/name"},
            "additionalProperties": INTEGER,
            "$defs": {"name": {"enum": ["a", "b"]}},
        },
        [{"a": 1}, {"a": 1, "b": 2}, {}],
        [{"c": 1}],
    ),
    "propertyNames out of a list beside patterns": (
        {
            "type": "object",
            "properties": {"ab": {"minimum": 2}, "no": INTEGER},
            "propertyNames": {"enum": ["ab", "b", "c"]},
            "patternProperties": {"b": INTEGER, "^a": {"maximum": 3}},
            "additionalProperties": {"type": "boolean"},
        },
        [{}, {"ab": 2, "b": 7, "c": True}, {"ab": 3}],
        [{"ab": 1}, {"ab": 4}, {"b": True}, {"c": 1}, {"no": 1}, {"bb": 1}],
    ),
    "propertyNames of a length": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER},
        [{"ab": 1}, {"a": 1}],
        [{"abc": 1}],
    ),
    "numbers of properties": (
        {"type": "object", "properties": dict.fromkeys("abcd", INTEGER), "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "d": 1}, {"a": 1, "b": 1, "c": 1}],
        [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}],
    ),
    "unevaluatedProperties with a schema": (
        {**ID, "unevaluatedProperties": {"type": "boolean"}},
        [{"id": 1}, {"id": 1, "z": True}],
        [{"id": 1, "z": 1}],
    ),
    "names of definitions": (
        {
            "$id": "https://a.b/c",
            "type": "object",
            "properties": {"a": {"$ref": "#node"}, "b": {"$ref": "https://a.b/c#/$defs/n%20m"}},
            "$defs": {"n": {"$anchor": "node", **INTEGER}, "n m": TEXT},
            "required": ["a", "b"],
        },
        [{"a": 1, "b": "x"}],
        [{"a": "x", "b": "x"}, {"a": 1, "b": 1}],
    ),
    "dependencies of both kinds": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependencies": {"a": ["b"], "b": MAIL}},
        [{}, {"a": 1, "b": 1, "mail": 1}, {"b": 1, "mail": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "an unknown format": (
        {"type": "object", "properties": {"a": {"type": "string", "format": "phone-number"}}, "required": ["a"]},
        [{"a": "anything"}],
        [{"a": 1}],
    ),
    "look-ahead of pydantic's decimals": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ["1.50", "-3", "0"],
        ["-", ".", "a"],
    ),
    "look-ahead of Zod's addresses": (
        {"type": "string", "format": "email", "pattern": MAIL_PATTERN},
        ["a@b.co", "a.b@c.de"],
        [".a@b.co", "a..b@c.de", "a@b"],
    ),
    "look-ahead of passwords": (
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=[^0-9]*\d)(?![_-])(?!abc)[A-Za-z\d_-]{4,8}$", "maxLength": 6},
        ["Abc1", "1aaA", "ab-cC1"],
        ["abc1", "Abcd", "_Abc1", "abcA1", "Abcdefg1"],
    ),
    "look-ahead for two characters": (
        {"type": "string", "pattern": r"^(?!.*ab)(?!.*\+)[a-c+]{2,5}$"},
        ["aac", "ba", "aacb"],
        ["ab", "caab", "a+c"],
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


@functools.lru_cache(maxsize=4)
def matcher_of(grammar):
    """The matcher of a grammar, of which each text takes a copy: making one takes most of a check's time."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(schema, value):
    """Whether the grammar takes a value, in any order of the members of the outer object."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else [value]
    made = matcher_of(json_grammar(schema))
    for order in orders:
        matcher = made.deep_copy()
        text = json.dumps(dict(order) if isinstance(value, dict) else order, ensure_ascii=False)
        if matcher.consume_tokens(list(text.encode())) and matcher.is_accepting():
            return True
    return False


def has_text(schema, text):
    """Whether the grammar takes a text."""
    matcher = matcher_of(json_grammar(schema)).deep_copy()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def sampled(schema, rng, most=400):
    """A random text of the grammar; None if it does not end."""
    matcher, data = LLMatcher(TOKENIZER, json_grammar(schema), log_level=0), []
    assert not matcher.is_error(), matcher.get_error()
    while not matcher.is_stopped() and len(data) < most:
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        ends = [token for token in allowed if token > 255 or token in b'"}],']
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


# What OpenAPI 3.0 says of null, which jsonschema does not know: (schema of a value, values that it takes, others)
NULLABLE = {
    "type": ({"type": "string", "maxLength": 1}, ["a", None], ["ab", 1]),
    "enum": ({"type": "string", "enum": ["x", "y"]}, ["x", None], ["z"]),
    "const": ({"const": 1}, [1, None], [2]),
    "reference": ({"$ref": "#/$defs/text"}, ["x", None], ["z", 1]),
    "parts": ({"anyOf": [INTEGER, {"type": "boolean"}]}, [1, True, None], ["a"]),
    "all of": ({"allOf": [{"$ref": "#/$defs/text"}]}, ["x", None], ["z"]),
    "object": ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}, None], [{}, []]),
    "list": ({"type": "array", "items": INTEGER, "maxItems": 1}, [[], [1], None], [[1, 2], 1]),
    "not": ({"type": "string", "not": {"enum": ["x"]}}, ["y", None], ["x"]),
    "types": ({"type": ["integer", "null"], "maximum": 9}, [1, None], [10, "a"]),
    "anything": ({"description": "any"}, [1, None, {"a": []}], []),
}


@pytest.mark.parametrize("name", NULLABLE)
@pytest.mark.parametrize("is_nullable", [True, False])
def test_nullable_of_openapi_takes_null(name, is_nullable):
    """``nullable: false``, its default, holds nothing back: what the rest of a schema takes is as it was."""
    own, taken, refused = NULLABLE[name]
    schema = {
        "type": "object",
        "properties": {"v": own | {"nullable": is_nullable}},
        "required": ["v"],
        "$defs": {"text": TEXT},
    }
    plain = schema | {"properties": {"v": own}}
    for value in taken:
        assert takes(schema, {"v": value}) == (takes(plain, {"v": value}) or (is_nullable and value is None)), value
    for value in refused:
        assert not takes(schema, {"v": value}), value


# Schemas as serializers and other interfaces write them: (schema of a value, values that it takes, others)
AS_WRITTEN = {
    "null keywords": (
        {"type": "string", "minLength": None, "maxLength": 2, "pattern": None, "enum": None, "description": None},
        ["ab"],
        ["abc", 1],
    ),
    "null lists": ({"type": "object", "properties": {"a": INTEGER}, "required": None}, [{}, {"a": 1}], [{"a": "x"}]),
    "null properties": ({"type": "object", "properties": None, "anyOf": None}, [{}], [1]),
    "null constant": ({"const": None}, [None], [1]),
    "capitals": ({"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}, [{"a": 1}], [{"a": "x"}, 1]),
    "several capitals": ({"type": ["STRING", "NULL"], "maxLength": 1}, ["a", None], ["ab", 1]),
    "any": ({"type": "any"}, [1, "a", None, [1]], []),
    "any of a list": ({"type": "array", "items": {"type": "any", "description": "x"}}, [[1, "a"]], [1]),
    "names": ({"type": "object", "properties": {"type": {"type": "STRING"}}}, [{"type": "x"}], [{"type": 1}]),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_schemas_are_read_as_they_are_meant(name):
    own, taken, refused = AS_WRITTEN[name]
    schema = {"type": "object", "properties": {"v": own}, "required": ["v"]}
    for value in taken:
        assert takes(schema, {"v": value}), value
    for value in refused:
        assert not takes(schema, {"v": value}), value


def test_an_answer_may_be_null_as_a_whole():
    schema = {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/text"}},
        "$defs": {"text": TEXT | {"nullable": True}},
    }
    assert takes(schema, {"v": None}) and not takes(schema, None)
    assert takes(schema | {"nullable": True}, None) and takes(schema | {"nullable": True}, {"v": "x"})


@pytest.mark.parametrize("name", CASES)
def test_what_is_sampled_is_valid(name):
    schema, rng, num_found = CASES[name][0], random.Random(name), 0
    for _ in range(20):
        if (text := sampled(schema, rng)) is not None:
            jsonschema.validate(json.loads(text), schema)
            num_found += 1
    assert num_found > 3


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "https://other/schema"}, "https://other/schema"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "^(?!a+b)c"}, "look-around"),
        ({"type": "string", "pattern": "^c(?=a)"}, "look-around"),
    ],
)
def test_schemas_that_no_grammar_holds_are_named(schema, said):
    is_error, messages = LLMatcher.validate_grammar_with_warnings(json_grammar(schema))
    assert is_error and said in messages[0]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems next to items out of a short enum"),
        ({"type": "array", "contains": INTEGER, "maxItems": 3, "minContains": 2}, "contains without minContains"),
        ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, 'if with a schema whose opposite .*got {"pattern": "a"}'),
        ({"type": "object", "not": {"properties": {"a": {"multipleOf": 2}}}}, "not with a schema whose opposite"),
        ({"type": "object", "propertyNames": {"pattern": "a", "minLength": 2}}, "propertyNames with pattern, enum"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "patternProperties": {"b": INTEGER}}, "propertyNames"),
        (
            {
                "properties": {"a": INTEGER},
                "propertyNames": {"pattern": "a"},
                "additionalProperties": {"type": "boolean"},
            },
            "propertyNames with a pattern next to properties without additionalProperties",
        ),
        ({"const": 2**53 + 1}, "const: expected integers that are float64 numbers"),
        ({"enum": ["a", {"id": [2**63]}]}, "enum: expected integers that are float64 numbers"),
        ({"type": "integer", "minimum": 10**25}, "minimum: expected a range with numbers within"),
        ({"type": "number", "exclusiveMaximum": -(10**25)}, "exclusiveMaximum: expected a range with numbers within"),
        ({"$dynamicRef": "#node"}, r"a schema without \$dynamicRef, got one; write \$ref"),
    ],
)
def test_keywords_that_no_grammar_holds_are_named(schema, said):
    with pytest.raises(InvalidArgumentError, match=said):
        json_grammar(schema)


FAR = 2**63
RANGES = {
    "of int64": (
        {"type": "integer", "minimum": -FAR, "maximum": FAR - 1},
        [0, 5, 1024 - FAR, FAR - 1],
        [FAR, -FAR - 1],
    ),
    "of uint64": ({"type": "integer", "minimum": 0, "maximum": 2 * FAR - 1}, [0, 7, FAR - 1], [2 * FAR, -1]),
    "from int64's end": ({"type": "integer", "minimum": -FAR}, [0, 10**18, 1024 - FAR], [-FAR - 1]),
    "without the ends": (
        {"type": "integer", "exclusiveMinimum": -FAR - 1, "exclusiveMaximum": FAR},
        [0, FAR - 1, 1024 - FAR],
        [FAR, -FAR - 1],
    ),
    "far from zero": ({"type": "integer", "minimum": 10**18}, [10**18, 10**18 + 7], [10**18 - 1, 1]),
    "far below zero": ({"type": "integer", "maximum": -(10**18)}, [-(10**18), -(10**18) - 7], [1 - 10**18, 1]),
    "beyond float64": (
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
        [2**53 + 2],
        [2**53, 2**53 + 4],
    ),
    "the opposite": ({"type": "integer", "not": {"minimum": 2**53 + 1}}, [0, 2**53], [2**53 + 2, 2**53 + 1]),
    "of float64": ({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}, [0, 0.5, 10**15], [-1]),
    "of a float": ({"type": "number", "minimum": -1e30, "maximum": 1e30}, [-7, 0.5], [10**31]),
    "of any number": ({"minimum": 0, "maximum": FAR - 1}, [5, 0.5], [-1, FAR + 10**4]),
    "constants": ({"enum": [2**60, -(2**60), 10**16]}, [2**60, -(2**60), 10**16], [2**60 + 1, 10**16 + 1]),
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_that_float64_does_not_have(name):
    schema, followed, other = RANGES[name]
    for values, is_valid in ((followed, True), (other, False)):
        for value in values:
            assert jsonschema.Draft202012Validator(schema).is_valid(value) is is_valid
            assert takes(schema, value) is is_valid, value


BOUNDS = {
    "from zero": {"minimum": 0},
    "above zero": {"exclusiveMinimum": 0},
    "up to a float": {"maximum": 1e6},
    "small": {"minimum": -1e-3, "maximum": 2.5e-3},
    "wide": {"minimum": -1e12, "exclusiveMaximum": 1e12},
}


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(number=st.floats(-1e12, 1e12) | st.floats(-3e-3, 3e-3) | st.integers(-(10**7), 10**7))
def test_each_bounded_number_has_a_form_without_an_exponent(name, number):
    """Grammars of ranges have the shortest form of each; numbers without bounds have exponents, too."""
    schema, text = {"type": "number", **BOUNDS[name]}, format(decimal.Decimal(repr(number or 0)), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    assert has_text(schema, text) == jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert has_text({"type": "number"}, text) and has_text({"type": "number"}, "-1.5e-7")
    assert not has_text(schema, "1e-4")


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


@st.composite
def conditions(draw, level=0):
    """Schemas of closed objects, with all keywords that stand for others."""
    names = st.sampled_from("abc")
    value = st.sampled_from([{"const": 1}, {"enum": ["x", 7]}, {"type": "string"}, {"minimum": 2}, {"type": "null"}])
    kinds = ["properties", "required", "minProperties", "maxProperties"]
    if level < 2:
        kinds += ["not", "anyOf", "allOf", "if", "dependentRequired", "dependentSchemas", "oneOf"]
    found = {}
    for key in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True)):
        inner = conditions(level + 1)
        if key == "properties":
            found[key] = draw(st.dictionaries(names, value, min_size=1, max_size=2))
        elif key == "required":
            found[key] = draw(st.lists(names, min_size=1, max_size=2, unique=True))
        elif key in ("minProperties", "maxProperties"):
            found[key] = draw(st.integers(0, 3))
        elif key == "not":
            found[key] = draw(inner)
        elif key == "if":
            found |= {"if": draw(inner), "then": draw(inner), "else": draw(inner)}
        elif key == "dependentRequired":
            found[key] = {draw(names): draw(st.lists(names, max_size=2, unique=True))}
        elif key == "dependentSchemas":
            found[key] = {draw(names): draw(inner)}
        else:
            found[key] = draw(st.lists(inner, min_size=1, max_size=2))
    return found


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(condition=conditions(), data=st.data())
def test_conditions_of_closed_objects_are_held_exactly(condition, data):
    base = {"type": "object", "properties": {name: {"enum": [1, "x", 7, None]} for name in "abc"}}
    schema = {**base, "additionalProperties": False, "allOf": [condition]}
    validator = jsonschema.Draft202012Validator(schema)
    values = data.draw(
        st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([1, "x", 7, None])), min_size=6)
    )
    is_error, messages = LLMatcher.validate_grammar_with_warnings(json_grammar(schema))
    if is_error:
        assert "nsatisfiable" in messages[0] or "oneOf" in messages[0] or "min/maxProperties" in messages[0], messages
        assert "nsatisfiable" not in messages[0] or not any(validator.is_valid(value) for value in values)
        assume(False)
    for value in values:
        assert takes(schema, value) == validator.is_valid(value), value
