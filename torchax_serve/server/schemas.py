"""Requests for ``/v1/chat/completions`` and ``/v1/completions``, as OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from torchax_serve.server.request_fields import (
    FAIL_FAST,
    ApiRequest,
    Ids,
    ModelName,
    Objects,
    Strings,
    honoured,
    no_effect,
    refused,
)

_STORE = "answers are not stored"
_TIER = "there is one tier"
_UP_TO = ", up to `--max-logprobs`, 20 by default; -1: all"


class StreamOptions(pydantic.BaseModel):
    """Options of a streamed answer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect: pieces are not padded


class TextRequest(ApiRequest):
    """Fields that chats and plain completions share."""

    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    stream: Annotated[bool | None, honoured("the answer as server-sent events, a piece per step of the engine")] = None
    stream_options: Annotated[
        StreamOptions | None,
        honoured("`include_usage`, `continuous_usage_stats`; `include_obfuscation` has no effect"),
    ] = None
    n: Annotated[int | None, honoured("answers to each prompt; answer i has the seed `seed + i`")] = None
    best_of: Annotated[int | None, honoured("as many as `n`; more are refused, but for beams")] = None
    stop: Annotated[
        str | Strings | None, honoured("strings that end the answer, at most 64; empty ones are left out")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, honoured("the answer's text has the stop string")] = None
    stop_token_ids: Annotated[Ids | None, honoured("token ids that end the answer")] = None
    ignore_eos: Annotated[bool | None, honoured("an end-of-sequence token does not end the answer")] = None
    min_tokens: Annotated[int | None, honoured("tokens before the answer may end, also at a stop string")] = None
    temperature: Annotated[float | None, honoured("0 is greedy; by default as the model's generation config")] = None
    top_p: Annotated[float | None, honoured("nucleus sampling, above 0 and up to 1")] = None
    top_k: Annotated[int | None, honoured("sample from so many tokens; 0 and -1 switch it off")] = None
    min_p: Annotated[float | None, honoured("tokens with this fraction of the likeliest one's probability")] = None
    presence_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    frequency_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    repetition_penalty: Annotated[float | None, honoured("above 0; 1 switches it off")] = None
    logit_bias: Annotated[dict[str, float] | None, honoured("-100 to 100 by token id")] = None
    bad_words: Annotated[Strings | None, honoured("texts that are never written, as sequences of tokens")] = None
    allowed_token_ids: Annotated[Ids | None, honoured("the only token ids that may be sampled")] = None
    seed: Annotated[int | None, honoured("equal requests with equal seeds have equal answers")] = None
    prompt_logprobs: Annotated[int | None, honoured(f"log-probabilities of the prompt's tokens{_UP_TO}")] = None
    skip_special_tokens: Annotated[bool | None, honoured("`false` writes special tokens into the text")] = None
    spaces_between_special_tokens: Annotated[bool | None, no_effect("texts are decoded as by the tokenizer")] = None
    return_token_ids: Annotated[bool | None, honoured("`token_ids` and `prompt_token_ids` in the answer")] = None
    return_tokens_as_token_ids: Annotated[bool | None, honoured("log-probabilities name tokens `token_id:N`")] = None
    priority: Annotated[int | None, honoured("lower runs first")] = None
    cache_salt: Annotated[str | None, honoured("cached prefixes are shared among equal salts only")] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None
    request_id: Annotated[str | None, no_effect("the header X-Request-Id is taken")] = None
    safety_identifier: Annotated[str | None, no_effect("who asks is told by the API key")] = None
    prompt_cache_key: Annotated[str | None, no_effect("prefixes are found without it")] = None
    prompt_cache_retention: Annotated[str | None, no_effect("cached prefixes stay as long as there are pages")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, no_effect("prefixes are found without them")] = None
    service_tier: Annotated[str | None, no_effect(_TIER)] = None
    metadata: Annotated[dict[str, str] | None, no_effect(_STORE)] = None
    store: Annotated[bool | None, no_effect(_STORE)] = None
    response_format: Annotated[
        dict[str, Any] | None,
        honoured(
            "`text`, `json_object`, `json_schema`; `structural_tag` with `format`, or `structures` and `triggers`"
        ),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None, honoured("vLLM's: `json`, `regex`, `choice`, `grammar` (Lark or GBNF) ...")
    ] = None
    guided_json: Annotated[Any, honoured("as `structured_outputs.json`")] = None
    guided_regex: Annotated[Any, honoured("as `structured_outputs.regex`")] = None
    guided_choice: Annotated[Any, honoured("as `structured_outputs.choice`")] = None
    guided_grammar: Annotated[Any, honoured("as `structured_outputs.grammar`")] = None
    moderation: Annotated[Any, refused("expected null; answers are not moderated here")] = None
    use_beam_search: Annotated[
        bool | None, honoured("the `n` best sequences of a beam search of `n` beams, or `best_of`; not streamed")
    ] = None
    length_penalty: Annotated[
        float | None, honoured("exponent of a sequence's length, by which its score in a beam search is divided")
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None, honoured("when a beam search ends, as in transformers; false by default")
    ] = None
    logits_processors: Annotated[Any, refused("expected none; code in a request is not run", [])] = None
    truncate_prompt_tokens: Annotated[
        int | None, honoured("so many tokens of the prompt are read; -1: as many as the model's length allows")
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, honoured("where the prompt is cut; left by default")
    ] = None
    thinking_token_budget: Annotated[
        int | None, honoured("most tokens of reasoning, whose closing marker is written then; -1: any number")
    ] = None
    logprob_token_ids: Annotated[Any, refused("expected null; write top_logprobs or logprobs")] = None
    repetition_detection: Annotated[Any, refused("expected null; write repetition_penalty")] = None
    watermarking: Annotated[Any, refused("expected false; answers have no watermark", False)] = None
    stream_interval: Annotated[Any, refused("expected 1; each step is a piece", 1)] = None
    session_id: Annotated[str | None, no_effect("prefixes are found without it")] = None
    return_token_offsets: Annotated[Any, refused("expected false; /tokenize has the text of each token", False)] = None
    routed_experts_prompt_start: Annotated[Any, refused("expected 0; answers do not name experts", 0)] = None
    return_mm_kwargs: Annotated[bool | None, no_effect("answers have no inputs of processors")] = None
    kv_transfer_params: Annotated[Any, refused("expected null; pages are not sent to other servers", {})] = None
    ec_transfer_params: Annotated[Any, refused("expected null; encodings are not sent to other servers", {})] = None
    vllm_xargs: Annotated[Any, refused("expected none; there are no extensions", {})] = None
    no_stop_trim: Annotated[Any, refused("expected false; write include_stop_str_in_output", False)] = None
    return_hidden_states: Annotated[Any, refused("expected false; answers have no hidden states", False)] = None
    guided_decoding_backend: Annotated[str | None, no_effect("grammars are llguidance's")] = None
    guided_whitespace_pattern: Annotated[Any, refused("expected null; JSON has one form of space")] = None


