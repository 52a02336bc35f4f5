"""`BatchSampler`: samples for a static batch, whose rows share options and start together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.jax_settings import jax_promotion
from torchax_serve.request_params import (
    CALLER_OPTIONS,
    RequestParams,
    id_list,
    unsupported_options,
    validate_options,
)
from torchax_serve.sampling.forbidden_tokens import check_tokens_left
from torchax_serve.sampling.sample import append, choose
from torchax_serve.sampling.sampler import SlotParams
from torchax_serve.sampling.transformers_behaviour import installed_rules
from torchax_serve.sampling.types import LEVELS, Level, RowOptions, SamplerSpec, SamplerState
from torchax_serve.sampling_params import NEVER_A_TOKEN, invalid
from torchax_serve.validation.argument_checks import MAX_INT

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Options that do not change how tokens are sampled; the caller's loop honours them.
_LOOP_OPTIONS = CALLER_OPTIONS | {
    "use_cache",
    "cache_implementation",
    "max_time",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of a static batch, the same in every step."""

    rows: RowOptions  # before the first new token
    max_new_tokens: jax.Array  # int32[], after which all rows have ended
    eos_ids: jax.Array | None  # int32[num_eos], tokens that end a row
    pad_id: jax.Array | None  # int32[], token of rows that have ended; None: they go on sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchState:
    """State of a static batch between steps; donate it."""

    sampler: SamplerState  # a slot for each row
    num_new: jax.Array  # int32[], new tokens so far
    ended: jax.Array  # bool[batch]


