"""A generation config as device data: which steps run is structure, their numbers are arrays.

A field that is None is a step that does not run; None is part of a pytree's structure, so jit recompiles when a step
comes or goes and never when a number changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from model_adapters.bridge.host_arrays import to_device
from torchax_serve.sampling.config_options import id_list, unsupported_options, validate_options
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour, installed_rules
from torchax_serve.sampling_params import NEVER_A_TOKEN, bias_pairs, invalid
from torchax_serve.validation.argument_checks import MAX_INT

if TYPE_CHECKING:
    from transformers import GenerationConfig
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling_params import MAX_SEED, ValueRange

MIN_CANDIDATES = 128


COLDEST = 1e-5
"""Temperature below which the best token is taken: float32 scores divided by less are too coarse to draw from."""


SMALLEST_TEMPERATURE = 1e-30  # scores divided by less overflow


MAX_DECAY_STEPS = 2**20  # entries of a table of weights; the last one holds for all tokens behind it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceBias:
    """Biases of token sequences: those of one token as a row, longer ones grouped by the length of their prefix."""

    single: jax.Array  # f32[vocab]
    groups: tuple[tuple[jax.Array, jax.Array, jax.Array], ...]  # prefixes i32[n, m], last tokens i32[n], biases f32[n]

    @classmethod
    def build(cls, pairs: Iterable[tuple[tuple[int, ...], float]], vocab_size: int, name: str) -> SequenceBias:
        """From (token ids, bias) pairs; a token outside the vocabulary raises `InvalidArgumentError`, naming `name`."""
        single = np.zeros(vocab_size, np.float32)
        by_prefix_len: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for ids, bias in pairs:
            if max(ids) >= vocab_size:
                raise invalid(name, f"token ids below the vocabulary size {vocab_size}", list(ids))
            if len(ids) == 1:
                single[ids[0]] = bias
            else:
                by_prefix_len.setdefault(len(ids) - 1, []).append((ids, bias))
        groups = tuple(
            (
                to_device([ids[:-1] for ids, _ in group], np.int32),
                to_device([ids[-1] for ids, _ in group], np.int32),
                to_device([bias for _, bias in group], np.float32),
            )
            for group in by_prefix_len.values()
        )
        return cls(to_device(single, np.float32), groups)


_STATIC: Mapping[str, bool] = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerationSampling:
    """How the next token is chosen. Lengths count every token of a row, left padding included, as transformers does."""

    vocab_size: int = dataclasses.field(metadata=_STATIC)  # shapes depend on it
    do_sample: bool = dataclasses.field(metadata=_STATIC)  # greedy decoding compiles to another program
    is_cold: bool = dataclasses.field(metadata=_STATIC)  # the temperature is below `COLDEST`
    rules: TransformersBehaviour = dataclasses.field(
        metadata=_STATIC
    )  # of the installed transformers; never changes in a process
    max_length: jax.Array  # i32[], rows of this length are finished
    eos_ids: jax.Array | None  # i32[num_eos]
    pad_id: jax.Array | None  # i32[], what a finished row goes on with; None: it goes on choosing

    # Processors, in the order in which transformers applies them.
    sequence_bias: SequenceBias | None
    repetition_penalty: jax.Array | None  # f32[]
    no_repeat_ngram_size: int | None = dataclasses.field(metadata=_STATIC)  # a window's width
    bad_words: SequenceBias | None
    min_length: jax.Array | None  # i32[], shorter rows cannot end
    eos_mask: jax.Array | None  # bool[vocab], for min_length and decay
    forced_bos: jax.Array | None  # i32[]
    forced_eos_mask: jax.Array | None  # bool[vocab]
    remove_invalid_values: bool = dataclasses.field(metadata=_STATIC)
    decay_start: jax.Array | None  # i32[]
    decay_weights: jax.Array | None  # f32[num_steps], factor**i - 1 for i tokens behind decay_start
    suppress_mask: jax.Array | None  # bool[vocab]
    begin_suppress_mask: jax.Array | None  # bool[vocab]
    begin_suppress_at: jax.Array | None  # i32[]

    # Processors of sampling alone.
    temperature: jax.Array | None  # f32[]
    top_h: jax.Array | None  # f32[]
    top_k: jax.Array | None  # i32[]
    num_candidates: int = dataclasses.field(
        metadata=_STATIC
    )  # columns that top_k goes on with; a power of two, so that nearby k share it
    top_p_tail: jax.Array | None  # f32[], 1 - top_p
    min_p: jax.Array | None  # f32[]
    typical_p: jax.Array | None  # f32[]
    epsilon_cutoff: jax.Array | None  # f32[]
    eta_cutoff: jax.Array | None  # f32[]

    renormalize_logits: bool = dataclasses.field(metadata=_STATIC)

    @classmethod
    def build(
        cls,
        config: GenerationConfig,
        *,
        prompt_len: int,
        vocab_size: int,
        eos_token_ids: int | Sequence[int] | None = None,
    ) -> GenerationSampling:
        """The plan that does what ``GenerationMixin._get_logits_processor`` builds for the same config.

        Args:
            config: a generation config after ``generate`` has filled in the defaults. The longest length is
                ``prompt_len + max_new_tokens`` where `max_new_tokens` is set, else `max_length`.
            prompt_len: tokens per row of the prompt, left padding included.
            vocab_size: columns of the logits.
            eos_token_ids: the tokens that end a row; None takes ``config.eos_token_id``.

        Raises:
            InvalidArgumentError: an option out of its range, set but not honoured here, or at odds with another.
        """
        validate_options(config)
        if unsupported := [name for name in unsupported_options(config) if name not in _LOOP_OPTIONS]:
            remedy = "run transformers' own loop for these"
            raise invalid("generation_config", "options that sampling on the device honours", unsupported, remedy)
        eos = id_list(config.eos_token_id if eos_token_ids is None else eos_token_ids)
        eos = [token_id for token_id in eos if token_id != NEVER_A_TOKEN]
        max_length = _max_length(config, prompt_len)
        return cls(
            vocab_size=vocab_size,
            do_sample=bool(config.do_sample),
            is_cold=bool(config.do_sample) and config.temperature is not None and config.temperature < COLDEST,
            rules=installed_rules(),
            max_length=_int(max_length),
            eos_ids=to_device(eos, np.int32) if eos else None,
            pad_id=_int(eos[0] if config.pad_token_id is None else config.pad_token_id) if eos else None,
            renormalize_logits=config.renormalize_logits is True,
            **_history_fields(config, vocab_size, eos),
            **_length_fields(config, prompt_len, vocab_size, eos, max_length),
            **_sampling_fields(config, vocab_size),
        )


# Not a matter of choosing tokens: unsupported_options reports them to the caller, who may still sample here.
_LOOP_OPTIONS = frozenset(
    {"use_cache", "cache_implementation", "max_time", "output_attentions", "output_hidden_states", "prefill_chunk_size"}
)


def _max_length(config: GenerationConfig, prompt_len: int) -> int:
    if config.max_new_tokens is not None:
        return min(prompt_len + int(config.max_new_tokens), MAX_INT)
    if config.max_length is None:
        raise invalid("max_length", "max_length or max_new_tokens to be set", None, "set max_new_tokens")
    return min(int(config.max_length), MAX_INT)


def _int(value: int) -> jax.Array:
    return to_device(value, np.int32)


def _float(value: float | None, off: float | None = None) -> jax.Array | None:
    return None if value is None or value == off else to_device(value, np.float32)


def _mask(ids: Iterable[int], vocab_size: int) -> jax.Array:
    """bool[vocab], true at `ids`; ids outside the vocabulary have no column to mark, in transformers as here."""
    mask = np.zeros(vocab_size, bool)
    mask[[i for i in ids if 0 <= i < vocab_size]] = True
    return to_device(mask, bool)


def _inside(name: str, ids: list[int], vocab_size: int) -> list[int]:
    if any(not 0 <= i < vocab_size for i in ids):
        raise invalid(name, f"token ids from 0 to {vocab_size - 1}", ids)
    return ids


def _history_fields(config: GenerationConfig, vocab_size: int, eos: list[int]) -> dict[str, Any]:
    bias = bad_words = None
    if config.sequence_bias is not None:
        bias = SequenceBias.build(bias_pairs(config.sequence_bias), vocab_size, "sequence_bias")
    if config.bad_words_ids is not None:
        words = [tuple(word) for word in config.bad_words_ids if not (len(word) == 1 and word[0] in eos)]
        if words:  # the end-of-sequence token is never a bad word, and there may be no other
            bad_words = SequenceBias.build(
                [(word, -np.inf) for word in dict.fromkeys(words)], vocab_size, "bad_words_ids"
            )
    return {
        "sequence_bias": bias,
        "repetition_penalty": _float(config.repetition_penalty, off=1.0),
        "no_repeat_ngram_size": int(config.no_repeat_ngram_size) if config.no_repeat_ngram_size else None,
        "bad_words": bad_words,
        "suppress_mask": None if config.suppress_tokens is None else _mask(config.suppress_tokens, vocab_size),
    }


def _length_fields(
    config: GenerationConfig, prompt_len: int, vocab_size: int, eos: list[int], max_length: int
) -> dict[str, Any]:
    decay = config.exponential_decay_length_penalty
    if decay is not None:
        if not eos:
            raise invalid("exponential_decay_length_penalty", "an eos_token_id beside it", decay, "set eos_token_id")
        _inside("eos_token_id", eos, vocab_size)
    # min_length and min_new_tokens stand side by side in transformers' order and do the same: the longer one rules.
    min_length = max(config.min_length or 0, prompt_len + config.min_new_tokens if config.min_new_tokens else 0)
    min_length = min(min_length, MAX_INT)
    has_min_length = bool(eos) and min_length > 0
    forced_bos, forced_eos, begin = config.forced_bos_token_id, config.forced_eos_token_id, config.begin_suppress_tokens
    begin_at = prompt_len if prompt_len > 1 or forced_bos is None else prompt_len + 1
    return {
        "min_length": _int(min_length) if has_min_length else None,
        "eos_mask": _mask(eos, vocab_size) if has_min_length or decay is not None else None,
        "forced_bos": None if forced_bos is None else _int(_inside("forced_bos_token_id", [forced_bos], vocab_size)[0]),
        "forced_eos_mask": None
        if forced_eos is None
        else _mask(_inside("forced_eos_token_id", id_list(forced_eos), vocab_size), vocab_size),
        "remove_invalid_values": config.remove_invalid_values is True,
        "decay_start": None if decay is None else _int(min(decay[0] + prompt_len, MAX_INT)),
        "decay_weights": None if decay is None else _decay_weights(decay[1], max_length - prompt_len),
        "begin_suppress_mask": None if begin is None else _mask(begin, vocab_size),
        "begin_suppress_at": None if begin is None else _int(begin_at),
    }


def _decay_weights(factor: float, num_steps: int) -> jax.Array:
    """A table, because transformers raises the factor to its power in double precision."""
    size = (
        1 << min(max(num_steps, 1), MAX_DECAY_STEPS).bit_length()
    )  # a power of two: another max_length seldom means another shape
    with np.errstate(over="ignore"):
        return to_device(np.float64(factor) ** np.arange(size) - 1, np.float32)


def _sampling_fields(config: GenerationConfig, vocab_size: int) -> dict[str, Any]:
    names = ("temperature", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    fields: dict[str, Any] = {**dict.fromkeys(names), "top_k": None, "top_p_tail": None, "num_candidates": 0}
    if not config.do_sample:
        return fields
    off = {"temperature": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    fields |= {name: _float(getattr(config, name), off.get(name)) for name in names}
    if config.temperature is not None and config.temperature < SMALLEST_TEMPERATURE:
        fields["temperature"] = _float(SMALLEST_TEMPERATURE)
    if config.top_k:
        top_k = min(int(config.top_k), vocab_size)
        # Room for tokens that tie with the k-th, which transformers keeps: common in bfloat16 logits.
        room = max(MIN_CANDIDATES, 1 << (top_k + top_k // 2).bit_length())
        fields |= {"top_k": _int(top_k), "num_candidates": min(room, vocab_size)}
    if config.top_p is not None and config.top_p < 1.0:
        fields["top_p_tail"] = _float(1 - config.top_p)
    return fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingHistory:
    """A pytree; donate it to the step. Behind `length`, `tokens` holds zeros."""

    tokens: jax.Array  # i32[batch, capacity], prompt (left padding included) and what has been chosen
    length: jax.Array  # i32[], tokens in each row
    num_new: jax.Array  # i32[], how many of them were chosen
    keys: jax.Array  # key[batch]
    ended: jax.Array  # bool[batch]
    seen: jax.Array | None  # bool[batch, vocab], tokens under the repetition penalty; None where there is no penalty


def init_history(
    plan: GenerationSampling,
    prompt_ids: np.ndarray,
    *,
    seed: int | Sequence[int],
    attention_mask: np.ndarray | None = None,
    capacity: int | None = None,
) -> SamplingHistory:
    """The state before the first token; runs on the host.

    Args:
        plan: of this batch.
        prompt_ids: int[batch, prompt_len], left-padded.
        seed: 0 to 2**64 - 1. One number for a batch that is one request: row i draws with ``fold_in(key(seed), i)``. A
            sequence gives each row the seed of its own request, and the row draws as if it were alone.
        attention_mask: [batch, prompt_len], zero at padding; None where transformers has none either.
        capacity: tokens that a row can hold; None: the plan's `max_length`. A bucket above it saves compilations.

    Raises:
        InvalidArgumentError: shapes that do not fit each other, too little capacity, a seed out of range.
    """
    prompt_ids = np.asarray(prompt_ids)
    if prompt_ids.ndim != 2 or not np.issubdtype(prompt_ids.dtype, np.integer):
        raise invalid("prompt_ids", "int[batch, prompt_len]", f"{prompt_ids.dtype}{list(prompt_ids.shape)}", "reshape")
    if attention_mask is not None and np.shape(attention_mask) != prompt_ids.shape:
        remedy = "give the mask of these very prompts"
        raise invalid("attention_mask", f"shape {prompt_ids.shape}", np.shape(attention_mask), remedy)
    (batch, prompt_len), max_length = prompt_ids.shape, int(plan.max_length)
    capacity = max(max_length, prompt_len) if capacity is None else capacity
    if capacity < max(max_length, prompt_len):
        remedy = "raise it, or lower max_new_tokens"
        raise invalid("capacity", f"at least {max(max_length, prompt_len)} (prompt and new tokens)", capacity, remedy)
    tokens = np.zeros((batch, capacity), np.int32)
    tokens[:, :prompt_len] = prompt_ids
    return SamplingHistory(
        tokens=to_device(tokens, np.int32),
        length=to_device(prompt_len, np.int32),
        num_new=to_device(0, np.int32),
        keys=_row_keys(seed, batch),
        ended=to_device(np.zeros(batch), bool),
        seen=None if plan.repetition_penalty is None else _seen_in_prompt(plan, prompt_ids, attention_mask),
    )


def append(state: SamplingHistory, next_tokens: jax.Array) -> SamplingHistory:
    """The state one token later. `next_tokens`: i32[batch]; ``state.ended`` is left to the caller."""
    seen = state.seen
    if seen is not None:
        rows, vocab_size = jnp.arange(seen.shape[0]), seen.shape[1]
        columns = jnp.where(next_tokens < 0, vocab_size, next_tokens)  # a negative index would count from the end
        seen = seen.at[rows, columns].set(True, mode="drop")
    return dataclasses.replace(
        state,
        tokens=lax.dynamic_update_slice_in_dim(
            state.tokens, next_tokens[:, None].astype(jnp.int32), state.length, axis=1
        ),
        length=state.length + 1,
        num_new=state.num_new + 1,
        seen=seen,
    )


def is_finished(plan: GenerationSampling, state: SamplingHistory, token: jax.Array) -> jax.Array:
    """bool[batch]: whether a row ends with `token` (i32[batch]), the last one of `state`: by eos or by length.

    Stop strings and time limits are a matter of the host; it may set more rows of ``state.ended``.
    """
    too_long = state.length >= plan.max_length
    if plan.eos_ids is None:
        return jnp.broadcast_to(too_long, token.shape)
    return too_long | (token[:, None] == plan.eos_ids).any(-1)


def _row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    seeds = list(seed) if isinstance(seed, Sequence) else [seed]
    if any(item not in ValueRange(0, MAX_SEED, is_integer=True) for item in seeds):
        raise invalid("seed", f"whole numbers from 0 to {MAX_SEED}", seed, "draw one with random.getrandbits(63)")
    if isinstance(seed, Sequence):
        if len(seeds) != batch:
            raise invalid("seed", f"one number, or one for each of {batch} rows", len(seeds), "give as many as rows")
        return _keys(seeds, [0] * batch)
    return _keys(seeds * batch, range(batch))


def _keys(seeds: Sequence[int], rows: Sequence[int]) -> jax.Array:
    """key[n]: ``fold_in(key(seed), row)``. A seed's upper half is folded in: ``jax.random.key`` would drop it."""
    low, high = (np.array([seed >> shift & 0xFFFFFFFF for seed in seeds], np.uint32) for shift in (0, 32))
    return _fold_keys(low, high, np.array(rows, np.uint32))


@jax.jit
@jax.vmap
def _fold_keys(low: jax.Array, high: jax.Array, row: jax.Array) -> jax.Array:
    return jax.random.fold_in(request_key(low, high), row)


def request_key(low: jax.Array, high: jax.Array) -> jax.Array:
    """key[]: of a request's seed, in two halves uint32[]; its rows fold their number in."""
    return jax.random.fold_in(jax.random.key(low), high)


def _seen_in_prompt(plan: GenerationSampling, prompt_ids: np.ndarray, attention_mask: np.ndarray | None) -> jax.Array:
    batch, prompt_len = prompt_ids.shape
    seen = np.zeros((batch, plan.vocab_size + 1), bool)  # the last column takes what has none of its own
    columns = np.where((prompt_ids < 0) | (prompt_ids > plan.vocab_size), plan.vocab_size, prompt_ids)
    if attention_mask is not None and plan.rules.penalty_skips_padding:
        first_token = (np.asarray(attention_mask) != 0).argmax(axis=1)  # 0 in a row that is all padding
        columns = np.where(np.arange(prompt_len) < first_token[:, None], plan.vocab_size, columns)
    np.put_along_axis(seen, columns, True, axis=1)
    return to_device(seen[:, :-1], bool)
