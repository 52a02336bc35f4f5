"""How the server treats each field of a request: honoured, no effect or refused.

A field of a request model is annotated with `honoured`, `no_effect` or `refused`; validation and the tables in
docs/server.md are made from these notes (`field_table`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import pydantic

from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.validation.argument_checks import short_repr

Effect = Literal["honoured", "no effect", "refused"]


class _FailFast(pydantic.FailFast):
    """pydantic's annotation, which has no hash, as unions of annotated types need one."""

    __hash__ = object.__hash__


FAIL_FAST = _FailFast()
"""Annotation of lists whose check ends at the first wrong item: as many errors as items would take seconds."""
Ids = Annotated[list[int], FAIL_FAST]
Strings = Annotated[list[str], FAIL_FAST]
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]
ModelName = Annotated[str, pydantic.BeforeValidator(lambda given: "" if given is None else given)]
"""Name of a model; empty where a request has none."""
MAX_ENTRIES = 1 << 16
"""Most entries of a field that is an object."""
MAX_NAMED = 16
"""Most unknown fields that an error names."""


@dataclasses.dataclass(frozen=True)
class FieldNote:
    """What a field of a request does.

    Attributes:
        effect: Whether the field is honoured, has no effect here, or is refused.
        text: What it does, or why it is refused, for people.
        harmless: Values of a refused field that ask for nothing, and pass.
    """

    effect: Effect
    text: str
    harmless: tuple[Any, ...] = ()

    def refuses(self, given: Any) -> bool:
        """Returns whether a value of the field is refused."""
        return self.effect == "refused" and given is not None and given not in self.harmless


def honoured(text: str) -> FieldNote:
    """Returns the note of a field that does what its interface says."""
    return FieldNote("honoured", text)


def no_effect(text: str) -> FieldNote:
    """Returns the note of a field that is accepted and changes nothing here."""
    return FieldNote("no effect", text)


def refused(text: str, *harmless: Any) -> FieldNote:
    """Returns the note of a field that is refused with 400, but for null and `harmless` values."""
    return FieldNote("refused", text, harmless)


class ApiRequest(pydantic.BaseModel):
    """Base of request bodies, which converts no types and takes no unknown fields.

    Refused fields are named.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    routes: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[frozenset[str]] = frozenset()  # of unions in it, which pydantic writes into paths

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Returns the request in a JSON value.

        Raises:
            ApiError: 400 for a value of another type, an unknown field, or one that is refused.
        """
        if not isinstance(value, dict):
            raise bad_request(f"expected a JSON object, got {json_kind(value)}")
        takes_unknown = cls.model_config.get("extra") == "allow"
        found: list[ApiError] = []
        if not takes_unknown and (unknown := [name for name in value if name not in cls.model_fields]):
            found.append(_unknown_fields(unknown, list(cls.model_fields)))
            value = {name: given for name, given in value.items() if name in cls.model_fields}
        value = with_integers(cls, value)
        notes = notes_of(cls)
        if wrong := [name for name, note in notes.items() if note.refuses(value.get(name))]:
            message = "; ".join(f"{name}: {notes[name].text}" for name in wrong)
            found.append(bad_request(message, wrong[0], "unsupported_parameter"))
        for name, given in value.items():
            if isinstance(given, dict) and len(given) > MAX_ENTRIES:
                message = f"{name}: expected at most {MAX_ENTRIES} entries, got {len(given)}"
                raise bad_request(message, name, "invalid_value")
        try:
            request = cls.model_validate(value)
        except pydantic.ValidationError as error:
            found += _invalid_fields(error, cls.tags)
        if found:
            raise _joined(found) from None
        return request


