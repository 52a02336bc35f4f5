"""Options of vLLM, OpenAI and transformers unknown to `SamplingParams`.

`SamplingParams` has them under another name, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping

_BEAMS = "beam search runs in generate(num_beams=...)"

RENAMED: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_length": "min_new_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "top_logprobs": "logprobs",
    "max_time": "timeout_s",
    "timeout": "timeout_s",
    "bad_words": "bad_words_ids",
    "suppress_token_ids": "suppress_tokens",
    "typical": "typical_p",
}
"""Field of `SamplingParams` by the option's name elsewhere."""

UNSUPPORTED: Mapping[str, str] = {
    "best_of": "ask for n answers with logprobs=0 and keep the likeliest",
    "bad_words": "give token ids: [tokenizer.encode(word, add_special_tokens=False) for word in words]",
    "top_logprobs": "logprobs=k gives the k likeliest tokens and the sampled one",
    "use_beam_search": _BEAMS,
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logits_processors": "processors run in generate(logits_processor=...)",
    "logits_processor": "processors run in generate(logits_processor=...)",
    "stopping_criteria": "criteria run in generate(stopping_criteria=...)",
    "guidance_scale": "it runs in generate(guidance_scale=...)",
    "skip_special_tokens": "texts leave special tokens out; decode token_ids for a text with them",
    "spaces_between_special_tokens": "texts leave special tokens out; decode token_ids for a text with them",
    "include_stop_str_in_output": "texts end before the stop string; token_ids has all tokens",
    "detokenize": "completions have token_ids and text",
    "output_kind": "stream() yields pieces, generate_batch() complete answers",
    "truncate_prompt_tokens": "give the token ids of the part of the prompt that is to be read",
    "guided_decoding": "answers cannot be held to a grammar; allowed_token_ids holds them to tokens",
    "structured_outputs": "answers cannot be held to a grammar; allowed_token_ids holds them to tokens",
    "response_format": "answers cannot be held to a grammar; allowed_token_ids holds them to tokens",
    "skip_reading_prefix_cache": "a cache_salt of its own keeps a request from shared prefixes",
    "flat_logprobs": "logprobs come as one TokenLogprobs for each token",
    "thinking_token_budget": "requests to the server have one; max_new_tokens counts all tokens",
    "extra_args": "write each option by its name",
    "tools": "give them to chat(tools=...)",
    "chat_template_kwargs": "give them to chat(chat_template_kwargs=...)",
    "stream": "call stream(), or chat(stream=True)",
}
"""Remedy by the name of an option that is not supported."""


def hint_for(name: str) -> str | None:
    """Returns what to write instead of the option `name` of another interface; None if unknown."""
    parts = [f"did you mean {RENAMED[name]}?" if name in RENAMED else "", UNSUPPORTED.get(name, "")]
    return " ".join(part for part in parts if part) or None