class ChatRequest(TextRequest):
    """Body of ``/v1/chat/completions``."""

    separate_reasoning: Annotated[Any, refused("expected true; reasoning is apart from the answer", True)] = None
    stream_reasoning: Annotated[Any, refused("expected true; write include_reasoning", True)] = None
    routes: ClassVar[tuple[str, ...]] = ("/v1/chat/completions",)
    messages: Annotated[Objects, honoured("the conversation, oldest message first")]
    max_tokens: Annotated[int | None, honoured("most tokens of the answer; by default as the model's config")] = None
    max_completion_tokens: Annotated[int | None, honoured("as `max_tokens`, in its place")] = None
    logprobs: Annotated[bool | None, honoured("log-probabilities of the answer's tokens")] = None
    top_logprobs: Annotated[int | None, honoured(f"those of so many likeliest tokens{_UP_TO}")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured("variables of the chat template")] = None
    documents: Annotated[Objects | None, honoured("documents, if the chat template reads them")] = None
    continue_final_message: Annotated[bool | None, honoured("the answer continues the last message")] = None
    add_generation_prompt: Annotated[
        Any, refused("expected true, or false with continue_final_message", True, False)
    ] = None
    echo: Annotated[Any, refused("expected false; a chat's prompt is not repeated", False)] = None
    tools: Annotated[
        Objects | None, honoured("functions, at most 1024; `strict` holds their arguments to the schema")
    ] = None
    tool_choice: Annotated[
        Any, honoured("`none`, `auto`, `required`, a function or `allowed_tools`; forced calls follow the schema")
    ] = None
    parallel_tool_calls: Annotated[bool | None, honoured("`false`: at most one call")] = None
    include_reasoning: Annotated[bool | None, honoured("`false` leaves the reasoning out of the answer")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        honoured(
            "the variable `reasoning_effort` of the chat template; where it reads none, a budget of 0, 10, 20, 50, 80 "
            "or 95% of the answer's tokens, any number at `max`"
        ),
    ] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, no_effect("models are not told")] = None
    modalities: Annotated[Any, refused('expected ["text"]; answers are text', ["text"])] = None
    audio: Annotated[Any, refused("expected null; answers are text")] = None
    prediction: Annotated[Any, refused("expected null; predicted outputs are not supported")] = None
    web_search_options: Annotated[Any, refused("expected null; the web is not searched")] = None
    functions: Annotated[Any, refused("expected none; write tools", [])] = None
    function_call: Annotated[Any, refused("expected none; write tool_choice", "none", "auto")] = None
    chat_template: Annotated[Any, refused("expected null; the model's own template is used")] = None
    add_special_tokens: Annotated[Any, refused("expected false; the chat template writes them", False)] = None
    return_prompt_text: Annotated[Any, refused("expected false; /v1/chat/completions/render has it", False)] = None
    media_io_kwargs: Annotated[Any, refused("expected none; files are read by their content", {})] = None
    mm_processor_kwargs: Annotated[Any, refused("expected none; the processor follows the checkpoint", {})] = None

    @property
    def num_top(self) -> int | None:
        """Number of likeliest tokens with log-probabilities; None without any log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(TextRequest):
    """Body of ``/v1/completions``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/completions",)
    prompt: Annotated[
        str | Ids | Strings | Annotated[list[Ids], FAIL_FAST],
        honoured("a text, token ids, or a list of one of these; an empty text if the tokenizer adds a token"),
    ]
    max_tokens: Annotated[int | None, honoured("most tokens of the answer, 16 by default; 0 with `echo`")] = None
    logprobs: Annotated[int | None, honoured(f"log-probabilities and those of the likeliest tokens{_UP_TO}")] = None
    echo: Annotated[bool | None, honoured("the prompt in front of the answer")] = None
    add_special_tokens: Annotated[Any, refused("expected true; give token ids for another prompt", True)] = None
    suffix: Annotated[
        str | None, honoured("text behind the answer, for tokenizers with tokens for it (FIM); others refuse it")
    ] = None
    prompt_embeds: Annotated[Any, refused("expected null; give a text or token ids")] = None

    @property
    def num_top(self) -> int | None:
        """Number of likeliest tokens with log-probabilities; None without any log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[Any]:
        """Returns the prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