def with_integers(model: type[pydantic.BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with integers in fields that take them, in place of 16.0.

    Some languages have one type of numbers, and to JSON Schema these are integers.
    """
    names = [name for name in _integer_fields(model) if isinstance(value.get(name), float)]
    return {**value, **{name: int(value[name]) for name in names if value[name].is_integer()}} if names else value


@functools.cache
def _integer_fields(model: type[pydantic.BaseModel]) -> tuple[str, ...]:
    """Returns the fields of a model that take integers, and no other numbers."""
    kinds = {name: {info.annotation, *get_args(info.annotation)} for name, info in model.model_fields.items()}
    return tuple(name for name, each in kinds.items() if int in each and float not in each)


def notes_of(model: type[ApiRequest]) -> dict[str, FieldNote]:
    """Returns the note of each field of a request model.

    Raises:
        KeyError: A field has none.
    """
    found = {}
    for name, info in model.model_fields.items():
        note = next((each for each in info.metadata if isinstance(each, FieldNote)), None)
        if note is None:
            raise KeyError(f"{model.__name__}.{name}: expected honoured(...), no_effect(...) or refused(...)")
        found[name] = note
    return found


def field_table(model: type[ApiRequest], left_out: Container[str] = ()) -> str:
    """Returns the fields of a request model as a table in Markdown, without `left_out`."""
    notes = {name: note for name, note in sorted(notes_of(model).items()) if name not in left_out}
    return table_of(notes)


def table_of(notes: Mapping[str, FieldNote]) -> str:
    """Returns notes of fields as a table in Markdown, a row for those with the same note.

    Rows say of fields that are not honoured that they have no effect, or are refused.
    """
    prefixes = {"honoured": "", "no effect": "no effect: ", "refused": "refused: "}
    names: dict[str, list[str]] = {}
    for name, note in notes.items():
        names.setdefault(prefixes[note.effect] + note.text, []).append(f"`{name}`")
    rows = [f"| {', '.join(same)} | {text} |" for text, same in names.items()]
    return "\n".join(["| Field | Meaning |", "|---|---|", *rows])


def json_kind(value: Any) -> str:
    """Returns the kind of a JSON value in words, for errors."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _unknown_fields(names: list[str], known: list[str]) -> ApiError:
    """Returns the answer to fields that are not known, all of them by name."""
    shown = ", ".join(short_repr(name) for name in names[:MAX_NAMED])
    if len(names) > 1:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return bad_request(f"unknown fields {shown}{more}; leave them out", names[0][:100], "unknown_parameter")
    near = difflib.get_close_matches(names[0][:100], known, 1)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    return bad_request(f"unknown field {shown}; {remedy}", names[0][:100], "unknown_parameter")


def _joined(errors: list[ApiError]) -> ApiError:
    """Returns one answer to several errors, with the field and code of the first."""
    message = "; ".join(error.message for error in errors[:MAX_NAMED])
    return bad_request(message, errors[0].param, errors[0].code)


def _invalid_fields(error: pydantic.ValidationError, tags: frozenset[str]) -> list[ApiError]:
    """Returns the answers to errors of pydantic, one for each field, in their order."""
    errors = error.errors(include_url=False)
    found: dict[str, ApiError] = {}  # by the field; members of a union have an error each
    unknown = [_path(_without_tags(each["loc"], tags)) for each in errors if each["type"] == "extra_forbidden"]
    for each in errors:
        is_unknown = each["type"] == "extra_forbidden"
        name = _path(_without_tags(each["loc"], tags))
        found.setdefault(
            "" if is_unknown else name, _unknown_fields(unknown, []) if is_unknown else _invalid(name, each)
        )
    return list(found.values())


def _invalid(name: str, first: Any) -> ApiError:
    """Returns the answer to one error of pydantic: the path of the field, expected, got."""
    if first["type"] == "missing":
        return bad_request(f"{name}: expected a value, got none", name, "missing_required_parameter")
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        message = f"{name}.type: expected one of {context['expected_tags']}, got {short_repr(context['tag'])}"
        return bad_request(message, name, "invalid_value")
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return bad_request(f"{name}: expected {expected}, got {short_repr(first['input'])}", name or None, "invalid_value")


def _without_tags(parts: tuple[int | str, ...], tags: frozenset[str]) -> tuple[int | str, ...]:
    """Returns a path without the tags of unions.

    They stand between the number of an item and its field.
    """
    is_tag = [
        0 < index < len(parts) - 1 and part in tags and isinstance(parts[index - 1], int)
        for index, part in enumerate(parts)
    ]
    return tuple(part for part, is_left_out in zip(parts, is_tag, strict=True) if not is_left_out)


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "dict", "list"})


def _path(parts: tuple[int | str, ...]) -> str:
    """Returns a field's path such as ``stop[2]``.

    It ends in front of the name that pydantic gives a member of a union.
    """
    path = ""
    for part in parts:
        if isinstance(part, str) and (part in _TYPE_NAMES or not part.isidentifier()):
            break
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")[:200]
