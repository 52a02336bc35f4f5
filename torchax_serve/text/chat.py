"""Conversations: messages become a prompt by the model's own chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

from model_adapters.errors import ChatTemplateError
from torchax_serve.multimodal.processor import has_media
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.chat_template import ChatOptions, ChatTemplate, check_last_message
from torchax_serve.text.messages import Message, checked_conversation
from torchax_serve.text.prompt import (
    DEFAULT_CHAT_MAX_NEW_TOKENS,
    TextModel,
    encode_rendered,
    make_request,
    need_tokenizer,
)
from torchax_serve.text.text_stream import TextStream, start_stream


class ChatModel(TextModel, Protocol):
    """What a conversation needs of a model."""

    def stream_media(
        self, conversation: list[dict[str, Any]], params: SamplingParams | None, options: ChatOptions
    ) -> TextStream:
        """Streams the answer to a conversation with images or audio."""


@overload
def chat(
    model: ChatModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: Literal[False] = False,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str: ...


@overload
def chat(
    model: ChatModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: Literal[True],
    system: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> TextStream: ...


@refuses_unknown_options
def chat(
    model: ChatModel,
    messages: str | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    stream: bool = False,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str | TextStream:
    """Answers the last of `messages`.

    Args:
        model: the model.
        messages: what the user says, or the whole conversation, oldest first; the caller keeps the history.
        params: how to decode, as in `torchax_serve.text.text_stream.stream`; an answer whose length nobody has set ends
            after `DEFAULT_CHAT_MAX_NEW_TOKENS` tokens.
        stream: hand out the text as it comes.
        system: a system prompt to stand before `messages`.
        tools: that the model may call: JSON schemas, or functions with type hints and a docstring. The calls are in
            the answer's text, as the model writes them.
        documents: for the template, where it has a place for them.
        chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``.
        continue_final_message: go on with the last message, which is the assistant's; the answer is what comes behind.

    Raises:
        ChatTemplateError: the model has no chat template, it does not render within seconds, or it leaves messages of
            a role out.
        InvalidArgumentError: no message, a message that is none, a second system prompt, a last message of the
            assistant's, a conversation longer than the model's positions.
        UnsupportedArgumentError: tools, documents, variables or keys of messages that the template does not read;
            parts that no model is shown; more than one answer (``n``); options of the engine beside images or sounds.
        QueueFullError: too many requests wait already.
    """
    options = ChatOptions.of(tools, documents, chat_template_kwargs, continue_final_message)
    conversation = checked_conversation(messages, system)
    if has_media(conversation):
        check_last_message(conversation, options)
        answer = model.stream_media(conversation, params, options)
    else:
        prompt_ids = _prompt_ids(model, conversation, options)
        request = make_request(model, prompt_ids, params, default_max_new_tokens=DEFAULT_CHAT_MAX_NEW_TOKENS)
        answer = start_stream(model, request)
    return answer if stream else "".join(answer)


def has_chat_template(model: TextModel) -> bool:
    """Whether `chat` can be used with `model`."""
    return bool(getattr(model.tokenizer, "chat_template", None))


def chat_prompt_ids(
    model: TextModel,
    messages: str | Sequence[Message],
    *,
    system: str | None = None,
    options: ChatOptions | None = None,
) -> list[int]:
    """The token ids of a conversation, up to where the answer begins; errors as in `chat`."""
    return _prompt_ids(model, checked_conversation(messages, system), options or ChatOptions())


def _prompt_ids(model: TextModel, conversation: list[dict[str, Any]], options: ChatOptions) -> list[int]:
    check_last_message(conversation, options)
    tokenizer = need_tokenizer(model)
    if not has_chat_template(model):
        raise ChatTemplateError(
            f"{model.name} has no chat template; use stream() with a plain prompt (torchax-serve run --raw), "
            "or set model.tokenizer.chat_template"
        )
    return encode_rendered(tokenizer, _text(model, conversation, options))


def _text(model: TextModel, conversation: list[dict[str, Any]], options: ChatOptions) -> str:
    tokenizer = model.tokenizer
    remedy = "check the roles and contents of the messages, or set model.tokenizer.chat_template"
    try:
        if not _is_overridden(tokenizer):
            source = tokenizer.get_chat_template(None, options.tools)
        else:  # a class with a way of its own to write prompts
            text: str = tokenizer.apply_chat_template(
                conversation,
                tools=options.tools,
                documents=options.documents,
                tokenize=False,
                add_generation_prompt=not options.continues,
                continue_final_message=options.continues,
                **options.variables,
            )
            return text
    except Exception as error:
        said = " ".join(str(error).split()) or "no message"
        raise ChatTemplateError(
            f"the chat template of {model.name} does not render: {type(error).__name__}: {said}; {remedy}"
        ) from error
    return ChatTemplate(source, model.name, tokenizer.special_tokens_map, remedy).text(conversation, options)


def _is_overridden(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
