"""Fields of OpenAI and vLLM in requests to replicas: honoured, ignored or refused.

An answer of a replica is one text that streams. What that cannot be is refused by the name of the field; a test
compares the tables with those of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError

RENAMED: Mapping[str, str] = {
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""Fields of `SamplingParams` by the server's names for them; the first of two that are given counts."""
CHAT = ("chat_template_kwargs", "continue_final_message", "documents")
"""Arguments of `ServedModel.chat`; with `messages` only."""
NO_EFFECT = frozenset(("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"))
NO_EFFECT |= {"request_id", "safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user"}
NO_EFFECT |= {"verbosity", "session_id", "return_mm_kwargs", "guided_decoding_backend"}
"""Fields that change no answer, neither of the server nor of a replica."""
HARMLESS: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "stream": True,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}
"""Values of refused fields that say what happens anyway."""

_TEXT = "an answer is a text alone"
_ONE = "a request has one answer"
_SERVER = "torchax-serve serve has it"
REFUSED: Mapping[str, str] = {
    "model": "a deployment has one model; leave it out",
    "stream": "an answer always streams; leave it out",
    **dict.fromkeys(("n", "best_of"), f"{_ONE}; send the request several times"),
    **dict.fromkeys(("stream_options", "logprobs", "top_logprobs", "prompt_logprobs"), f"{_TEXT}; {_SERVER}"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "echo"), f"{_TEXT}; {_SERVER}"),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning", "return_hidden_states"), f"{_TEXT}; {_SERVER}"),
    "no_stop_trim": f"{_TEXT}; write include_stop_str_in_output",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "include_reasoning"), f"{_TEXT}; {_SERVER}"),
    **dict.fromkeys(("response_format", "structured_outputs"), f"answers follow no grammar; {_SERVER}"),
    **{f"guided_{kind}": f"answers follow no grammar; {_SERVER}" for kind in ("choice", "grammar", "json", "regex")},
    **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens", "bad_words", "suffix"), _SERVER),
    "reasoning_effort": "write chat_template_kwargs, with the variable that the model's chat template reads",
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "truncate_prompt_tokens"), "leave it out"),
    **dict.fromkeys(("audio", "chat_template", "function_call", "functions", "logits_processors"), "leave it out"),
    **dict.fromkeys(("modalities", "moderation", "prediction", "web_search_options"), "leave it out"),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), f"{_ONE}; {_SERVER}"),
    **dict.fromkeys(("truncation_side", "thinking_token_budget", "logprob_token_ids", "watermarking"), "leave it out"),
    **dict.fromkeys(("repetition_detection", "stream_interval", "return_token_offsets"), "leave it out"),
    **dict.fromkeys(("return_prompt_text", "routed_experts_prompt_start", "vllm_xargs"), "leave it out"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "prompt_embeds"), "leave it out"),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "guided_whitespace_pattern"), "leave it out"),
}
"""Remedies by field; null is taken."""
KNOWN = frozenset({*RENAMED, *CHAT, *NO_EFFECT, *REFUSED})


class RefusedFieldError(InvalidArgumentError):
    """Error for a field of the server that replicas do not have.

    Attributes:
        name: The field.
    """

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name}: expected none of it, for replicas do not have it; {remedy}")
        self.name = name


def own_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request in names of `SamplingParams`, without fields of no effect.

    Raises:
        RefusedFieldError: a field of the server that a replica does not have.
    """
    found: dict[str, Any] = {}
    for name, value in request.items():
        if value is None and name not in ("prompt", "messages"):
            continue
        if name in REFUSED and HARMLESS.get(name) != value:
            raise RefusedFieldError(name, REFUSED[name])
        if name in CHAT and "messages" not in request:
            raise RefusedFieldError(name, "give messages with it")
        if name not in NO_EFFECT and name not in REFUSED and name not in RENAMED:
            found[name] = value
    for name, own in RENAMED.items():
        if request.get(name) is not None:
            found.setdefault(own, request[name])
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if isinstance(seed := found.get("seed"), int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        found["seed"] = seed % 2**64  # OpenAI's are signed
    if isinstance(stop := found.get("stop"), list) and all(isinstance(text, str) for text in stop):
        found["stop"] = [text for text in stop if text]
    if found.get("stop") in ("", []):
        del found["stop"]
    return found
