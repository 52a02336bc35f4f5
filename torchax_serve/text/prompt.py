"""Preparation of requests: checked token ids, and parameters with the model's defaults."""

from __future__ import annotations

import copy
import numbers
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from model_adapters.program.position_limits import has_end, max_positions
from model_adapters.program.turn_ends import ends_among
from torchax_serve.request_params import RequestParams, id_list
from torchax_serve.sampling_params import NEVER_A_TOKEN, NO_PARAMS, SamplingParams
from torchax_serve.scheduler.request import Request, TokenIds
from torchax_serve.text.detokenizer import Detokenizer, NoText
from torchax_serve.validation.argument_checks import MAX_PROMPT_CHARS, check_text, is_list, short_repr

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
    def request_defaults(self) -> Any:
        """Generation config of transformers, or its values: the defaults of requests."""

    @property
    def text_tokenizer(self) -> Any:
        """Tokenizer of transformers, or what requests of text use of it; None if there is none."""

    def submit_prompt(self, request: Request, fork_of: Any = None) -> Any:
        """Submits a checked request and returns its handle.

        `fork_of` is the handle of another answer to the same prompt.
        """


@dataclass(frozen=True)
class TextFacts:
    """What requests of text need to know of a model, read from its configuration once.

    Attributes:
        name: Name of the model, for errors.
        has_encoder: Whether an encoder reads the prompt.
        vocab_size: Number of tokens that prompts can have; None if the configuration does not say.
        answer_vocab_size: The same of answers.
        max_len: Most tokens, prompt and answer; of a model with an encoder those of the decoder; None if unlimited.
        max_prompt_len: Most tokens of a prompt, beyond which there are no positions; None if unlimited.
    """

    name: str
    has_encoder: bool
    vocab_size: int | None
    answer_vocab_size: int | None
    max_len: int | None
    max_prompt_len: int | None

    @classmethod
    def of(cls, name: str, config: Any, max_len: Any = None) -> Self:
        """Reads the facts.

        Args:
            name: Name of the model.
            config: Its configuration.
            max_len: Most tokens, where the configuration has no more than what was recorded of it.
        """
        has_encoder = getattr(config, "is_encoder_decoder", False)
        prompts, answers = _text_config(config, of_encoder=has_encoder), _text_config(config, of_encoder=False)
        own = max_len if isinstance(max_len, int) and max_len > 0 else None
        limit = own or _positive(max_positions(prompts))
        return cls(
            name,
            has_encoder,
            getattr(prompts, "vocab_size", None),
            getattr(answers, "vocab_size", None),
            own or _positive(max_positions(answers)),
            limit if limit is not None and has_end(prompts) else None,
        )


def facts_of(model: TextModel) -> TextFacts:
    """Returns the facts of a model, which most have read."""
    found = getattr(model, "text_facts", None)
    return found if found is not None else TextFacts.of(model.name, model.config, getattr(model, "max_len", None))


def make_request(
    model: TextModel,
    prompt_ids: Sequence[int],
    params: SamplingParams | None,
    *,
    default_max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
) -> Request:
    """Returns the request of checked `prompt_ids`, with `params` and the model's defaults.

    If neither limits the answer, it ends after `default_max_new_tokens` or at the model's last position.

    Raises:
        InvalidArgumentError: an empty or too long prompt, a token id out of range, or contradictory parameters.
    """
    given, facts = given_or_default(params), facts_of(model)
    ids = checked_ids(model, prompt_ids)
    _check_positions(facts, ids)
    num_before = 1 if facts.has_encoder else len(ids)  # an encoder has read the prompt
    most = default_max_new_tokens
    if facts.max_len is not None:
        most = min(most, max(1, facts.max_len - num_before))
    return Request.of(ids, RequestParams.resolve(given, _with_turn_ends(model), max_new_tokens=most))


