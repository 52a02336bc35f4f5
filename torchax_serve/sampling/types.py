"""Device data of the sampler: its state, and the options of rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.request_params import NEUTRAL, Level
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.sampling_params import MAX_LOGPROBS

LEVELS: tuple[Level, ...] = ("greedy", "sampled", "penalties", "history")
"""Sampling programs, each of which covers the options of those before it.

`greedy` takes the best token; `sampled` adds temperature, top-k, top-p and min-p; `penalties` what depends on token
counts and on tables of the vocabulary, and the rarer truncations; `history` what depends on the order of tokens, and
top-h, which takes long to compile.
"""

MAX_NUM_TOP = MAX_LOGPROBS
"""Number of top log-probabilities that a program returns, unless requests may ask for more (`columns_for`)."""


def columns_for(max_logprobs: int, vocab_size: int) -> int:
    """Returns how many top log-probabilities programs return, of which requests take some.

    Args:
        max_logprobs: Most that a request may ask for; -1: those of the whole vocabulary.
        vocab_size: Number of columns of the logits.
    """
    return vocab_size if max_logprobs == -1 else min(max(MAX_NUM_TOP, max_logprobs), vocab_size)


INT_COLUMNS = (
    "slot",
    "table_slot",
    "history_slot",
    "top_k",
    "num_new",
    "min_new_tokens",
    "seed_low",
    "seed_high",
    "seed_row",
)

NUM_NEW = INT_COLUMNS.index("num_new")

FLOAT_COLUMNS = tuple(NEUTRAL)

HISTORY_COLUMNS = (
    "prompt_len",
    "ngram_size",
    "forced_first",
    "forced_last_at",
    "not_first_at",
    "decay_at",
    "remove_invalid_values",
    "renormalize_logits",
    "time_begin",
    "time_eos",
    "time_first_end",
    "time_by_sum",
    "scores_logprobs",
    "num_encoder_ngrams",
)

IN_PROMPT, IS_STOP, NOT_FIRST, SUPPRESSED, FORCED_LAST = (1 << bit for bit in range(5))
"""Bits of `SamplerTables.flags`: the token is in the prompt, ends the request, may not be the first new one, may never
be sampled, is one of those that the last token must be."""


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """Which program samples the tokens of a batch; hashable.

    Attributes:
        level: Lowest level that covers every row.
        draws: Whether any row draws tokens; a program without draws is compiled much faster.
        scores: Whether to return the processed scores.
        nan_is_invalid: Whether a row with nan gets `INVALID_TOKEN`; otherwise nan is a maximum, as in ``torch.argmax``.
        rules: Release of transformers whose processors are followed; None: the installed one.
    """

    level: Level
    draws: bool = True
    scores: bool = False
    nan_is_invalid: bool = True
    rules: TransformersBehaviour | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOptions:
    """Options of each row of a batch, in two arrays so that a step makes two small transfers.

    A slot of num_slots marks a row that is padding or does not sample. `table_slot` and `history_slot` are num_slots
    where the request has no rows in `SamplerTables` or `SamplerHistory`; such a row reads zeros, which ask for nothing.
    """

    ints: jax.Array  # int32[n, len(INT_COLUMNS)]
    floats: jax.Array  # float32[n, len(FLOAT_COLUMNS)]

    def int_column(self, name: str) -> jax.Array:
        """Returns int32[n]: one of `INT_COLUMNS`."""
        return self.ints[:, INT_COLUMNS.index(name)]

    def float_column(self, name: str) -> jax.Array:
        """Returns float32[n]: one of `FLOAT_COLUMNS`."""
        return self.floats[:, FLOAT_COLUMNS.index(name)]

    def advanced(self, num_tokens: jax.Array | int) -> RowOptions:
        """Returns the options of the same rows `num_tokens` tokens later: a number, or int32[n]."""
        step = (jnp.arange(len(INT_COLUMNS)) == NUM_NEW).astype(jnp.int32)
        return dataclasses.replace(self, ints=self.ints + jnp.asarray(num_tokens)[..., None] * step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerTables:
    """Tables of the level "penalties" by slot; on the host also the rows of one slot."""

    counts: jax.Array  # int32[num_slots, vocab], how often a token is among the outputs
    flags: jax.Array  # uint8[num_slots, vocab], bits such as `IN_PROMPT`
    bias: jax.Array  # float32[num_slots, vocab], added to the logits; -inf where a token may not be sampled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerHistory:
    """Arrays of the level "history" by slot; on the host also the rows of one slot.

    Sizes are those of the largest request so far. Zeros ask for nothing, so a smaller request is padded with them.
    Numbers for which zero has a meaning of its own are stored plus one: tokens of sequences, `forced_first`,
    `forced_last_at`, `decay_at`.
    """

    ints: jax.Array  # int32[num_slots, len(HISTORY_COLUMNS)]
    tokens: jax.Array  # int32[num_slots, capacity], prompt and outputs; capacity 0: no request needs them
    sequences: jax.Array  # int32[num_slots, num_sequences, len], the biased token, then those before it, newest first
    sequence_bias: jax.Array  # float32[num_slots, num_sequences], added to the biased token behind its sequence
    decay_weights: jax.Array  # float32[num_slots, num_weights], factor**i - 1 for i tokens behind the decay's start

    def column(self, name: str) -> jax.Array:
        """Returns int32[num_slots]: one of `HISTORY_COLUMNS`."""
        return self.ints[:, HISTORY_COLUMNS.index(name)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """State that stays on the device between steps; donate it."""

    last_tokens: jax.Array  # int32[num_slots], token sampled last: the input of the next decode step
    tables: SamplerTables | None = None  # None until a request needs them
    history: SamplerHistory | None = None  # None until a request needs it

    @classmethod
    def empty(cls, num_slots: int, sharding: jax.sharding.Sharding) -> SamplerState:
        """Returns the state before the first request."""
        return cls(jax.device_put(np.zeros(num_slots, np.int32), sharding))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the model's own logits, before any processing."""

    chosen: jax.Array  # float32[n]
    rank: jax.Array  # int32[n], number of tokens that are at least as likely as the chosen one, itself counted
    top_ids: jax.Array | None  # int32[n, num_top], likeliest first
    top: jax.Array | None  # float32[n, num_top]
    processed: jax.Array | None = None  # float32[n], `Sampled.token_logprobs`, which are after any processing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Results of a step."""

    tokens: jax.Array  # int32[n]; INVALID_TOKEN where a row has no token to sample
    logprobs: Logprobs | None = None
    scores: jax.Array | None = None  # float32[n, vocab], processed
    token_logprobs: jax.Array | None = None  # float32[n], under the scores at temperature 1; level "history" only
