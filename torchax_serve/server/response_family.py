"""What a family of models writes around reasoning and tool calls, and what families share."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.sampling.thinking_budget import ReasoningMarkers
from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.call_ids import IdForm

MARKER = "marker"
"""Beginning of the names of fields that are texts of the format, and no part of a message."""
CALLS = "tool_calls"
"""Beginning of the names of fields with tool calls, one for each spelling."""
INLINE = f"{CALLS}_inline"
"""Field of calls that stand in other text without a text of the format: only calls of tools of the request are ones."""
SHOWN = "content_"
"""Beginning of the names of fields with content that stands between texts of the format."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names of the field of reasoning."""
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""Call whose name stands in front of its arguments."""
OBJECT = {"type": "function", "function": "{content}"}
"""Call that is one JSON object."""
EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
"""Call of a list, whose items have a name and arguments."""
KEYED = {"type": "function", "function": {"calls": "{content}"}}
"""Calls that are objects, or a list of them, whose one key is the name and whose value are the arguments."""
THINK = ReasoningMarkers("<think>", "</think>")
"""Texts around the reasoning of most families."""
CHATML = "<|im_start|>assistant\n"
"""Beginning of an answer in many families."""
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
        markers: Texts around the reasoning; None where there is none, or its template alone has them.
        tags: Pattern of texts of the format that its template has as patterns.
        tokens: Tokens of its tokenizer, all of them, by which it is recognised as well; empty for none.
        around_calls: Texts around a list of calls, for chat templates that leave them out; None for the common form.
    """

    name: str
    signs: tuple[str, ...]
    template: Mapping[str, Any]
    call: CallForm | None = None
    is_harmony: bool = False
    id_form: IdForm = "any"
    markers: ReasoningMarkers | None = None
    tags: str = ""
    tokens: tuple[str, ...] = ()
    around_calls: tuple[str, str] | None = None

    @property
    def reasoning_markers(self) -> ReasoningMarkers | None:
        """Texts around the reasoning, also where the template alone has them; None without any."""
        if self.markers is not None:
            return self.markers
        fields: Mapping[str, Mapping[str, Any]] = self.template["fields"]
        for name in REASONING:
            opening, closing = (fields.get(name, {}).get(key) for key in ("open", "close"))
            if isinstance(opening, str) and isinstance(closing, str):
                return ReasoningMarkers(opening, closing, is_first=False)
        return None

    def has_text(self, text: str) -> bool:
        """Returns whether a text is one of the format's."""
        return self.is_harmony or text in self._texts or (bool(self.tags) and re.fullmatch(self.tags, text) is not None)

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
        has_regions = any(name.startswith(SHOWN) for name in fields)  # markers stand between messages then
        dropped = CALLS if has_regions else (CALLS, MARKER)
        kept = {name: field for name, field in fields.items() if not name.startswith(dropped)}
        plain = {} if self.markers is None else reasoning(self.markers)
        if plain and kept.get("reasoning", {}).get("open_pattern") == plain["open_pattern"]:
            kept["reasoning"] = plain  # which no call ends
        return {**self.template, "fields": kept}


def reasoning(markers: ReasoningMarkers, call: str = "") -> dict[str, Any]:
    """Returns the field of reasoning that begins an answer, or follows another reasoning.

    The same texts elsewhere in an answer are content.

    Args:
        markers: Texts around the reasoning.
        call: Pattern of a call whose begin ends the reasoning as well; empty for none.
    """
    opening, closing = markers.opening, markers.closing
    begin = rf"(?:{_START}|(?<={re.escape(closing)}))\s*{re.escape(opening)}"
    others = "|".join([*map(re.escape, markers.ends), *([call] if call else [])])
    if not others:
        return {"open_pattern": begin, "close": closing}
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


def content_between(begin: str, end: str) -> dict[str, Any]:
    """Returns the field of content that stands between patterns, wherever they are."""
    return {f"{SHOWN}shown": {"open_pattern": begin, "close_pattern": end, "repeats": True}}


def at_start(pattern: str) -> str:
    """Returns a pattern that matches at the begin of an answer only."""
    return rf"{_START}\s*{pattern}"
