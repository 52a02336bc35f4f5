"""Training rows: chats and texts as token ids, and which tokens are learned."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import ChatTemplateError, InvalidArgumentError
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.text.messages import checked_conversation
from torchax_serve.text.template_renderer import TemplateJob, shared_renderer

Span = tuple[int, int]
"""First character of a piece of text, and the one after its last."""
MAX_RENDERINGS = 64
"""Conversations of one job of the template renderer: a job has a time limit of seconds."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A row of the data.

    Attributes:
        token_ids: Its tokens.
        learned: For each token whether the model learns to predict it.
    """

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class RowChecks:
    """What rows of the data must satisfy.

    Attributes:
        max_len: Most tokens of a row.
        answers: "all" answers of the assistant are learned, or the "last".
    """

    max_len: int
    answers: str


def read_rows(data: str | os.PathLike[str] | Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the rows of a JSONL file, or of an iterable of dicts.

    Each has either ``messages``, and perhaps ``tools``, as OpenAI's format of fine-tuning has them, or ``text``.

    Raises:
        InvalidArgumentError: a file that is not readable, or rows of another form; says which.
    """
    if isinstance(data, str | os.PathLike):
        rows = _read_file(Path(data))
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(data, 1)]
    for name, row in rows:
        _check_row(name, row)
    if not rows:
        raise InvalidArgumentError("data: expected at least one row, got none; add conversations")
    return [dict(row) for _, row in rows]


