"""Thinking budgets: the most tokens of reasoning that a request allows its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model_adapters.errors import UnsupportedModelError
from torchax_serve.sampling.thinking_budget import MarkerTokens, ThinkingBudgetMasks
from torchax_serve.sampling.token_masks import TokenMasks
from torchax_serve.server.errors import bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.response_family import ResponseFamily
from torchax_serve.server.response_parsing import begun_answer
from torchax_serve.server.schemas import ChatRequest, TextRequest
from torchax_serve.validation.argument_checks import short_repr

PROMPT_END_TOKENS = 256
"""Tokens at the end of a prompt whose text shows how the answer begins."""
FIELD = "thinking_token_budget"
NO_LIMIT = -1
EFFORTS: Mapping[str, float] = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Share of an answer's tokens that its reasoning may have, by effort, as OpenRouter has it; others: any number."""


def text_of_tokens(service: ModelService, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, special ones included."""
    tokenizer: Any = service.model.text_tokenizer
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def asked_budget(request: TextRequest) -> int | None:
    """Returns the most tokens of reasoning that a request names; None: any number.

    Raises:
        ApiError: 400 for a number that is none of tokens.
    """
    budget = request.thinking_token_budget
    if budget is not None and budget < NO_LIMIT:
        message = f"{FIELD}: expected a whole number >= 0, or -1 for any, got {short_repr(budget)}"
        raise bad_request(message, FIELD, "invalid_value")
    return None if budget == NO_LIMIT else budget


def effort_budget(
    request: ChatRequest, template: str, family: ResponseFamily | None, answer_len: int | None
) -> int | None:
    """Returns the most tokens of reasoning by a request's effort, which no template reads.

    Args:
        request: The request.
        template: Source of the chat template.
        family: How answers are spelled.
        answer_len: Most tokens of the answer; None without a limit.
    """
    effort = request.reasoning_effort
    if effort is None or effort not in EFFORTS or "reasoning_effort" in template:
        return None
    if family is None or family.reasoning_markers is None:
        return None
    if effort == "none":
        return None if "enable_thinking" in template else 0
    return None if answer_len is None else int(EFFORTS[effort] * answer_len)


def with_budget(
    service: ModelService,
    family: ResponseFamily | None,
    budget: int | None,
    answer_len: int | None,
    text_of: Callable[[Sequence[int]], str],
    masks: Callable[[Sequence[int]], TokenMasks] | None,
    *,
    is_effort: bool = False,
) -> Callable[[Sequence[int]], TokenMasks] | None:
    """Returns what makes the masks of an answer to a prompt, which hold it to a budget.

    Args:
        service: The model.
        family: How its answers are spelled.
        budget: Most tokens of its reasoning; None: any number.
        answer_len: Most tokens of the answer; None without a limit.
        text_of: Returns the text at the end of a prompt's tokens, which may have begun the answer.
        masks: Makes further masks of an answer to a prompt; None: it has none.
        is_effort: Whether the budget is that of an effort, which a model without tokens for its markers need not hold.

    Raises:
        ApiError: 400 for a model whose reasoning has no markers.
    """
    if budget is None:
        return masks
    markers = None if family is None else family.reasoning_markers
    if family is None or markers is None or service.model.text_tokenizer is None:
        message = f"{FIELD}: expected a model whose reasoning stands between markers, got {service.name}; leave it out"
        raise bad_request(message, FIELD, "unsupported_parameter")
    if answer_len is not None and budget >= answer_len:
        return masks
    try:
        tokens = MarkerTokens(markers, service.model.text_tokenizer)
    except UnsupportedModelError as error:
        if is_effort:
            note_once(f"reasoning_effort: it has no effect on {service.name}: {error}")
            return masks
        raise bad_request(f"{FIELD}: {error}", FIELD, "unsupported_parameter") from error

    def made(prompt_ids: Sequence[int]) -> TokenMasks:
        begun = begun_answer(family, text_of(prompt_ids))
        return ThinkingBudgetMasks(budget, tokens, begun, None if masks is None else masks(prompt_ids))

    return made
