"""Requests for ``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from torchax_serve.server.dialect_requests import FastList, OpenPart, OpenRequest, as_parts_of
from torchax_serve.server.request_fields import FAIL_FAST, Strings, honoured, no_effect

ID_PREFIX = "toolu_"
"""Beginning of the ids of calls in this interface, which the model's ids are written behind."""


class _Block(OpenPart):
    """Base of content blocks; `cache_control` has no effect, as prefixes are found without it."""

    cache_control: Any = None


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Any = None  # of replayed answers


class Source(OpenPart):
    """Where an image or a document comes from."""

    type: Literal["base64", "url", "text", "content"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Any = None


class ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: Source


class DocumentBlock(_Block):
    """A document, of which texts are read."""

    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block):
    """A result of a search by the client."""

    type: Literal["search_result"]
    source: str
    title: str
    content: FastList[TextBlock]


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, pydantic.Field(discriminator="type")
]


class ToolResultBlock(_Block):
    """What a tool has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[FastList[ResultBlock], as_parts_of("text")] = []  # noqa: RUF012
    is_error: bool | None = None


class ToolUseBlock(_Block):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None  # of replayed answers


class ThinkingBlock(_Block):
    """Reasoning of an answer; the signature says nothing to a model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Reasoning that cannot be read, and is left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    pydantic.Field(discriminator="type"),
]


class InputMessage(OpenPart):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[FastList[Block], as_parts_of("text")]


class MessagesTool(OpenPart):
    """A tool; those of other types than ``custom`` are left out."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None

    @property
    def is_function(self) -> bool:
        """Whether the client runs it, with arguments by a schema of its own."""
        return self.type in (None, "custom")


class ToolChoice(OpenPart):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenPart):
    """Whether the answer has reasoning."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(OpenPart):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], pydantic.Field(alias="schema")]


class OutputConfig(OpenPart):
    """Form and effort of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(OpenRequest):
    """Body of ``/v1/messages/count_tokens``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/messages/count_tokens",)
    tags: ClassVar[frozenset[str]] = frozenset(
        ("text", "image", "document", "search_result", "tool_result", "tool_use", "thinking", "redacted_thinking")
    )
    model: Annotated[str, honoured("a name in `/v1/models`; another one is 404")]
    messages: Annotated[list[InputMessage], FAIL_FAST, honoured("the conversation, oldest message first")]
    system: Annotated[
        FastList[TextBlock] | None,
        as_parts_of("text"),
        honoured("the system prompt, a text or text blocks; an attribution header at its front is left out"),
    ] = None
    tools: Annotated[
        FastList[MessagesTool] | None,
        honoured("functions, at most 1024; tools of other types are left out, with a note in the log"),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None, honoured("`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`: at most one call")
    ] = None
    thinking: Annotated[
        Thinking | None,
        honoured(
            "the variable `enable_thinking` of the chat template, false without it; `budget_tokens` as "
            "`thinking_token_budget` of chats"
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None, honoured("`format`: a JSON schema; `effort`: as `reasoning_effort` of chats")
    ] = None
    output_format: Annotated[OutputFormat | None, honoured("as `output_config.format`")] = None
    cache_control: Annotated[Any, no_effect("prefixes are found without it")] = None
    context_management: Annotated[Any, no_effect("the conversation is answered as it comes")] = None
    speed: Annotated[str | None, no_effect("there is one speed")] = None


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/messages",)
    max_tokens: Annotated[int, honoured("most tokens of the answer; bounded by what the model has room for")]
    stream: Annotated[bool | None, honoured("the answer as server-sent events")] = None
    stop_sequences: Annotated[Strings | None, honoured("strings that end the answer, at most 64")] = None
    temperature: Annotated[float | None, honoured("0 is greedy; by default as the model's generation config")] = None
    top_p: Annotated[float | None, honoured("nucleus sampling, above 0 and up to 1")] = None
    top_k: Annotated[int | None, honoured("sample from so many tokens; 0 and -1 switch it off")] = None
    metadata: Annotated[Any, no_effect("who asks is told by the API key")] = None
    service_tier: Annotated[str | None, no_effect("there is one tier")] = None
    inference_geo: Annotated[str | None, no_effect("answers come from here")] = None
