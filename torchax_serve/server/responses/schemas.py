"""Requests for ``/v1/responses``, as OpenAI's and Open Responses'."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from torchax_serve.server.dialect_requests import FastList, OpenPart, OpenRequest, as_parts_of
from torchax_serve.server.request_fields import FAIL_FAST, ModelName, Strings, honoured, no_effect, refused


class _Item(OpenPart):
    """Base of the items of a conversation."""

    id: str | None = None
    status: str | None = None


class ItemPart(OpenPart):
    """A part of a message, or of what a tool has returned."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Any = None
    annotations: Any = None  # of replayed answers
    logprobs: Any = None


_Parts = Annotated[FastList[ItemPart], as_parts_of("input_text")]


class MessageItem(_Item):
    """A message."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    phase: Any = None


class ReasoningItem(_Item):
    """Reasoning in front of a message or a call."""

    type: Literal["reasoning"]
    summary: FastList[ItemPart] = []  # noqa: RUF012
    content: FastList[ItemPart] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CustomToolCallItem(_Item):
    """A call of a custom tool, whose input is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CallOutputItem(_Item):
    """What a function or a custom tool has returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Parts


class ItemReference(_Item):
    """An item of a stored response, in whose place it stands."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | CallOutputItem | ItemReference,
    pydantic.Field(discriminator="type"),
]


ITEMS = pydantic.TypeAdapter(list[Item])
"""Items of a conversation."""


def _with_types(given: Any) -> Any:
    """Returns an input as a list of items that have a type.

    A message may have none, and a text is the user's.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    return [{"type": "message", **each} if isinstance(each, dict) and "role" in each else each for each in given]


class ResponsesTool(OpenPart):
    """A tool; those of other types than ``function`` and ``custom`` are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    @property
    def is_function(self) -> bool:
        """Whether the client runs it."""
        return self.type in ("function", "custom")


class TextFormat(OpenPart):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, pydantic.Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(OpenPart):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(OpenPart):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponsesRequest(OpenRequest):
    """Body of ``/v1/responses``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/responses",)
    tags: ClassVar[frozenset[str]] = frozenset(
        (
            *("message", "reasoning", "function_call", "custom_tool_call"),
            *("function_call_output", "custom_tool_call_output", "item_reference"),
        )
    )
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    input: Annotated[
        list[Item],
        FAIL_FAST,
        pydantic.BeforeValidator(_with_types),
        honoured("a text, or all items of the conversation, oldest first; `item_reference`: one of a stored response"),
    ]
    instructions: Annotated[str | None, honoured("a system message in front of the input")] = None
    tools: Annotated[
        FastList[ResponsesTool] | None,
        honoured("`function` and `custom`, at most 1024; others are left out, with a note in the log"),
    ] = None
    tool_choice: Annotated[Any, honoured("`none`, `auto`, `required`, a tool or `allowed_tools`")] = None
    parallel_tool_calls: Annotated[bool | None, honoured("`false`: at most one call")] = None
    max_output_tokens: Annotated[int | None, honoured("most tokens of the answer; bounded by the model's room")] = None
    temperature: Annotated[float | None, honoured("0 is greedy; by default as the model's generation config")] = None
    top_p: Annotated[float | None, honoured("nucleus sampling, above 0 and up to 1")] = None
    presence_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    frequency_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    top_logprobs: Annotated[int | None, honoured("as of chats, with `include`")] = None
    text: Annotated[TextOptions | None, honoured("`format`: `text`, `json_object` or `json_schema`")] = None
    reasoning: Annotated[ReasoningOptions | None, honoured("`effort`, as `reasoning_effort` of chats")] = None
    include: Annotated[
        Strings | None,
        honoured("`reasoning.encrypted_content`, `message.output_text.logprobs`"),
    ] = None
    stream: Annotated[bool | None, honoured("the answer as server-sent events")] = None
    stream_options: Annotated[dict[str, Any] | None, no_effect("pieces are not padded")] = None
    metadata: Annotated[dict[str, str] | None, honoured("repeated in the response")] = None
    store: Annotated[
        bool | None,
        honoured("`false` stores nothing; else as `--max-stored-responses` says"),
    ] = None
    max_tool_calls: Annotated[int | None, no_effect("no tools run here")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        honoured("`auto`: the first items are left out of an input that is too long; else that is an error"),
    ] = None
    service_tier: Annotated[str | None, no_effect("there is one tier")] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None
    safety_identifier: Annotated[str | None, no_effect("who asks is told by the API key")] = None
    prompt_cache_key: Annotated[str | None, no_effect("prefixes are found without it")] = None
    prompt_cache_retention: Annotated[str | None, no_effect("cached prefixes stay as long as there are pages")] = None
    client_metadata: Annotated[Any, no_effect("it says nothing to a model")] = None
    previous_response_id: Annotated[
        str | None, honoured("a stored response, whose input and output stand in front; with `--max-stored-responses`")
    ] = None
    conversation: Annotated[Any, refused("expected null; write previous_response_id, or send all of the input")] = None
    prompt: Annotated[Any, refused("expected null; prompts are not stored, so send instructions and input")] = None
    background: Annotated[Any, refused("expected false; responses end with their request", False)] = None
