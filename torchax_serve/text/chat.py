"""`chat`: renders messages with the model's chat template and answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from model_adapters.errors import ChatTemplateError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.chat_template import ChatOptions, ChatTemplate, check_last_message
from torchax_serve.text.messages import Message, checked_conversation, has_media
from torchax_serve.text.prompt import (
    DEFAULT_CHAT_MAX_NEW_TOKENS,
    TextModel,
    encode_rendered,
    make_media_request,
    make_request,
    need_tokenizer,
)
from torchax_serve.text.text_stream import TextStream, start_stream


@overload
def chat(
    model: TextModel,
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
    model: TextModel,
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
    model: TextModel,
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
        messages: the user's message, or the conversation, oldest message first; the caller stores the history.
        params: sampling parameters, as in `torchax_serve.text.text_stream.stream`; without a limit, an answer ends
            after `DEFAULT_CHAT_MAX_NEW_TOKENS` tokens.
        stream: return a `TextStream` at once instead of the complete text.
        system: a system prompt in front of `messages`.
        tools: functions that the model may call: JSON schemas, or Python functions with type hints and a docstring.
            The calls are in the answer's text, as the model writes them.
        documents: documents for retrieval, if the template reads them.
        chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``.
        continue_final_message: continue the last message, which is the assistant's; the answer is the continuation.

    Raises:
        ChatTemplateError: the model has no chat template, or it does not render within seconds, or it drops messages
            of a role.
        InvalidArgumentError: no message, something else than a message, a second system prompt, a last message of the
            assistant, or a conversation longer than the model's positions.
        UnsupportedArgumentError: tools, documents, variables or message keys that the template does not read; an
            unsupported kind of content; more than one answer (``n``); an unknown argument.
        QueueFullError: too many requests are waiting.
    """
    options = ChatOptions.of(tools, documents, chat_template_kwargs, continue_final_message)
    conversation = checked_conversation(messages, system)
    if has_media(conversation):
        from torchax_serve.multimodal.processor import media_inputs  # which imports this package

        check_last_message(conversation, options)
        request = make_media_request(model, media_inputs(model, conversation, options), params)
    else:
        prompt_ids = _prompt_ids(model, conversation, options)
        request = make_request(model, prompt_ids, params, default_max_new_tokens=DEFAULT_CHAT_MAX_NEW_TOKENS)
    answer = start_stream(model, request)
    return answer if stream else "".join(answer)


def has_chat_template(model: TextModel) -> bool:
    """Returns whether `chat` can be used with `model`."""
    return bool(getattr(model.text_tokenizer, "chat_template", None))


def chat_prompt_ids(
    model: TextModel,
    messages: str | Sequence[Message],
    *,
    system: str | None = None,
    options: ChatOptions | None = None,
) -> list[int]:
    """Returns the token ids of a conversation, up to the start of the answer.

    Errors as in `chat`.
    """
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
    tokenizer = model.text_tokenizer
    remedy = "check the roles and contents of the messages, or set model.tokenizer.chat_template"
    try:
        if not _is_overridden(tokenizer):
            source = tokenizer.get_chat_template(None, options.tools)
        else:  # a tokenizer class with its own method
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
        details = " ".join(str(error).split()) or "no message"
        raise ChatTemplateError(
            f"the chat template of {model.name} does not render: {type(error).__name__}: {details}; {remedy}"
        ) from error
    return ChatTemplate(source, model.name, tokenizer.special_tokens_map, remedy).text(conversation, options)


def _is_overridden(tokenizer: Any) -> bool:
    if not getattr(type(tokenizer), "has_own_template_method", True):
        return False  # recorded as one of transformers' own
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
