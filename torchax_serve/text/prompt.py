"""From what a caller gives to what a model takes: a prompt becomes checked token ids, parameters become a config."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.position_limits import has_end, max_positions
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.detokenizer import Detokenizer, NoText
from torchax_serve.validation.argument_checks import MAX_PROMPT_CHARS, check_text, is_list, short_repr

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_MAX_NEW_TOKENS = 256
"""Length of an answer where neither the request nor the model's ``generation_config`` says one.

transformers' own default, 20 tokens in all, cuts nearly every answer short; its text pipeline uses 256 as well.
"""
DEFAULT_CHAT_MAX_NEW_TOKENS = 1024
"""The same for the answer in a chat: chat models end their answers themselves, and some think first."""


class TextModel(Protocol):
    """What text in, text out needs of a model."""

    @property
    def name(self) -> str:
        """As messages call it."""

    @property
    def config(self) -> Any:
        """The transformers config."""

    @property
    def generation_config(self) -> Any:
        """The transformers generation config: what holds where a request says nothing."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or None."""

    def iter_tokens(
        self,
        prompt_ids: Sequence[int],
        generation_config: GenerationConfig,
        *,
        stop_strings: Any = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
    ) -> Iterator[int]:
        """Yields the new token ids, the end-of-sequence token included; closing it stops the decoding."""


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt with everything decided.

    Attributes:
        prompt_ids: the prompt's token ids.
        generation_config: limits and sampling, without stop strings.
        stop_strings: texts that end the answer; the text layer looks for them.
        seed: of this request alone, or None.
        params: what was asked; for options that a generation config has no place for.
    """

    prompt_ids: tuple[int, ...]
    generation_config: GenerationConfig
    stop_strings: tuple[str, ...]
    seed: int | None
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        eos = self.generation_config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else [int(token_id) for token_id in eos])


def make_request(
    model: TextModel,
    prompt_ids: Sequence[int],
    params: SamplingParams | None,
    *,
    default_max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
) -> PreparedPrompt:
    """Checks `prompt_ids` against `model` and merges `params` with the model's own generation config.

    Where neither says how long the answer may be, it ends after `default_max_new_tokens` or with the model's positions.

    Raises:
        InvalidArgumentError: an empty or too long prompt, a token id out of range, or parameters that contradict.
    """
    params = given_or_default(params)
    ids = checked_ids(model, prompt_ids)
    _check_positions(model, ids)
    config, stop_strings = merged(model, params)
    if config.max_new_tokens is None and config.max_length is None:
        limit = position_limit(model)
        has_encoder = getattr(model.config, "is_encoder_decoder", False)  # which has read the prompt
        room = default_max_new_tokens if limit is None else max(1, limit - (1 if has_encoder else len(ids)))
        config.max_new_tokens = min(default_max_new_tokens, room)
    return PreparedPrompt(ids, config, stop_strings, params.seed, params)


def given_or_default(params: SamplingParams | None) -> SamplingParams:
    """What was asked for; nothing in particular where that is None."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"params: expected SamplingParams or None, got {type(params).__name__}")
    return params or SamplingParams()


def merged(model: TextModel, params: SamplingParams) -> tuple[GenerationConfig, tuple[str, ...]]:
    """What `params` and the model's own generation config ask for together, and its stop strings out of it."""
    config = params.merged_into(model.generation_config)
    stops = config.stop_strings or ()
    config.stop_strings = None
    return config, (stops,) if isinstance(stops, str) else tuple(stops)


def encode_prompt(model: TextModel, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a plain prompt, with the special tokens that the tokenizer adds; ids pass through.

    Raises:
        InvalidArgumentError: an empty prompt, or text for a model without a tokenizer.
    """
    prompt = _ids_of_array(prompt)
    if not isinstance(prompt, str) and not is_list(prompt):
        raise InvalidArgumentError(f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}")
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt:
        raise InvalidArgumentError("prompt: expected some text, got an empty string; write at least one character")
    check_text("prompt", prompt, MAX_PROMPT_CHARS)
    return list(need_tokenizer(model)(prompt)["input_ids"])


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a rendered conversation, in which the template has written the special tokens."""
    check_text("messages", text, MAX_PROMPT_CHARS)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids_of_array(prompt: Any) -> Any:
    """The ids of a one-dimensional array of whole numbers, NumPy's, JAX's or PyTorch's; anything else as it is."""
    if not hasattr(prompt, "tolist") or not hasattr(prompt, "ndim"):
        return prompt
    if prompt.ndim != 1:
        raise InvalidArgumentError(
            f"prompt: expected token ids in one dimension, got an array with {prompt.ndim}; give one row of it"
        )
    return prompt.tolist()


def detokenizer_of(model: TextModel, stop_strings: Sequence[str] = ()) -> Detokenizer | NoText:
    """What makes text of the tokens of `model`; text is empty where the model has no tokenizer.

    Raises:
        InvalidArgumentError: there are stop strings, which nobody would find without text.
    """
    if model.tokenizer is not None:
        return Detokenizer(model.tokenizer)
    if stop_strings:
        raise InvalidArgumentError(
            f"stop: expected no stop strings for {model.name}, which has no tokenizer, got {short_repr(stop_strings)}; "
            "write stop_token_ids, or put its tokenizer files beside the weights"
        )
    return NoText()


def need_tokenizer(model: TextModel) -> Any:
    """The tokenizer of `model`.

    Raises:
        InvalidArgumentError: it has none.
    """
    if model.tokenizer is None:
        raise InvalidArgumentError(
            f"{model.name} has no tokenizer, and text needs one; put its tokenizer files beside the weights, "
            "or give token ids"
        )
    return model.tokenizer


def position_limit(model: TextModel, *, of_encoder: bool = False) -> int | None:
    """How many tokens, prompt and answer together, `model` can hold, or its encoder; None where nothing limits them."""
    text_config = _text_config(model, of_encoder=of_encoder)
    limits = [getattr(model, "max_len", None), max_positions(text_config)]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _text_config(model: TextModel, *, of_encoder: bool) -> Any:
    return model.config.get_text_config(encoder=True) if of_encoder else model.config.get_text_config(decoder=True)


def checked_ids(model: TextModel, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """`prompt_ids` as Python's own numbers.

    Raises:
        InvalidArgumentError: there are none, or one is no whole number or outside the vocabulary of `model`.
    """
    if len(prompt_ids) == 0:
        raise InvalidArgumentError("prompt: expected at least one token, got none; an empty prompt has no continuation")
    for item in prompt_ids:
        if isinstance(item, bool) or not isinstance(item, numbers.Integral):
            raise InvalidArgumentError(f"prompt: expected token ids (whole numbers), got {short_repr(item)} among them")
    ids = tuple(int(token_id) for token_id in prompt_ids)
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    vocab_size = getattr(_text_config(model, of_encoder=has_encoder), "vocab_size", None)
    beyond = next((i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)), None)
    if beyond is not None:
        expected = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
        raise InvalidArgumentError(f"prompt: expected token ids {expected} for {model.name}, got {short_repr(beyond)}")
    return ids


def _check_positions(model: TextModel, ids: Sequence[int]) -> None:
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    limit = position_limit(model, of_encoder=has_encoder)
    if limit is not None and len(ids) > limit and has_end(_text_config(model, of_encoder=has_encoder)):
        raise InvalidArgumentError(
            f"prompt: expected at most {limit} tokens, the positions of {model.name}, got {len(ids)}; shorten it"
        )