class BatchSampler:
    """Samples the tokens of a static batch, as ``generate`` does.

    Lengths count every token of a row, left padding included, as transformers counts them.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt_ids: np.ndarray,
        *,
        vocab_size: int,
        seed: int,
        attention_mask: np.ndarray | None = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        """Prepares the state before the first token.

        Args:
            config: Generation config after ``generate`` has filled in the defaults. The maximum length is
                ``prompt_len + max_new_tokens`` if `max_new_tokens` is set, else `max_length`.
            prompt_ids: int[batch, prompt_len], left-padded.
            vocab_size: Number of columns of the logits.
            seed: Seed of random draws, 0 to 2**64 - 1; each row draws from it by its number.
            attention_mask: [batch, prompt_len], zero at padding; None if there is no padding.
            sharding: Placement of the state, that of the logits; None: JAX's default.

        Raises:
            InvalidArgumentError: an option is out of its range, is not supported or contradicts another; the arrays do
                not fit each other.
        """
        row, num_padding = _checked(config, prompt_ids, attention_mask, vocab_size, seed)
        self._row, self._prompt_len, self._vocab_size = row, prompt_ids.shape[1], vocab_size
        slots = SlotParams(len(prompt_ids), vocab_size)
        written = [
            slots.set(index, row, ids, num_padding=padding, seed_row=index)
            for index, (ids, padding) in enumerate(zip(np.asarray(prompt_ids).tolist(), num_padding, strict=True))
        ]
        tables, history = (
            None if rows[0] is None else jax.tree.map(_stacked, *rows) for rows in zip(*written, strict=True)
        )
        rows = slots.batch_rows(np.arange(len(prompt_ids), dtype=np.int32), len(prompt_ids))
        least: Level = "penalties" if rows.needs_tables else "greedy"
        level = max(rows.level, least, key=LEVELS.index)
        self._spec = SamplerSpec(level, draws=bool(config.do_sample), nan_is_invalid=False)
        eos = [token for token in id_list(config.eos_token_id) if token != NEVER_A_TOKEN]
        pad = None if not eos else eos[0] if config.pad_token_id is None else int(config.pad_token_id)
        arrays: Any = (
            _int32(row.max_new_tokens),
            np.array(eos, np.int32) if eos else None,
            None if pad is None else _int32(pad),
        )
        state: Any = (np.zeros(len(prompt_ids), np.int32), tables, history)
        ended: Any = np.zeros(len(prompt_ids), bool)
        self._options, self.state = jax.device_put(
            (
                BatchOptions(RowOptions(rows.ints, rows.floats), *arrays),
                BatchState(SamplerState(*state), _int32(0), ended),
            ),
            sharding,
        )

    def sample(self, logits: jax.Array, *, keep_scores: bool = False) -> tuple[jax.Array, jax.Array | None]:
        """Dispatches the sampling of a token for each row and returns at once.

        Rows that have ended go on with the pad token if there is an end-of-sequence token.

        Args:
            logits: float[batch, vocab], of each row's last token.
            keep_scores: Whether to return the processed scores.

        Returns:
            Tokens int32[batch], `INVALID_TOKEN` for a row without one to draw; and scores float32[batch, vocab] or
            None.
        """
        spec = dataclasses.replace(self._spec, scores=keep_scores)
        tokens, self.state, scores = sample_batch(spec, self._options, self.state, logits)
        return tokens, scores

    def check_tokens_left(self, tokens: Sequence[int]) -> None:
        """Does nothing if a token may follow a row's prompt and answer so far.

        Raises:
            NoTokenLeftError: The options forbid all together; with their names.
        """
        check_tokens_left(self._row, None, tokens, self._prompt_len, vocab_size=self._vocab_size)

    def set_ended(self, ended: np.ndarray) -> None:
        """Sets which rows have ended, bool[batch], if the host knows more than the device."""
        self.state = dataclasses.replace(self.state, ended=to_device(ended, bool))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
@jax_promotion()
def sample_batch(
    spec: SamplerSpec, options: BatchOptions, state: BatchState, logits: jax.Array
) -> tuple[jax.Array, BatchState, jax.Array | None]:
    """Returns tokens int32[batch], the new state, and scores float32[batch, vocab] or None."""
    rows = options.rows.advanced(state.num_new)
    tokens, scores = choose(spec, rows, state.sampler, logits)
    if options.pad_id is not None:
        tokens = jnp.where(state.ended, options.pad_id, tokens)
    num_new = state.num_new + 1
    ended = state.ended | (num_new >= options.max_new_tokens)
    if options.eos_ids is not None:
        ended |= (tokens[:, None] == options.eos_ids).any(-1)
    return tokens, BatchState(append(spec, rows, state.sampler, tokens), num_new, ended), scores


def _checked(
    config: GenerationConfig, prompt_ids: np.ndarray, attention_mask: np.ndarray | None, vocab_size: int, seed: int
) -> tuple[RequestParams, list[int]]:
    """Returns options of the rows and padding lengths, from checked `BatchSampler` arguments.

    Penalties skip that padding.
    """
    validate_options(config)
    if unsupported := unsupported_options(config, _LOOP_OPTIONS):
        remedy = "run transformers' own loop for these"
        raise invalid("generation_config", "options that sampling on the device honours", unsupported, remedy)
    if np.ndim(prompt_ids) != 2 or not np.issubdtype(prompt_ids.dtype, np.integer):
        got = f"{prompt_ids.dtype}{list(prompt_ids.shape)}"
        raise invalid("prompt_ids", "int[batch, prompt_len]", got, "reshape")
    num_padding = [0] * len(prompt_ids)
    if attention_mask is not None:
        if np.shape(attention_mask) != prompt_ids.shape:
            remedy = "give the mask of these very prompts"
            raise invalid("attention_mask", f"shape {prompt_ids.shape}", np.shape(attention_mask), remedy)
        if installed_rules().penalty_skips_padding:
            num_padding = (np.asarray(attention_mask) != 0).argmax(axis=1).tolist()  # 0 for a row that is all padding
    prompt_len = prompt_ids.shape[1]
    row = RequestParams.of_checked(config, seed=seed)
    row.check_ids(vocab_size)
    return dataclasses.replace(row, max_new_tokens=_max_length(config, prompt_len) - prompt_len), num_padding


def _max_length(config: GenerationConfig, prompt_len: int) -> int:
    if config.max_new_tokens is not None:
        return min(prompt_len + int(config.max_new_tokens), MAX_INT)
    if config.max_length is None:
        raise invalid("max_length", "max_length or max_new_tokens to be set", None, "set max_new_tokens")
    return min(int(config.max_length), MAX_INT)


def _stacked(*rows: np.ndarray) -> np.ndarray:
    return np.stack(rows)


def _int32(number: int) -> Any:
    return np.array(number, np.int32)
