"""What a family of models writes around reasoning and tool calls, and what families share."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.call_ids import IdForm

MARKER = "marker"
"""Beginning of the names of fields that are texts of the format, and no part of a message."""
CALLS = "tool_calls"
"""Beginning of the names of fields with tool calls, one for each spelling."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names of the field of reasoning."""
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""Call whose name stands in front of its arguments."""
OBJECT = {"type": "function", "function": "{content}"}
"""Call that is one JSON object."""
_START = r"(?<![\s\S])"


@dataclasses.dataclass(frozen=True)
class ResponseFamily:
    """Answers of a family of models.

    Attributes:
        name: Name of the family.
        signs: Texts that its chat template has, all of them.
        template: Response template of transformers.
        call: How calls are spelled, for answers held to them; None if they cannot be.
        is_harmony: Whether openai-harmony parses the answers, where it is installed.
        id_form: Form of the ids of calls.
        thoughts: Texts around the reasoning, where it is at the begin of an answer; None elsewhere.
    """

    name: str
    signs: tuple[str, ...]
    template: Mapping[str, Any]
    call: CallForm | None = None
    is_harmony: bool = False
    id_form: IdForm = "any"
    thoughts: tuple[str, str] | None = None

    def has_text(self, text: str) -> bool:
        """Returns whether a text is one of the format's."""
        return self.is_harmony or text in self._texts

    @functools.cached_property
    def _texts(self) -> str:
        return json.dumps(self.template, ensure_ascii=False).replace("\\", "")  # without escapes of patterns

    @property
    def reads_calls(self) -> bool:
        """Whether the template has tool calls."""
        return any(name.startswith(CALLS) for name in self.template["fields"])

    def without_calls(self) -> Mapping[str, Any]:
        """Returns the template for requests without tools, in whose answers nothing is a call."""
        fields = self.template["fields"]
        if "open" in fields.get("content", {}) or "open_pattern" in fields.get("content", {}):
            return self.template  # what is outside of its texts is dropped
        kept = {name: field for name, field in fields.items() if not name.startswith((CALLS, MARKER))}
        return {**self.template, "fields": kept}


def reasoning(opening: str, closing: str, *, ends: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the field of reasoning that begins an answer, or follows another reasoning.

    The same texts elsewhere in an answer are content.

    Args:
        opening, closing: Texts around it.
        ends: Texts that end it as well, and are no part of it.
    """
    begin = rf"(?:{_START}|(?<={re.escape(closing)}))\s*{re.escape(opening)}"
    if not ends:
        return {"open_pattern": begin, "close": closing}
    others = "|".join(map(re.escape, ends))
    return {"open_pattern": begin, "close_pattern": rf"{re.escape(closing)}|(?={others})"}


def fields(
    tool_calls: Sequence[Mapping[str, Any]],
    thoughts: Mapping[str, Any] | None = None,
    markers: Sequence[str | re.Pattern[str]] = (),
) -> dict[str, Any]:
    """Returns the fields of a response template.

    Args:
        tool_calls: A field for each spelling of calls.
        thoughts: Field of the reasoning, if there is one.
        markers: Texts, or patterns of texts, that are no part of a message.
    """
    found: dict[str, Any] = {"content": {}}
    for index, marker in enumerate(markers):
        opening = {"open": marker} if isinstance(marker, str) else {"open_pattern": marker.pattern}
        found[f"{MARKER}_{index}"] = {**opening, "close_pattern": r"(?=[\s\S])", "repeats": True}
    if thoughts is not None:
        found["reasoning"] = dict(thoughts)
    for index, field in enumerate(tool_calls):
        found[f"{CALLS}_{index}" if index else CALLS] = {"repeats": True, **field}
    return found


def at_start(pattern: str) -> str:
    """Returns a pattern that matches at the begin of an answer only."""
    return rf"{_START}\s*{pattern}"