def make_media_request(model: TextModel, inputs: Mapping[str, Any], params: SamplingParams | None) -> Request:
    """Returns the request of a conversation with images or audio.

    `params` are merged with the model's own generation config.

    Args:
        model: The model.
        inputs: Tensors by argument of ``generate``, as `torchax_serve.multimodal.processor.media_inputs` returns them.
        params: Sampling parameters.
    """
    given, most = given_or_default(params), DEFAULT_CHAT_MAX_NEW_TOKENS
    resolved = RequestParams.resolve(given, _with_turn_ends(model), max_new_tokens=most)
    return Request.of(TokenIds(inputs["input_ids"][0].tolist()), resolved, generate_inputs=inputs)


def given_or_default(params: SamplingParams | None) -> SamplingParams:
    """Returns `params`, or parameters without any option for None."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"params: expected SamplingParams or None, got {type(params).__name__}")
    return params or NO_PARAMS


def _with_turn_ends(model: TextModel) -> Any:
    """Returns the model's generation config, in which the tokenizer's ends of a turn count."""
    config: Any = model.request_defaults
    known = id_list(config.eos_token_id)
    answer_vocab_size = facts_of(model).answer_vocab_size
    ends = [
        end
        for end in turn_ends(model.text_tokenizer)
        if end not in known and (answer_vocab_size is None or end < answer_vocab_size)
    ]
    if not ends or NEVER_A_TOKEN in known:
        return config
    config = copy.copy(config)
    config.eos_token_id = [*known, *ends]
    return config


def end_ids(model: TextModel) -> list[int]:
    """Returns the ids of the tokens that end an answer of a model."""
    return [end for end in id_list(_with_turn_ends(model).eos_token_id) if end != NEVER_A_TOKEN]


def encode_prompt(model: TextModel, prompt: str | Sequence[int]) -> list[int]:
    """Returns the token ids of a plain prompt, with the tokenizer's special tokens.

    Ids are returned unchanged. An empty text is a prompt if the tokenizer adds a token, such as ``<bos>``.

    Raises:
        InvalidArgumentError: a prompt without a token, or text for a model without a tokenizer.
    """
    prompt = _ids_of_array(prompt)
    if not isinstance(prompt, str) and not is_list(prompt):
        raise InvalidArgumentError(f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}")
    if not isinstance(prompt, str):
        return list(prompt)
    check_text("prompt", prompt, MAX_PROMPT_CHARS)
    ids = list(need_tokenizer(model)(prompt)["input_ids"])
    if not ids and not prompt:
        raise InvalidArgumentError(
            f"prompt: expected some text, got an empty string, to which the tokenizer of {model.name} adds no token; "
            "write at least one character"
        )
    return ids


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
    if model.text_tokenizer is not None:
        return Detokenizer(model.text_tokenizer)
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
    if model.text_tokenizer is None:
        raise InvalidArgumentError(
            f"{model.name} has no tokenizer, and text needs one; put its tokenizer files next to the weights, "
            "or give token ids"
        )
    return model.text_tokenizer


def position_limit(model: TextModel) -> int | None:
    """Returns the most tokens, prompt and answer, of `model`; None if unlimited."""
    own = _positive(getattr(model, "max_len", None))  # of a bundle, whose configuration has no more than was recorded
    return own or facts_of(model).max_len


def _text_config(config: Any, *, of_encoder: bool) -> Any:
    return config.get_text_config(encoder=True) if of_encoder else config.get_text_config(decoder=True)


def _positive(number: Any) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def checked_ids(model: TextModel, prompt_ids: Sequence[int]) -> TokenIds:
    """Checks `prompt_ids` and returns them as Python integers.

    The only check of a caller's ids: whoever gets `TokenIds` does not look at them again. How long a prompt may be is
    checked for positions (`make_request`), and by the engine and its scheduler for its cache
    (`SchedulerConfig.check_prompt`).

    Raises:
        InvalidArgumentError: no token id, or one that is not an integer in the vocabulary of `model`.
    """
    if len(prompt_ids) == 0:
        raise InvalidArgumentError("prompt: expected at least one token, got none; an empty prompt has no continuation")
    for item in prompt_ids:
        if isinstance(item, bool) or not isinstance(item, numbers.Integral):
            raise InvalidArgumentError(f"prompt: expected token ids (whole numbers), got {short_repr(item)} among them")
    ids, vocab_size = TokenIds(map(int, prompt_ids)), facts_of(model).vocab_size
    if min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size):
        return ids
    beyond = next((i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)), None)
    expected = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
    raise InvalidArgumentError(f"prompt: expected token ids {expected} for {model.name}, got {short_repr(beyond)}")


def _check_positions(facts: TextFacts, ids: Sequence[int]) -> None:
    limit = facts.max_prompt_len
    if limit is not None and len(ids) > limit:
        raise InvalidArgumentError(
            f"prompt: expected at most {limit} tokens, the positions of {facts.name}, got {len(ids)}; shorten it"
        )


def check_one_answer(config: Any) -> None:
    """Raises UnsupportedArgumentError if `config` asks for several answers."""
    if (config.num_return_sequences or 1) != 1:
        raise UnsupportedArgumentError(
            f"num_return_sequences: expected 1 for tokens of one answer, got "
            f"{short_repr(config.num_return_sequences)}; call generate_batch() with SamplingParams(n=...)"
        )


def tokens_request(
    model: TextModel,
    prompt_ids: Sequence[int],
    config: Any,
    given: SamplingParams | None,
    *,
    inputs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    masks: Any = None,
) -> Request:
    """Returns the request of an answer in tokens, with the defaults of a generation config.

    Raises:
        InvalidArgumentError: token ids outside the vocabulary.
        UnsupportedArgumentError: stop strings, or several answers.
    """
    check_one_answer(config)
    # What ``generate`` prepares of inputs has the prompt's ids.
    ids = TokenIds((0,)) if inputs is not None else checked_ids(model, encode_prompt(model, prompt_ids))
    given = given_or_default(given)
    for name in ("stop", "n"):
        if (value := getattr(given, name)) not in (None, 1):
            raise UnsupportedArgumentError(
                f"{name}: expected None for tokens of one answer, got {short_repr(value)}; call "
                f"{'stream()' if name == 'stop' else 'generate_batch()'}"
            )
    params = RequestParams.resolve(given, config, max_new_tokens=DEFAULT_MAX_NEW_TOKENS, seed=seed)
    params.config.stop_strings = config.stop_strings  # for ``generate``, which refuses them without a tokenizer
    return Request.of(ids, params, generate_inputs=inputs, masks=masks)


_turn_ends: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the tokenizer's ``eos`` and of its template's ends of a turn.

    These are the special tokens in the template that end a turn in all vocabularies.
    """
    if not hasattr(tokenizer, "special_tokens_map") or not hasattr(tokenizer, "added_tokens_decoder"):
        return ()  # none, or one of another library, which names no special tokens
    eos = tokenizer.special_tokens_map.get("eos_token")
    key = (getattr(tokenizer, "chat_template", None), None if eos is None else str(eos))
    known = _turn_ends.get(tokenizer)
    if known is None or known[0] != key:
        known = _turn_ends[tokenizer] = (key, _ends_of(tokenizer, *key))
    return known[1]


def _ends_of(tokenizer: Any, template: Any, eos: str | None) -> tuple[int, ...]:
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    shown = [special[text] for text in ends_among(special) if isinstance(template, str) and text in template]
    own = None if eos is None else special.get(eos, _id_of(tokenizer, eos))
    return tuple(dict.fromkeys(shown if own is None else [own, *shown]))


def _id_of(tokenizer: Any, text: str) -> int | None:
    if getattr(tokenizer, "is_fast", False):
        found: int | None = tokenizer.backend_tokenizer.token_to_id(text)
        return found
    own = tokenizer.eos_token_id
    return own if isinstance(own, int) else None
