"""Rendering of conversations with a checkpoint's chat template.

Everything that the template would drop is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from model_adapters.errors import ChatTemplateError, InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.text.messages import as_parts, as_text, map_contents, plain, text_of, without_media
from torchax_serve.text.template_renderer import RenderedJob, TemplateJob, shared_renderer
from torchax_serve.validation.argument_checks import is_list, short_repr

MAX_ROLES = 16
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that are arguments of `chat`, or made by it."""
# What clients of OpenAI's and transformers' interfaces always send, and most templates do not write.
_MAY_BE_IGNORED = frozenset({"tool_call_id"})
_MAY_BE_IGNORED_OF_TOOLS = frozenset({"name", "tool_call_id"})


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Arguments of a chat template apart from messages.

    Attributes:
        tools: Functions that the model may call: JSON schemas, or Python functions with type hints and a docstring.
        documents: Documents for retrieval, in the template's format.
        variables: Variables of the template by name (``chat_template_kwargs``).
        continues: Whether the answer continues the last message, which is the assistant's.
        may_follow_assistant: Whether a new message of the assistant may follow one of its own.
    """

    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continues: bool = False
    may_follow_assistant: bool = False

    @classmethod
    def of(cls, tools: Any, documents: Any, chat_template_kwargs: Any, continue_final_message: Any) -> ChatOptions:
        """Checks the options and converts them to JSON values.

        Raises:
            InvalidArgumentError: an option of another type.
        """
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and not is_list(value):
                raise InvalidArgumentError(f"{name}: expected a list or None, got {short_repr(value)}")
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise InvalidArgumentError(
                f"chat_template_kwargs: expected a dict or None, got {short_repr(chat_template_kwargs)}"
            )
        if type(continue_final_message) is not bool:
            raise InvalidArgumentError(
                f"continue_final_message: expected True or False, got {short_repr(continue_final_message)}"
            )
        return cls(
            [_schema(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())] or None,
            plain("documents", documents) or None,
            plain("chat_template_kwargs", chat_template_kwargs or {}),
            continue_final_message,
        )


def _schema(name: str, tool: Any) -> Any:
    if not callable(tool):
        schema = plain(name, tool)
        if not isinstance(schema, dict):
            raise InvalidArgumentError(f"{name}: expected a JSON schema (a dict) or a function, got {short_repr(tool)}")
        return schema
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return plain(name, get_json_schema(tool))
    except Exception as error:  # of several libraries
        raise InvalidArgumentError(
            f"{name}: expected a function with type hints and a docstring that describes its arguments, got "
            f"{short_repr(tool)} ({' '.join(str(error).split())})"
        ) from error


def check_last_message(conversation: Sequence[Mapping[str, Any]], options: ChatOptions) -> None:
    """Raises InvalidArgumentError if the last message does not fit `options`.

    It must be the assistant's exactly if it is to be continued.
    """
    role = conversation[-1]["role"]
    if options.continues and role != "assistant":
        raise InvalidArgumentError(
            f"continue_final_message: expected a last message of role assistant, got one of role {short_repr(role)}; "
            "leave it out"
        )
    if role == "assistant" and not options.continues and not options.may_follow_assistant:
        raise InvalidArgumentError(
            "messages: expected the user's, or a tool's, as the last one, got the assistant's; "
            "continue_final_message=True continues it"
        )


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        source: jinja source.
        name: name of the model, for errors.
        special_tokens: special tokens by name, which the template may write.
        remedy: end of an error, which says what to do about a template that does not render.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, Any], remedy: str) -> None:
        self._source, self._name, self._remedy = source, name, remedy
        self._special_tokens = {
            key: [str(each) for each in value] if is_list(value) else str(value)
            for key, value in special_tokens.items()
            if value is not None
        }

    def text(self, conversation: Sequence[dict[str, Any]], options: ChatOptions) -> str:
        """Returns the prompt of a conversation, up to the start of the answer.

        Raises:
            ChatTemplateError: it does not render (in time), or drops a message.
            UnsupportedArgumentError: the template does not read an option, or a key of a message.
        """
        facts = self._facts()
        self._check_options(facts, options)
        conversation = map_contents(conversation, without_media)
        lost: ChatTemplateError | None = None
        for form in _forms(conversation, facts):
            try:
                return self._checked_text(form, options, facts)
            except ChatTemplateError as error:
                lost = lost or error
        assert lost is not None
        raise lost

    def _facts(self) -> RenderedJob:
        try:
            return _facts_of(self._source)
        except ChatTemplateError as error:
            raise self._error(str(error)) from error

    def _error(self, what: str) -> ChatTemplateError:
        return ChatTemplateError(f"the chat template of {self._name} {what}; {self._remedy}")

    def _check_options(self, facts: RenderedJob, options: ChatOptions) -> None:
        for name in ("tools", "documents"):
            if getattr(options, name) and name not in facts.variables:
                raise UnsupportedArgumentError(
                    f"{name}: the chat template of {self._name} has no place for {name}, so the model would not see "
                    "them; leave them out, or write them into a message"
                )
        for name in options.variables:
            if name in RESERVED:
                raise UnsupportedArgumentError(
                    f"chat_template_kwargs: expected variables of the template, got {name!r}, which is an argument of "
                    "chat() or made by it; leave it out"
                )
            if name not in facts.variables:
                known = ", ".join(sorted(facts.variables - RESERVED)) or "none"
                raise UnsupportedArgumentError(
                    f"chat_template_kwargs: expected variables that the chat template of {self._name} reads ({known}), "
                    f"got {short_repr(name)}; leave it out"
                )

    def _checked_text(self, conversation: list[dict[str, Any]], options: ChatOptions, facts: RenderedJob) -> str:
        checks = [*self._role_checks(conversation), *_key_checks(conversation, facts.words)]
        if any(map(_CALLS, conversation)):
            checks += _call_check(conversation)
        texts = self._rendered([conversation, *(variant for variant, _ in checks)], options)
        text = texts[0]
        if isinstance(text, ChatTemplateError):
            raise self._error(f"does not render: {text}")
        for other, (_, refuse) in zip(texts[1:], checks, strict=True):
            if other == text:
                refuse(self._name)
        return text

    def _rendered(
        self, conversations: Sequence[Sequence[dict[str, Any]]], options: ChatOptions
    ) -> list[str | ChatTemplateError]:
        job = TemplateJob(
            self._source,
            conversations,
            {**self._special_tokens, **options.variables},
            None if options.tools is None else list(options.tools),
            None if options.documents is None else [dict(document) for document in options.documents],
            options.continues,
        )
        try:
            return shared_renderer().render(job).texts
        except ChatTemplateError as error:
            raise self._error(str(error)) from error

    def _role_checks(self, conversation: list[dict[str, Any]]) -> Iterator[_Check]:
        """Yields for each role the conversation with a changed text in one of its messages.

        The prompt must differ, too.
        """
        last = {
            message["role"]: index
            for index, message in enumerate(conversation)
            if text_of(message.get("content")).strip()
        }
        if len(last) > MAX_ROLES:
            raise InvalidArgumentError(f"messages: expected at most {MAX_ROLES} roles, got {len(last)} of them")
        for role, index in last.items():
            message = conversation[index]
            changed = {**message, "content": _marked(message["content"])}
            yield [*conversation[:index], changed, *conversation[index + 1 :]], functools.partial(_refuse_role, role)


_Check = tuple[list[dict[str, Any]], Callable[[str], None]]


@functools.lru_cache(maxsize=64)
def _facts_of(source: str) -> RenderedJob:
    return shared_renderer().render(TemplateJob(source, [], {}))


def _forms(conversation: list[dict[str, Any]], facts: RenderedJob) -> Iterator[list[dict[str, Any]]]:
    """Yields the conversation in the forms that templates expect, the likeliest first.

    Templates of text models often expect one string, those of other models often a list of parts.
    """
    has_lists = any(isinstance(message.get("content"), list) for message in conversation)
    if facts.takes_parts or not has_lists:
        yield conversation
    if facts.takes_parts:
        yield map_contents(conversation, as_parts)
    if has_lists:
        yield map_contents(conversation, as_text)
    if any(map(_CALLS, conversation)):
        yield from _forms_of_calls(map_contents(conversation, as_text))


_CALLS = operator.methodcaller("get", "tool_calls")
"""Returns the calls of a message."""


def _forms_of_calls(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields a conversation with calls in the forms that older templates expect.

    These have no content next to calls, or arguments as JSON text.
    """
    is_bare = [bool(message.get("tool_calls")) and not message.get("content") for message in conversation]
    pairs = zip(conversation, is_bare, strict=True)
    bare = [{**message, "content": None} if is_one else message for message, is_one in pairs]
    if any(is_bare):
        yield bare
    for form in (bare, conversation):
        yield [
            {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in form
        ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose arguments are JSON text."""
    function = call.get("function", call)
    changed = {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}
    return {**call, "function": changed} if "function" in call else changed


def _call_check(conversation: list[dict[str, Any]]) -> Iterator[_Check]:
    """Yields the conversation with another name of its last call.

    The prompt must differ, too. The name may be a part of the call's id: Kimi's template writes the id alone.
    """
    found = [index for index, message in enumerate(conversation) if message.get("tool_calls")]
    if not found:
        return
    message = conversation[found[-1]]
    *others, call = message["tool_calls"]
    function = call.get("function", call)
    changed = {**function, "name": _marked(function["name"])} if function["name"].strip() else function
    name, call_id = function["name"], str(call.get("id"))
    if re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", call_id):
        call = {**call, "id": call_id.replace(f"{name}:", f"{changed['name']}:")}
    calls = [*others, {**call, "function": changed} if "function" in call else changed]
    if calls != message["tool_calls"]:
        variant = [*conversation[: found[-1]], {**message, "tool_calls": calls}, *conversation[found[-1] + 1 :]]
        yield variant, functools.partial(_refuse_call, found[-1])


def _marked(content: Any) -> Any:
    """Returns a content with another last character and the same length.

    The length is unchanged since templates may loop over a string.
    """
    if isinstance(content, str):
        end = len(content.rstrip())
        return content[: end - 1] + ("y" if content[end - 1] == "x" else "x") + content[end:]
    last = max(index for index, part in enumerate(content) if part.get("text", "").strip())
    part = {**content[last], "text": _marked(content[last]["text"])}
    return [*content[:last], part, *content[last + 1 :]]


def _refuse_call(index: int, name: str) -> None:
    raise ChatTemplateError(
        f"the chat template of {name} leaves a call of messages[{index}] out; write one call a message, or its text "
        "into the content"
    )


def _refuse_role(role: str, name: str) -> None:
    if role == "system":
        raise ChatTemplateError(
            f"the chat template of {name} leaves the system prompt out; put it into the first user message"
        )
    raise ChatTemplateError(
        f"the chat template of {name} leaves messages of role {short_repr(role)} out; write what they say into a "
        "user message"
    )


def _key_checks(conversation: list[dict[str, Any]], words: frozenset[str]) -> Iterator[_Check]:
    """Yields the conversation without each key that the template does not name.

    The prompt must differ, too.
    """
    seen: set[str] = set()
    for index, message in enumerate(conversation):
        may_be_ignored = _MAY_BE_IGNORED_OF_TOOLS if message["role"] in ("tool", "function") else _MAY_BE_IGNORED
        for key in message.keys() - {"role", "content"} - may_be_ignored - words - seen:
            seen.add(key)
            without = {name: value for name, value in message.items() if name != key}
            variant = [*conversation[:index], without, *conversation[index + 1 :]]
            yield variant, functools.partial(_refuse_key, index, key)


def _refuse_key(index: int, key: str, name: str) -> None:
    raise UnsupportedArgumentError(
        f"messages[{index}].{key}: the chat template of {name} does not read it, so the model would not see it; leave "
        "it out"
    )
