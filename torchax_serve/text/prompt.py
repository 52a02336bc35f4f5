"""Preparation of requests: checked token ids and a generation config.

The ids come from a prompt, the config from parameters.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.position_limits import has_end, max_positions
from torchax_serve.sampling_params import NEVER_A_TOKEN, SamplingParams
from torchax_serve.text.detokenizer import Detokenizer, NoText
from torchax_serve.text.turn_ends import turn_ends
from torchax_serve.validation.argument_checks import MAX_PROMPT_CHARS, check_text, is_list, short_repr

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_MAX_NEW_TOKENS = 256
"""Most tokens of an answer if neither the request nor the model's ``generation_config`` sets a limit.

transformers' default of 20 tokens, prompt included, cuts nearly every answer short; its text pipeline uses 256, too.
"""
DEFAULT_CHAT_MAX_NEW_TOKENS = 1024
"""The same in a chat: chat models end their answers themselves, and some write their reasoning first."""


class TextModel(Protocol):
    """Protocol of the models that continue texts."""

    @property
    def name(self) -> str:
        """Name of the model, for errors."""

    @property
    def config(self) -> Any:
        """Configuration of transformers."""

    @property
    def generation_config(self) -> Any:
        """Generation config of transformers, with the defaults of requests."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers, or None."""

    def iter_tokens(
        self,
        prompt_ids: Sequence[int],
        generation_config: GenerationConfig,
        *,
        inputs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
        masks: Any = None,
        fork_of: Any = None,
    ) -> Iterator[int]:
        """Yields the new token ids, the end-of-sequence token included.

        Closing the iterator stops the decoding. `fork_of` is the iterator of another answer to the same prompt.
        """


@dataclass(frozen=True)
class PreparedPrompt:
    """A checked prompt with its merged options.

    Attributes:
        prompt_ids: Token ids of the prompt.
        generation_config: Limits and sampling options, without stop strings.
        stop_strings: Texts that end the answer; the text layer looks for them.
        seed: Seed of this request, or None.
        params: The caller's parameters, for options that a generation config does not have.
        inputs: Tensors by argument of ``generate``, for a prompt with images or audio; None for text.
        masks: `torchax_serve.sampling.token_masks.TokenMasks` of this request; None for all tokens.
        answer_index: Number of the answer among those to its prompt, from 0 on.
    """

    prompt_ids: tuple[int, ...]
    generation_config: GenerationConfig
    stop_strings: tuple[str, ...]
    seed: int | None
    params: SamplingParams = field(default_factory=SamplingParams)
    inputs: Mapping[str, Any] | None = field(default=None, repr=False)
    masks: Any = field(default=None, repr=False)
    answer_index: int = 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
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
    """Returns the request of checked `prompt_ids`, with `params` merged into the model's config.

    If neither limits the answer, it ends after `default_max_new_tokens` or at the model's last position.

    Raises:
        InvalidArgumentError: an empty or too long prompt, a token id out of range, or contradictory parameters.
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


def make_media_request(model: TextModel, inputs: Mapping[str, Any], params: SamplingParams | None) -> PreparedPrompt:
    """Returns the request of a conversation with images or audio.

    `params` are merged with the model's own generation config.

    Args:
        model: The model.
        inputs: Tensors by argument of ``generate``, as `torchax_serve.multimodal.processor.media_inputs` returns them.
        params: Sampling parameters.
    """
    params = given_or_default(params)
    config, stop_strings = merged(model, params)
    if config.max_new_tokens is None and config.max_length is None:
        config.max_new_tokens = DEFAULT_CHAT_MAX_NEW_TOKENS
    prompt_ids = tuple(inputs["input_ids"][0].tolist())
    return PreparedPrompt(prompt_ids, config, stop_strings, params.seed, params, inputs)


def given_or_default(params: SamplingParams | None) -> SamplingParams:
    """Returns `params`, or parameters without any option for None."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"params: expected SamplingParams or None, got {type(params).__name__}")
    return params or SamplingParams()


