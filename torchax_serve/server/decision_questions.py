"""Typed questions about a state: their texts in prompts, and answers by probabilities."""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pydantic

from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.image_files import decode_image
from torchax_serve.validation.argument_checks import short_repr

MAX_ASSETS = 4
"""Most images of a request, as in the other servers with this interface."""
MAX_QUESTIONS = 64
"""Most questions of a request, as in the other servers with this interface."""
YES_NO = ("Yes", "No")
LETTERS = tuple(string.ascii_uppercase)
"""Labels of options and levels, and so the most that a question has."""
Content = str | dict[str, Any] | list[Any]
"""A text, or JSON that stands in the prompt as its text."""
_SIDES = ("true", "false")


class QuestionFields(pydantic.BaseModel):
    """A question as a request has it."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    type: Literal["choice", "noul", "score"]
    instructions: Content | None = None
    criteria: dict[str, Content | None] | list[Content] | None = None


class ImageAsset(pydantic.BaseModel):
    """An image as a request has it; its bytes say what format they have."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    type: Literal["image"] = "image"
    format: str | None = None
    data_base64: str


class Option(NamedTuple):
    """An answer that a question allows.

    Attributes:
        name: How the answer names it.
        label: What the model would write for it.
        description: What it means; None where nothing is said.
    """

    name: str
    label: str
    description: Content | None


class Question(NamedTuple):
    """A question, checked.

    Attributes:
        name: Name in the request and in the answer.
        kind: ``choice`` of one option, ``noul`` (yes or no), or ``score`` on an ordered scale.
        instructions: What is asked.
        options: Answers that it allows, in the order of the request.
    """

    name: str
    kind: str
    instructions: Content | None
    options: tuple[Option, ...]

    @property
    def text(self) -> str:
        """Text of the question in a prompt: what is asked, the options, and in what form to answer."""
        lines = [text_of(self.instructions), *(self._line(option) for option in self.options)]
        return "\n".join(filter(None, lines)) + f"\n{self._demand()}"

    def _line(self, option: Option) -> str:
        """Returns the line of an option; empty where its label says everything."""
        description = text_of(option.description)
        if self.kind == "noul":
            return f"{option.label}: {description}" if description else ""
        if self.kind == "choice" and description:
            return f"{option.label}. {option.name}: {description}"
        return f"{option.label}. {description or option.name}"

    def _demand(self) -> str:
        first, last = self.options[0].label, self.options[-1].label
        if self.kind == "noul":
            return f"Answer {first} or {last} only."
        what = "option" if self.kind == "choice" else "level"
        return f"Answer with the letter of the {what} that fits best ({first} to {last}) only."

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """Returns the answer by the probabilities of the options, which are 1 together."""
        number = len(probabilities)
        best = max(range(number), key=probabilities.__getitem__)
        found: dict[str, Any] = {"type": self.kind}
        if self.kind == "noul":
            found |= {"noul": probabilities[0], "probabilities": dict(zip(("yes", "no"), probabilities, strict=True))}
            return found | {"confidence": _above_chance(probabilities[best], number)}
        by_name = dict(zip((option.name for option in self.options), probabilities, strict=True))
        if self.kind == "choice":
            found |= {"choice": self.options[best].name, "probabilities": by_name}
            return found | {"confidence": _above_chance(probabilities[best], number)}
        levels = range(number)
        distance = sum(
            probability * abs(level - best) for level, probability in zip(levels, probabilities, strict=True)
        )
        of_chance = sum(abs(level - (number - 1) / 2) for level in levels) / number
        return found | {
            "score": sum(level * probability for level, probability in zip(levels, probabilities, strict=True)),
            "legend": {option.name: option.description for option in self.options},
            "probabilities": by_name,
            "confidence": max(0.0, 1 - distance / of_chance),
        }


def questions_of(given: Mapping[str, Any]) -> list[Question]:
    """Returns the questions of a request in their order.

    Raises:
        ApiError: 400 for none, too many, or one that is not valid.
    """
    if not 1 <= len(given) <= MAX_QUESTIONS:
        message = f"questions: expected 1 to {MAX_QUESTIONS}, got {len(given)}"
        raise bad_request(message, "questions", "invalid_value")
    return [_question(name, fields) for name, fields in given.items()]


