"""Answers of gpt-oss by OpenAI's own parser openai-harmony, where it is installed."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from typing import Any

from torchax_serve.server.call_stream import CallPiece, JsonCalls
from torchax_serve.server.parsed_message import MessageWriter, ParsedStep
from torchax_serve.server.response_family import ResponseFamily

logger = logging.getLogger("torchax_serve.server")

ANCHOR = "<|start|>assistant"
"""Text at the end of a prompt, behind which the answer begins."""
FUNCTIONS = "functions."
"""Beginning of the recipient of a call of one of the request's tools."""
_AFTER_HEADER = ("<|message|>", "<|end|>", "<|return|>", "<|call|>")
_MARKER = re.compile(r"(<\|[a-z0-9_]{1,32}\|>)")
_BEGUN_MARKER = re.compile(r"<(?:\|[a-z0-9_]{0,32}\|?)?\Z")


def encoding_for(family: ResponseFamily | None) -> Any | None:
    """Returns the encoding for a family of models.

    None for those whose answers are in another format.
    """
    return load_encoding() if family is not None and family.is_harmony else None


def load_encoding() -> Any | None:
    """Returns the encoding of openai-harmony.

    None, and a line in the log, without the package or its vocabulary.

    The package reads the vocabulary from the folder ``TIKTOKEN_ENCODINGS_BASE`` (`o200k_base.tiktoken`), or fetches it.
    """
    if importlib.util.find_spec("openai_harmony") is None:
        logger.info("answers are read by a response template; pip install openai-harmony for OpenAI's own parser")
        return None
    import openai_harmony

    try:
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except openai_harmony.HarmonyError as error:
        logger.warning(
            "answers are read by a response template, as openai-harmony has no vocabulary (%s); set "
            "TIKTOKEN_ENCODINGS_BASE to a folder with o200k_base.tiktoken",
            error,
        )
        return None


class HarmonyParser:
    """Parses one answer of gpt-oss, piece by piece, as `AnswerParser` does.

    The channel analysis is reasoning, a message to ``functions.NAME`` a call, everything else content. What is not in
    the format is content, too.

    Args:
        encoding: Of `load_encoding`.
        prompt: The prompt's text, which may have begun the answer.
        reads_tools: Whether the request has tools.
        max_tool_calls: As of `AnswerParser`.
    """

    def __init__(self, encoding: Any, prompt: str, *, reads_tools: bool, max_tool_calls: int | None = None) -> None:
        import openai_harmony

        self._encoding = encoding
        self._parser = openai_harmony.StreamableParser(encoding, openai_harmony.Role.ASSISTANT, strict=False)
        self._reads_tools, self._message = reads_tools, MessageWriter(max_tool_calls)
        self._pending = ""  # what may become a marker
        self._raw: list[str] = []  # header of the message so far; of a call its text, too
        self._state = "header"  # or content, start (between two messages), broken
        self._calls: JsonCalls | None = None
        self._name, self._header_len, self._has_calls = "", 0, False
        start = prompt.rpartition(ANCHOR)[2] if ANCHOR in prompt else ""
        self.push(start)
        self._message.drop_held()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._state == "content" and self._calls is None and self._parser.current_channel == "analysis"

    @property
    def is_content(self) -> bool:
        """Whether the text is outside of reasoning, calls and headers now."""
        is_text = self._state == "content" and self._calls is None
        return self._state == "broken" or (is_text and not self.is_reasoning)

    @property
    def has_complete_calls(self) -> bool:
        """Whether the answer has tool calls, and the arguments of each are complete."""
        return self._message.calls_are_complete

    def push(self, text: str) -> ParsedStep:
        """Takes a piece of the answer; returns what became certain."""
        step = ParsedStep()
        text = self._pending + text
        begun = _BEGUN_MARKER.search(text)
        self._pending = "" if begun is None else text[begun.start() :]
        for part in _MARKER.split(text[: len(text) - len(self._pending)]):
            if part:
                self._take(part, step)
        return step

    def flush(self) -> ParsedStep:
        """Returns the rest, after the last piece."""
        step = ParsedStep()
        if self._pending:
            self._take(self._pending, step)
        self._end_message(step)
        self._message.flush(step)
        return step

    def _take(self, part: str, step: ParsedStep) -> None:
        """Takes a marker, or text without one."""
        if self._state == "start" and part.isspace():
            self._raw.append(part)
            return
        if self._state == "broken":
            self._message.add_text("content", part, step)
            return
        text, is_read = self._read(part)
        if self._state == "content":
            if is_read and not text and _MARKER.fullmatch(part):
                self._end_message(step, is_complete=True)
                self._state = "start"
            else:
                self._add(text if is_read else part, step)
            return
        before = "".join(self._raw)
        self._raw.append(part)
        if not is_read:
            self._end_message(step)
            self._state = "broken"
        elif part == "<|start|>":
            self._state = "header"
        elif part in _AFTER_HEADER and self._parser.state.name == "CONTENT":
            self._begin_message()
        elif part in _AFTER_HEADER and self._parser.state.name == "EXPECT_START":
            self._raw = [before]
            self._end_message(step)
            self._state = "start"

    def _read(self, part: str) -> tuple[str, bool]:
        """Lets the parser read a part.

        Returns what it has of it as text of a message, and whether it could.
        """
        import openai_harmony

        found = []
        try:
            for token in self._encoding.encode(part, allowed_special="all"):
                self._parser.process(token)
                found.append(self._parser.last_content_delta or "")
        except openai_harmony.HarmonyError:
            return "", False
        return "".join(found), True

    def _begin_message(self) -> None:
        recipient = self._parser.current_recipient or ""
        self._name = recipient.removeprefix(FUNCTIONS)
        is_call = self._reads_tools and recipient.startswith(FUNCTIONS) and bool(self._name)
        self._calls, self._has_calls = (JsonCalls(self._name) if is_call else None), False
        self._state, self._raw = "content", self._raw if is_call else []
        self._header_len = len(self._raw)

    def _add(self, text: str, step: ParsedStep) -> None:
        """Adds text of the message that is open."""
        if self._calls is None:
            self._message.add_text("reasoning" if self.is_reasoning else "content", text, step)
            return
        self._raw.append(text)
        self._add_pieces(self._calls.push(text), step)

    def _add_pieces(self, pieces: Sequence[CallPiece], step: ParsedStep) -> None:
        self._has_calls = self._has_calls or bool(pieces)
        self._message.add_pieces(pieces, step)

    def _end_message(self, step: ParsedStep, *, is_complete: bool = False) -> None:
        """Adds what of a message is not in the step yet; a call without any text has no arguments."""
        if self._calls is not None and is_complete and not "".join(self._raw[self._header_len :]).strip():
            self._add_pieces([CallPiece(self._name, "{}", is_last=True)], step)
        rest = self._calls.rest if self._calls is not None and self._has_calls else "".join(self._raw)
        self._message.add_text("content", rest, step)
        self._calls, self._raw = None, []
