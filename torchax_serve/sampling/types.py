"""Device data of the sampler: state, and the options of rows.

The options of a row are applied in transformers' order of processors, with the penalties of OpenAI's interface in
between. A row's result is a function of that row only: the other rows of the batch decide which branches of the program
run, never what they compute for it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Level = Literal["greedy", "sampled", "full"]


LEVELS: tuple[Level, ...] = ("greedy", "sampled", "full")


NUM_TOP_BUCKETS = (0, 5, 20)
"""Numbers of top log-probabilities that a program returns; the host delivers as many as were requested."""


INT_COLUMNS = ("slot", "top_k", "num_new", "min_new_tokens", "seed_low", "seed_high")


NUM_NEW = INT_COLUMNS.index("num_new")


FLOAT_COLUMNS = (
    "temperature",
    "top_p_tail",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """Which program chooses the tokens of a batch; hashable.

    Three levels and the three buckets of `NUM_TOP_BUCKETS` are all there are, so that warm-up can compile them.
    """

    level: Level  # the lowest that covers every row
    num_top: int = 0  # top log-probabilities to return, a bucket
    logprobs: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOptions:
    """What each row of a batch asks for, in two arrays so that a step makes two small transfers."""

    ints: jax.Array  # int32[n, len(INT_COLUMNS)]; a slot of num_slots marks a row that is padding or does not sample
    floats: jax.Array  # float32[n, len(FLOAT_COLUMNS)]

    def int_column(self, name: str) -> jax.Array:
        """int32[n]: one of `INT_COLUMNS`."""
        return self.ints[:, INT_COLUMNS.index(name)]

    def float_column(self, name: str) -> jax.Array:
        """float32[n]: one of `FLOAT_COLUMNS`."""
        return self.floats[:, FLOAT_COLUMNS.index(name)]

    def advanced(self, num_tokens: jax.Array | int) -> RowOptions:
        """The options of the same rows so many tokens later: a number, or int32[n]."""
        step = (jnp.arange(len(INT_COLUMNS)) == NUM_NEW).astype(jnp.int32)
        return dataclasses.replace(self, ints=self.ints + jnp.asarray(num_tokens)[..., None] * step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerTables:
    """What the level "full" knows of each slot's request. A slot's rows are written when a request is given it."""

    counts: jax.Array  # int32[num_slots, vocab], how often a token is among the outputs
    flags: jax.Array  # uint8[num_slots, vocab], bits: the token is in the prompt, is a stop token, may not come first
    bias: jax.Array  # float32[num_slots, vocab], added to the logits; -inf where a token may not be chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """What stays on the device between steps; donate it."""

    last_tokens: jax.Array  # int32[num_slots], what was chosen last: the input of the next decode step
    tables: SamplerTables | None  # None until a request needs them

    @classmethod
    def empty(cls, num_slots: int, sharding: jax.sharding.Sharding) -> SamplerState:
        """The state before the first request."""
        return cls(jax.device_put(np.zeros(num_slots, np.int32), sharding), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the model's own logits, before any processing."""

    chosen: jax.Array  # float32[n]
    top_ids: jax.Array | None  # int32[n, num_top], likeliest first
    top: jax.Array | None  # float32[n, num_top]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a step brings to the host."""

    tokens: jax.Array  # int32[n]; INVALID_TOKEN where a row has nothing to choose from
    logprobs: Logprobs | None
