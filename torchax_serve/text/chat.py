"""Conversations: messages become a prompt by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from model_adapters.errors import ChatTemplateError, InvalidArgumentError
from torchax_serve.images.answer import stream_about_media
from torchax_serve.images.processor import has_media
from torchax_serve.request import SamplingParams
from torchax_serve.text.prompt import DEFAULT_CHAT_MAX_NEW_TOKENS, TextModel, make_request, need_tokenizer
from torchax_serve.text.stream import TextStream, start_stream

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | …, "content": …}``, as transformers' chat templates take it."""


@overload
def chat(
    model: TextModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: Literal[False] = False,
    system: str | None = None,
) -> str: ...


@overload
def chat(
    model: TextModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: Literal[True],
    system: str | None = None,
) -> TextStream: ...


def chat(
    model: TextModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: bool = False,
    system: str | None = None,
) -> str | TextStream:
    """Answers the last of `messages`.

    Args:
        model: the model.
        messages: what the user says, or the whole conversation, oldest first; the caller keeps the history.
        params: how to decode, as in `torchax_serve.text.stream.stream`; an answer whose length nobody has set ends
            after `DEFAULT_CHAT_MAX_NEW_TOKENS` tokens.
        stream: hand out the text as it comes.
        system: a system prompt to stand before `messages`.

    Raises:
        ChatTemplateError: the model has no chat template, it does not render, or it leaves the system prompt out.
        InvalidArgumentError: no message, a message that is none, a second system prompt, a conversation longer than
            the model's positions.
        UnsupportedArgumentError: more than one answer (``n``), or options of the engine beside images or sounds.
    """
    if has_media(messages):
        answer = stream_about_media(model, _conversation(messages, system), params)
    else:
        prompt_ids = chat_prompt_ids(model, messages, system=system)
        request = make_request(model, prompt_ids, params, default_max_new_tokens=DEFAULT_CHAT_MAX_NEW_TOKENS)
        answer = start_stream(model, request)
    return answer if stream else "".join(answer)


def has_chat_template(model: TextModel) -> bool:
    """Whether `chat` can be used with `model`."""
    return bool(getattr(model.tokenizer, "chat_template", None))


def chat_prompt_ids(model: TextModel, messages: str | Sequence[Message], *, system: str | None = None) -> list[int]:
    """The token ids of a conversation, up to where the answer begins; errors as in `chat`."""
    conversation = _conversation(messages, system)
    tokenizer = need_tokenizer(model)
    if not has_chat_template(model):
        raise ChatTemplateError(
            f"{model.name} has no chat template; use stream() with a plain prompt (torchax-serve run --raw), "
            "or set model.tokenizer.chat_template"
        )
    text = _render(model, conversation)
    if conversation[0]["role"] == "system" and _render_or_none(model, conversation[1:]) == text:
        raise ChatTemplateError(
            f"the chat template of {model.name} leaves the system prompt out; put it into the first user message"
        )
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _conversation(messages: str | Sequence[Message], system: str | None) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        if not messages:
            raise InvalidArgumentError("messages: expected some text, got an empty string")
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(f"messages: expected a string or a non-empty list of messages, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f'messages: expected dicts like {{"role": "user", "content": "Hi"}}, got {message!r}'
            )
    conversation = [dict(message) for message in messages if isinstance(message, Mapping)]
    if system is None:
        return conversation
    if conversation[0]["role"] == "system":
        raise InvalidArgumentError("system: the messages already begin with a system prompt; give only one of the two")
    return [{"role": "system", "content": system}, *conversation]


def _render(model: TextModel, conversation: list[dict[str, Any]]) -> str:
    try:
        text: str = model.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it may fail with anything
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        reason = str(error) or "no message"
        raise ChatTemplateError(
            f"the chat template of {model.name} does not render: {type(error).__name__}{where}: {reason}; check the "
            "roles and contents of the messages, or set model.tokenizer.chat_template"
        ) from error
    return text


def _render_or_none(model: TextModel, conversation: list[dict[str, Any]]) -> str | None:
    """The text of `conversation`, or None where the template has none for it (such as for no message at all)."""
    try:
        return _render(model, conversation)
    except ChatTemplateError:
        return None