def merged(model: TextModel, params: SamplingParams) -> tuple[GenerationConfig, tuple[str, ...]]:
    """Returns the model's generation config merged with `params`, and its stop strings.

    The stop strings are no part of the merged config.
    """
    config = params.merged_into(_with_turn_ends(model))
    stops = config.stop_strings or ()
    config.stop_strings = None
    return config, (stops,) if isinstance(stops, str) else tuple(stops)


def _with_turn_ends(model: TextModel) -> GenerationConfig:
    """Returns the model's generation config, in which the tokenizer's ends of a turn count."""
    config: Any = model.generation_config
    known = _as_list(config.eos_token_id)
    vocab_size = getattr(_text_config(model, of_encoder=False), "vocab_size", None)
    ends = [end for end in turn_ends(model.tokenizer) if end not in known and (vocab_size is None or end < vocab_size)]
    if not ends or NEVER_A_TOKEN in known:
        return config
    config = copy.deepcopy(config)
    config.eos_token_id = [*known, *ends]
    return config


def _as_list(ids: Any) -> list[int]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(each) for each in ids]


def end_ids(model: TextModel) -> list[int]:
    """Returns the ids of the tokens that end an answer of a model."""
    return [end for end in _as_list(_with_turn_ends(model).eos_token_id) if end != NEVER_A_TOKEN]


def encode_prompt(model: TextModel, prompt: str | Sequence[int]) -> list[int]:
    """Returns the token ids of a plain prompt, with the tokenizer's special tokens.

    Ids are returned unchanged.

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
    """Returns the token ids of a rendered conversation, which already has its special tokens."""
    check_text("messages", text, MAX_PROMPT_CHARS)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids_of_array(prompt: Any) -> Any:
    """Returns the ids of a one-dimensional integer array of NumPy, JAX or PyTorch.

    Anything else is returned unchanged.
    """
    if not hasattr(prompt, "tolist") or not hasattr(prompt, "ndim"):
        return prompt
    if prompt.ndim != 1:
        raise InvalidArgumentError(
            f"prompt: expected token ids in one dimension, got an array with {prompt.ndim}; give one row of it"
        )
    return prompt.tolist()


def detokenizer_of(model: TextModel, stop_strings: Sequence[str] = ()) -> Detokenizer | NoText:
    """Returns the detokenizer of `model`; its text is empty if the model has no tokenizer.

    Raises:
        InvalidArgumentError: stop strings for a model without a tokenizer.
    """
    if model.tokenizer is not None:
        return Detokenizer(model.tokenizer)
    if stop_strings:
        raise InvalidArgumentError(
            f"stop: expected no stop strings for {model.name}, which has no tokenizer, got {short_repr(stop_strings)}; "
            "write stop_token_ids, or put its tokenizer files next to the weights"
        )
    return NoText()


def need_tokenizer(model: TextModel) -> Any:
    """Returns the tokenizer of `model`.

    Raises:
        InvalidArgumentError: it has none.
    """
    if model.tokenizer is None:
        raise InvalidArgumentError(
            f"{model.name} has no tokenizer, and text needs one; put its tokenizer files next to the weights, "
            "or give token ids"
        )
    return model.tokenizer


def position_limit(model: TextModel, *, of_encoder: bool = False) -> int | None:
    """Returns the most tokens, prompt and answer, of `model` or its encoder; None if unlimited."""
    own = getattr(model, "max_len", None)
    # The configuration of a bundle has no more than what was recorded of it.
    limit = own if isinstance(own, int) and own > 0 else max_positions(_text_config(model, of_encoder=of_encoder))
    return limit if isinstance(limit, int) and limit > 0 else None


def _text_config(model: TextModel, *, of_encoder: bool) -> Any:
    return model.config.get_text_config(encoder=True) if of_encoder else model.config.get_text_config(decoder=True)


def checked_ids(model: TextModel, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Checks `prompt_ids` and returns them as Python integers.

    Raises:
        InvalidArgumentError: no token id, or one that is not an integer in the vocabulary of `model`.
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
