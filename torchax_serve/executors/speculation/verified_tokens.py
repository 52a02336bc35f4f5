"""What verify steps bring besides tokens: log-probabilities, and logits for the sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.executors.speculation.prompt_lookup import TokenHistory
from torchax_serve.executors.speculation.verify_steps import VerifyBatch, VerifySpec
from torchax_serve.sampling.sample import logprobs_of
from torchax_serve.sampling.types import Logprobs, Sampled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyScores:
    """The scores of verify steps, while these run."""

    logits: jax.Array  # float[S, vocab], of the first token of each row in the last step
    logprobs: Logprobs  # of the token sampled behind each token, [max_num_steps, S, k + 1]

    @classmethod
    def empty(cls, spec: VerifySpec, logits: jax.ShapeDtypeStruct) -> Self:
        """Returns zeros for steps whose logits have the shape of `logits`, [T, vocab]."""
        num_rows, vocab_size = spec.packed.num_rows, logits.shape[1]
        shape = (spec.max_num_steps, num_rows, spec.num_drafts + 1)
        of_top = (*shape, min(spec.packed.num_top, vocab_size))
        of_chosen = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
        zeros = *of_chosen, jnp.zeros(of_top, jnp.int32), jnp.zeros(of_top, jnp.float32)
        return cls(jnp.zeros((num_rows, vocab_size), logits.dtype), Logprobs(*zeros))

    def with_step(
        self, index: jax.Array, batch: VerifyBatch, logits: jax.Array, chosen: jax.Array, has_top: jax.Array
    ) -> Self:
        """Returns the scores with those of a step.

        Args:
            index: Number of the step.
            batch: Its tokens.
            logits: float[T, vocab].
            chosen: int32[T], sampled behind each token.
            has_top: Whether the likeliest tokens are read.
        """
        assert self.logprobs.top is not None
        num_drafts, num_top = self.logprobs.chosen.shape[2] - 1, self.logprobs.top.shape[3]
        num_tokens = batch.tokens.num_tokens
        found = logprobs_of(logits, chosen, num_top=num_top, has_top=has_top, num_rows=num_tokens)
        by_row = batch.tokens.index(num_drafts)
        logprobs = jax.tree.map(lambda out, of_step: out.at[index].set(of_step[by_row]), self.logprobs, found)
        return dataclasses.replace(self, logits=logits[by_row[:, 0]], logprobs=logprobs)


class VerifiedTokens(NamedTuple):
    """What a plan with drafts leaves on the device.

    Attributes:
        results: int32[max_num_steps, S, k + 3], as of `SpeculativeDecoder.run`.
        logprobs: [max_num_steps, S, k + 1], of the tokens that steps have sampled; None: they were not computed.
        sampled: What the sampler chose for rows that need it, by row; None: no row does.
        needs_sampler: Which rows do.
    """

    results: jax.Array
    logprobs: Logprobs | None
    sampled: Sampled | None
    needs_sampler: Sequence[bool]

    @property
    def has_logprobs(self) -> bool:
        """Whether there are log-probabilities of any row."""
        return self.logprobs is not None or (self.sampled is not None and self.sampled.logprobs is not None)

    def logprobs_of(self, row: int) -> list[tuple[Logprobs, int | tuple[int, ...], int]]:
        """Returns for each token of a row the log-probabilities, its index in them, and the token."""
        if self.needs_sampler[row]:
            assert self.sampled is not None and self.sampled.logprobs is not None
            return [(self.sampled.logprobs, row, int(np.asarray(self.sampled.tokens)[row]))]
        assert self.logprobs is not None
        of_row = np.asarray(self.results)[:, row]
        return [
            (self.logprobs, (step, row, i), int(tokens[i]))
            for step, tokens in enumerate(of_row)
            for i in range(tokens[-2])
        ]


def replace_tokens(
    history: TokenHistory, results: jax.Array, slots: jax.Array, tokens: jax.Array
) -> tuple[TokenHistory, jax.Array]:
    """Returns history and results of one step with other tokens of some rows; traced.

    Args:
        history: Tokens of all slots, those of the step included.
        results: As `VerifiedTokens` has them.
        slots: int32[S], slot of each row that gets another token; out of range: it keeps its own.
        tokens: int32[n], the tokens by row, n >= S.
    """
    tokens = tokens[: len(slots)]
    last = history.lens.at[slots].get(mode="clip") - 1
    ids = history.ids.at[slots, last].set(jnp.maximum(tokens, 0), mode="drop")
    is_replaced = slots < len(history.lens)
    first = jnp.where(is_replaced, tokens, results[0, :, 0])
    return TokenHistory(ids, history.lens), results.at[0, :, 0].set(first)
