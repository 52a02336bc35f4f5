"""Prompts of requests whose answer is the text in a gap (FIM)."""

from __future__ import annotations

from torchax_serve.server.errors import bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.prompt_limits import check_len
from torchax_serve.server.schemas import CompletionRequest
from torchax_serve.text.infill import FimTokens


def prompts_with_gap(
    service: ModelService, body: CompletionRequest, suffix: str
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Returns the token ids of prompts with a gap, and further tokens that end the answer.

    Raises:
        ApiError: 400 for a model without tokens of such prompts, or fields that do not go with them.
    """
    tokens = fim_tokens_of(service, "suffix")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name) not in (None, False):
            raise bad_request(f"{name}: expected none next to suffix, got one; leave it out", name, "invalid_value")
    found = []
    for prompt in body.prompts():
        if not isinstance(prompt, str):
            raise bad_request("prompt: expected text next to suffix, got token ids", "prompt", "invalid_value")
        check_len(service, [prompt, suffix], "prompt", is_cut=False)
        found.append(tokens.prompt_ids(service.model.text_tokenizer, prompt, suffix))
    return found, tokens.ends


def fim_tokens_of(service: ModelService, field: str) -> FimTokens:
    """Returns the tokens of prompts with a gap; raises ApiError, 400, where there are none."""
    found = FimTokens.of(service.model.text_tokenizer)
    if found is None:
        message = f"{field}: expected none, since the tokenizer of {service.name} has no tokens to fill in the middle "
        message += "(FIM), such as <|fim_prefix|>; leave it out"
        raise bad_request(message, field, "unsupported_parameter")
    return found