def _read_file(file: Path) -> list[tuple[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"data: expected a JSONL file in UTF-8, got {file} ({error})") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{file}: line {number}", json.loads(line)))
            except ValueError as error:
                raise InvalidArgumentError(f"{file}: line {number}: expected JSON, got {line[:40]!r}") from error
    return rows


def _check_row(name: str, row: Any) -> None:
    if not isinstance(row, Mapping) or ("messages" in row) == ("text" in row):
        raise InvalidArgumentError(
            f'{name}: expected {{"messages": [...]}} or {{"text": "..."}}, got '
            f"{sorted(row) if isinstance(row, Mapping) else type(row).__name__}"
        )
    known = {"messages", "tools"} if "messages" in row else {"text"}
    if unknown := sorted(set(row) - known):
        raise InvalidArgumentError(
            f"{name}: expected the keys {', '.join(sorted(known))}, got {unknown[0]!r}; remove it"
        )
    if "text" in row and not (isinstance(row["text"], str) and row["text"]):
        raise InvalidArgumentError(f"{name}: text: expected a string that is not empty, got {row['text']!r}")


def digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the SHA-256 of rows, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def encode_rows(tokenizer: Any, name: str, rows: Sequence[Mapping[str, Any]], checks: RowChecks) -> list[Example]:
    """Returns the examples of rows.

    Args:
        tokenizer: A fast tokenizer of transformers, with a chat template for conversations.
        name: Name of the model, for errors.
        rows: As `read_rows` returns them.
        checks: Limits.

    Raises:
        InvalidArgumentError: a row that is too long, or without a token to learn.
        ChatTemplateError: the template does not render a row, or does not end a text as it begins it.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidArgumentError(f"{name}: expected a fast tokenizer, which knows the text of its tokens, got none")
    examples = []
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        is_learned: Callable[[Span], bool]
        if "text" in row:
            text, is_learned = row["text"], functools.partial(_is_within, [(0, len(row["text"]))])
            encoded = tokenizer(text, return_offsets_mapping=True)  # with the special tokens of a text
        else:
            text, is_learned = _rendered(tokenizer, name, where, row, checks.answers)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoded["input_ids"])
        learned = tuple(is_learned(offsets) for offsets in encoded["offset_mapping"])
        if "text" in row and tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
            ids, learned = (*ids, tokenizer.eos_token_id), (*learned, True)
        if len(ids) > checks.max_len:
            raise InvalidArgumentError(
                f"{where}: expected at most {checks.max_len} tokens (seq_len), got {len(ids)}; raise seq_len, or "
                "shorten the row"
            )
        if not any(learned[1:]):
            raise InvalidArgumentError(f"{where}: expected a token to learn, got none; give the assistant an answer")
        examples.append(Example(ids, learned))
    return examples


def _is_within(spans: Sequence[Span], offsets: Span) -> bool:
    begin, end = offsets
    return begin < end and any(first <= begin and end <= last for first, last in spans)


def _overlaps(spans: Sequence[Span], offsets: Span) -> bool:
    begin, end = offsets
    return begin < end and any(begin < last and first < end for first, last in spans)


def _rendered(
    tokenizer: Any, name: str, where: str, row: Mapping[str, Any], answers: str
) -> tuple[str, Callable[[Span], bool]]:
    """Returns the text of a conversation, and which tokens are learned.

    These are given by their first and last character.

    What is learned is inside the template's tags ``{% generation %}``, by the rule of transformers'
    ``return_assistant_tokens_mask``. A template without them writes an answer where its prompt for it ends, and the
    token that ends the turn belongs to it.
    """
    try:
        messages = checked_conversation(row["messages"], None)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise InvalidArgumentError(f"{where}: expected a message of role assistant, got none; add the answer to learn")
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError(f"{name} has no chat template; give rows with text, or set tokenizer.chat_template")
    turns = turns if answers == "all" else turns[-1:]
    template = _Template(tokenizer, name, where, ChatOptions.of(row.get("tools"), None, None, False).tools)
    ((text, generated),) = template.rendered([messages], is_complete=True)
    if generated is not None and answers == "all":
        return text, functools.partial(_overlaps, generated)
    prompts = template.rendered([messages[:turn] for turn in turns], is_complete=False)
    if generated is not None:
        last = prompts[-1][0]
        if not text.startswith(last):
            raise ChatTemplateError(
                f"{where}: expected a chat template whose text begins with the prompt of the last answer, which that "
                f'of {name} does not, so the answer cannot be found in it; choose answers="all"'
            )
        return text, functools.partial(_overlaps, [span for span in generated if span[0] >= len(last)])
    ends = template.rendered([messages[: turn + 1] for turn in turns], is_complete=True)
    spans = []
    for (prompt, _), (end, _) in zip(prompts, ends, strict=True):
        if not (end.startswith(prompt) and text.startswith(end.rstrip())):
            raise ChatTemplateError(
                f"{where}: expected a chat template that writes a turn the same way whatever follows, which that of "
                f'{name} does not, so earlier answers cannot be found in it; choose answers="last", or split the row'
            )
        spans.append((len(prompt), len(end.rstrip())))
    return text, functools.partial(_is_within, spans)


@dataclasses.dataclass(frozen=True)
class _Template:
    """The chat template for a row.

    Attributes:
        tokenizer: The tokenizer that it is of.
        name: Name of the model.
        where: Name of the row.
        tools: JSON schemas, or None.
    """

    tokenizer: Any
    name: str
    where: str
    tools: Sequence[Any] | None

    def rendered(
        self, conversations: list[list[dict[str, Any]]], *, is_complete: bool
    ) -> list[tuple[str, list[Span] | None]]:
        """Returns the text of each conversation, and where its assistant writes.

        The template's tags say where.
        """
        tools = None if self.tools is None else list(self.tools)
        special = {key: value for key, value in self.tokenizer.special_tokens_map.items() if isinstance(value, str)}
        source = self.tokenizer.get_chat_template(None, tools)
        found: list[tuple[str, list[Span] | None]] = []
        for begin in range(0, len(conversations), MAX_RENDERINGS):
            part = conversations[begin : begin + MAX_RENDERINGS]
            job = TemplateJob(source, part, special, tools, None, is_complete=is_complete)
            try:
                done = shared_renderer().render(job)
            except ChatTemplateError as error:
                raise ChatTemplateError(f"{self.where}: the chat template of {self.name} {error}") from error
            for text, generated in zip(done.texts, done.generated, strict=True):
                if isinstance(text, ChatTemplateError):
                    raise ChatTemplateError(
                        f"{self.where}: the chat template of {self.name} does not render: {text}"
                    ) from text
                found.append((text, generated))
        return found
