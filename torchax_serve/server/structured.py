"""Structured output: the grammar that a request asks for, as in OpenAI and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.sampling.grammar import (
    GrammarCompiler,
    GrammarMasks,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from torchax_serve.server import require_packages
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.options import RequestLimits
from torchax_serve.server.schemas import TextRequest
from torchax_serve.server.structural_tag import structural_tag_grammar
from torchax_serve.validation.argument_checks import short_repr

MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FLAGS = ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""Options that ask for nothing where they are false; of these `json_object` alone can be had."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class _Asked(NamedTuple):
    """What the answer is to be held to, and where the request says so."""

    field: str
    kind: str
    value: Any

    @property
    def path(self) -> str:
        """The field, and the key in it; names of the older fields have both."""
        return self.field if self.field in _GUIDED else f"{self.field}.{self.kind}"


class Grammar(NamedTuple):
    """A grammar, and the field of the request that asked for it."""

    field: str
    text: str


def masks_of(
    compiler: Callable[[], GrammarCompiler],
    grammar: Grammar | None,
    after: Callable[[Sequence[int]], Callable[[Sequence[int]], int | None] | None] = lambda _: None,
) -> Callable[[Sequence[int]], GrammarMasks] | None:
    """Returns a function that makes the masks of one answer to a prompt; None without a grammar.

    Args:
        compiler: Returns the compiler of grammars.
        grammar: Of `grammar_of`.
        after: Returns, for a prompt's tokens, `after` of `torchax_serve.sampling.grammar.GrammarMasks`.

    Raises:
        ApiError: 400 for a grammar that cannot be compiled.
    """
    if grammar is None:
        return None
    try:
        found = compiler()
        found.masks(grammar.text)  # compiles it; it is stored
    except (InvalidArgumentError, UnsupportedModelError) as error:
        raise bad_request(f"{grammar.field}: {error}", grammar.field, "invalid_value") from error
    return lambda prompt_ids: found.masks(grammar.text, after(prompt_ids))()


def grammar_of(request: TextRequest, limits: RequestLimits) -> Grammar | None:
    """Returns the grammar that the answer is held to; None for any answer.

    Raises:
        ApiError: 400 for several of them, or for one that is not valid in its form.
    """
    found = [each for each in _asked(request) if each is not None]
    if not found:
        return None
    if len(found) > 1:
        first, second, *_ = found
        message = f"expected one grammar of the answer, got {second.path} next to {first.path}; leave one out"
        raise bad_request(f"{second.field}: {message}", second.field, "invalid_value")
    require_packages("llguidance")
    if request.ignore_eos:
        raise bad_request(
            "ignore_eos: expected false with structured output, which ends", "ignore_eos", "invalid_value"
        )
    field, kind, value = found[0]
    try:
        size = len(value) if isinstance(value, str) else len(json.dumps(value))
        if size > limits.max_schema_bytes:
            raise bad_request(
                f"{field}: expected at most {limits.max_schema_bytes} bytes, got {size}", field, "invalid_value"
            )
        return Grammar(field, _grammar(kind, value))
    except ApiError:
        raise
    except (InvalidArgumentError, ValueError, TypeError, AssertionError, KeyError) as error:
        raise bad_request(f"{field}: expected a valid {kind}, got another ({error})", field, "invalid_value") from error


def _asked(request: TextRequest) -> list[_Asked | None]:
    """Returns everything that the answer is to be held to."""
    found = [_of_response_format(request.response_format)]
    for name in _GUIDED:
        value = getattr(request, name)
        found.append(None if value is None else _Asked(name, name.removeprefix("guided_"), value))
    for name, value in (request.structured_outputs or {}).items():
        if value is None or (name in _FLAGS and value is False):
            continue
        if name not in _KINDS:
            raise bad_request(
                f"structured_outputs: expected one of {', '.join(_KINDS)}, got {name[:60]!r}",
                "structured_outputs",
                "invalid_value",
            )
        found.append(_Asked("structured_outputs", name, value))
    return found


_FORMAT_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
}
"""Keys of `response_format` next to ``type``."""
_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def _check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ApiError, 400, for keys that are none of `known`; null asks for nothing."""
    if unknown := [key for key, value in given.items() if key not in known and value is not None]:
        shown = ", ".join(short_repr(key) for key in unknown[:16])
        expected = ", ".join(known)
        message = f"{where}: expected keys out of {expected}, got {shown}; leave it out"
        raise bad_request(message, "response_format", "unknown_parameter")


def _of_response_format(given: Mapping[str, Any] | None) -> _Asked | None:
    if given is None:
        return None
    kind: Any = given.get("type")
    if isinstance(kind, str) and kind in _FORMAT_KEYS:
        _check_keys("response_format", given, ("type", *_FORMAT_KEYS[kind]))
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        if schema is not None and not isinstance(schema, dict):
            message = "response_format.schema: expected a JSON schema, got another value"
            raise bad_request(message, "response_format", "invalid_value")
        if schema is not None:
            return _Asked("response_format", "json_schema", schema)
        return _Asked("response_format", "json_object", True)
    if kind == "json_schema":
        inner = given.get("json_schema")
        if isinstance(inner, dict):
            _check_keys("response_format.json_schema", inner, _SCHEMA_KEYS)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise bad_request(
                "response_format.json_schema.schema: expected a JSON schema, got none",
                "response_format",
                "invalid_value",
            )
        return _Asked("response_format", "json_schema", schema)
    if kind == "structural_tag":
        return _Asked("response_format", "structural_tag", given)
    raise bad_request(
        "response_format.type: expected text, json_object, json_schema or structural_tag, got another",
        "response_format",
        "invalid_value",
    )


def _grammar(kind: str, value: Any) -> str:
    if kind == "json_object":
        return json_grammar(ANY_OBJECT)
    if kind in ("json", "json_schema"):
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object")
        return json_grammar(schema)
    if kind == "choice":
        is_list = isinstance(value, list) and 1 <= len(value) <= MAX_CHOICES
        if not is_list or not all(isinstance(each, str) and each for each in value):
            raise ValueError(f"choices are 1 to {MAX_CHOICES} texts")
        return choice_grammar(value)
    if kind == "structural_tag":
        return structural_tag_grammar(json.loads(value) if isinstance(value, str) else value)
    if not isinstance(value, str) or not value:
        raise ValueError("it is a text")
    return regex_grammar(value) if kind == "regex" else lark_grammar(value)
