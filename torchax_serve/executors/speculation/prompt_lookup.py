"""Drafts by prompt lookup, and the bookkeeping of verified tokens, on the device.

Imports no torch.

Prompt lookup is Saxena's (2023), and vLLM's method "ngram". Drafts are accepted where they equal the token that is
sampled from the verified logits, so that tokens are those of single steps, with any sampling options. For drafts that
are certain that accepts as many as rejection sampling does (Leviathan et al., 2023).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """All tokens by slot: prompt and answer."""

    ids: jax.Array  # int32[n, max_len]; what is behind a row's tokens has no meaning
    lens: jax.Array  # int32[n], number of tokens

    def append(self, tokens: jax.Array) -> TokenHistory:
        """Returns the history with one more token of each row, int32[n].

        Those without room are dropped.
        """
        ids = self.ids.at[jnp.arange(len(tokens)), self.lens].set(tokens, mode="drop")
        return TokenHistory(ids, self.lens + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyRows:
    """The tokens that a verify step computes: of each row its last token, and drafts behind it.

    Rows are ragged.
    """

    rows: jax.Array  # int32[T], row of each token
    offsets: jax.Array  # int32[T], 0 for the last token of a row, i for its i-th draft
    num_tokens: jax.Array  # int32[], of all rows; tokens behind repeat the last one
    cu_q_lens: jax.Array  # int32[S + 1]

    def index(self, num_drafts: int) -> jax.Array:
        """Returns each row's last token and its drafts, int32[S, num_drafts + 1].

        What a row does not have is another row's.
        """
        return jnp.minimum(self.cu_q_lens[:-1, None] + jnp.arange(num_drafts + 1), len(self.rows) - 1)


def lookup(history: TokenHistory, num_drafts: int, longest: int, shortest: int) -> tuple[jax.Array, jax.Array]:
    """Looks up the last tokens of each row in its tokens before; returns what followed them.

    The longest match counts, and of these the last one. Behind the end of the tokens the drafts repeat themselves.

    Args:
        history: S rows.
        num_drafts: Number of drafts, k.
        longest: Most tokens that are compared.
        shortest: Fewest tokens that have to be equal.

    Returns:
        Drafts int32[S, k], and whether there are any, bool[S].
    """
    ids, lens = history.ids, history.lens
    num_rows, max_len = ids.shape
    rows, position = jnp.arange(num_rows), jnp.arange(max_len)
    matches, match_len = jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
    for back in range(1, longest + 1):
        last = ids[rows, jnp.maximum(lens - back, 0)]
        before = jnp.pad(ids[:, : max_len - back], ((0, 0), (back, 0)), constant_values=-1)
        matches = matches & (before == last[:, None]) & (lens >= back)[:, None]
        match_len += matches
    is_found = (match_len >= shortest) & (position < lens[:, None])
    best = jnp.max(jnp.where(is_found, match_len * max_len + position, -1), axis=1)
    follower = jnp.maximum(best, 0) % max_len
    period = jnp.maximum(lens - follower, 1)
    ahead = jnp.arange(num_drafts) % period[:, None]
    return ids[rows[:, None], follower[:, None] + ahead], best >= 0


def last_tokens(history: TokenHistory) -> jax.Array:
    """Returns the last token of each row, int32[n]."""
    return history.ids[jnp.arange(len(history.lens)), jnp.maximum(history.lens - 1, 0)]


def verify_rows(num_drafts: jax.Array, is_active: jax.Array, num_tokens: int) -> VerifyRows:
    """Returns the tokens of a step: one and `num_drafts` int32[S] for each active row.

    Args:
        num_drafts: Number of drafts of each row.
        is_active: Rows that compute anything.
        num_tokens: Size of the step, T.
    """
    ends = jnp.cumsum(jnp.where(is_active, 1 + num_drafts, 0), dtype=jnp.int32)
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    tokens = jnp.minimum(jnp.arange(num_tokens, dtype=jnp.int32), jnp.maximum(ends[-1] - 1, 0))
    rows = jnp.sum(tokens[:, None] >= ends, axis=1, dtype=jnp.int32)
    return VerifyRows(rows, tokens - cu_q_lens[rows], ends[-1], cu_q_lens)


def accept(
    history: TokenHistory, drafts: jax.Array, num_drafts: jax.Array, sampled: jax.Array, is_active: jax.Array
) -> tuple[TokenHistory, jax.Array]:
    """Accepts each row's drafts up to the first that is not the sampled token, and that token.

    Args:
        history: S rows, with the tokens before.
        drafts: int32[S, k].
        num_drafts: int32[S], of these how many were verified.
        sampled: int32[S, k + 1], sampled behind the row's last token and behind each draft; negative: none could be.
        is_active: bool[S], rows that were computed.

    Returns:
        The history with the accepted tokens, and their number int32[S].
    """
    num_rows, most = drafts.shape
    is_right = (drafts == sampled[:, :-1]) & (jnp.arange(most) < num_drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1, dtype=jnp.int32)
    counts = jnp.where(is_active, accepted + 1, 0)
    index = jnp.arange(most + 1)
    column = jnp.where(index < counts[:, None], history.lens[:, None] + index, history.ids.shape[1])
    ids = history.ids.at[jnp.arange(num_rows)[:, None], column].set(jnp.maximum(sampled, 0), mode="drop")
    return TokenHistory(ids, history.lens + counts), counts