def text_of(content: Content | None) -> str:
    """Returns the text of a content in a prompt; empty for none."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


def check_assets(assets: Mapping[str, ImageAsset], texts: Sequence[str]) -> None:
    """Raises ApiError, 400, for too many images, one that no text names, or one that is none."""
    if len(assets) > MAX_ASSETS:
        raise bad_request(f"assets: expected at most {MAX_ASSETS}, got {len(assets)}", "assets", "invalid_value")
    for name, asset in assets.items():
        where = f"assets[{short_repr(name)}]"
        if not name or not any(name in text for text in texts):
            message = f"{where}: expected a name that stands in the state or a question, got one that does not"
            raise bad_request(message, "assets", "invalid_value")
        try:
            decode_image(base64.b64decode(asset.data_base64, validate=True), where)
        except ValueError as error:
            raise bad_request(f"{where}.data_base64: expected base64, got something else", "assets") from error


def parts_of(text: str, assets: Mapping[str, ImageAsset]) -> list[dict[str, Any]]:
    """Returns the parts of a message, with images in place of their names in a text."""
    names = sorted(assets, key=len, reverse=True)  # of two names that begin alike the longer one is meant
    found: list[dict[str, Any]] = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", text):
        if piece in assets:
            found.append({"type": "image_url", "image_url": f"data:image;base64,{assets[piece].data_base64}"})
        elif piece:
            found.append({"type": "text", "text": piece})
    return found


def _question(name: str, given: Any) -> Question:
    if not name:
        raise bad_request("questions: expected names of at least one character, got an empty one", "questions")
    where = f"questions[{short_repr(name)}]"
    if not isinstance(given, dict):
        raise _invalid(where, f"an object with type, instructions and criteria, got {short_repr(given)}")
    try:
        fields = QuestionFields.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        part = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise _invalid(where, f"type, instructions and criteria alone, got {short_repr(part)}") from None
        expected = first["msg"].removeprefix("Input should be ")
        raise _invalid(f"{where}.{part}", f"{expected}, got {short_repr(first['input'])}") from None
    return Question(name, fields.type, fields.instructions, tuple(_options(fields, f"{where}.criteria")))


def _options(fields: QuestionFields, where: str) -> list[Option]:
    criteria = fields.criteria
    if fields.type == "noul":
        sides = {} if criteria is None else criteria
        if not isinstance(sides, dict) or not set(sides) <= set(_SIDES):
            raise _invalid(where, f"null, or descriptions of true and false, got {short_repr(criteria)}")
        return [Option(side, label, sides.get(side)) for side, label in zip(_SIDES, YES_NO, strict=True)]
    if fields.type == "choice":
        if not isinstance(criteria, dict) or not 1 <= len(criteria) <= len(LETTERS):
            raise _invalid(where, f"1 to {len(LETTERS)} options with a description or null each, got {_size(criteria)}")
        named = zip(criteria.items(), LETTERS, strict=False)
        return [Option(name, label, description) for (name, description), label in named]
    if not isinstance(criteria, list) or not 2 <= len(criteria) <= len(LETTERS):
        raise _invalid(where, f"a list of 2 to {len(LETTERS)} levels, the lowest one first, got {_size(criteria)}")
    levels = enumerate(zip(criteria, LETTERS, strict=False))
    return [Option(str(level), label, description) for level, (description, label) in levels]


def _size(criteria: Any) -> str:
    """Returns what criteria are, in short."""
    return "none" if criteria is None else f"{'options' if isinstance(criteria, dict) else 'a list'} of {len(criteria)}"


def _above_chance(probability: float, number: int) -> float:
    """Returns how far a probability is from chance (0) to certainty (1), among so many options."""
    return 1.0 if number == 1 else max(0.0, (probability - 1 / number) / (1 - 1 / number))


def _invalid(where: str, message: str) -> ApiError:
    return bad_request(f"{where}: expected {message}", "questions", "invalid_value")
