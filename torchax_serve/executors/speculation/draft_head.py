"""Drafts by a head on the hidden states of the model that it drafts for.

The head computes a position from the model's hidden state there and the token behind it. Its keys and values are one
more layer of the paged cache, so that pages, prefixes and their ends are those of the model. Whatever step computes
tokens, the head follows: it writes the positions whose next token has become known. The hidden state of the last
token of each slot waits for the token behind it (`HeadState`), which the next step is given.

A step drafts from there: the first draft from the model's hidden state, the later ones from the head's own. What it
writes of drafts is written again by the step that verifies them. The last position of a prefix that was found in the
cache is the one of the request that computed it; drafts may be worse for it, tokens are never others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import INDEX_KEYS, PackedBatch, PagedLayout, Pool, laid_out
from model_adapters.draft_heads.loaded_head import HeadedWeights, LoadedHead
from torchax_serve.executors.speculation.draft_model import Pick
from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, last_tokens, verify_rows
from torchax_serve.executors.speculation.verify_steps import VerifySteps
from torchax_serve.executors.traced_function import TracedFunction
from torchax_serve.kv_cache.head_state import HeadState

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram

Pools = tuple[Any, ...]
"""Pools of the model's layers, those of the head, and a `HeadState`."""


class HeadSteps(NamedTuple):
    """Draft step: ``(own, hidden, ids, positions, is_active)`` to logits, hidden and own pools."""

    first: Callable[..., Any]
    later: Callable[..., Any]


class DraftHead:
    """A draft head beside its model.

    Args:
        loaded: The head.
        vocab_size: Columns of the model's logits.
        width, dtype: Columns of the hidden states that it takes of the model, and their dtype.
    """

    def __init__(self, loaded: LoadedHead, vocab_size: int, width: int, dtype: Any) -> None:
        self.loaded, self.identity = loaded, loaded.identity
        self.width, self.dtype = width, np.dtype(dtype)
        self._vocab_size = vocab_size

    def forward(
        self, program: ModelProgram, weights: HeadedWeights, pools: Pools, batch: PackedBatch, layout: PagedLayout
    ) -> tuple[jax.Array, Pools, jax.Array]:
        """Runs the model, and the head behind it; to be traced.

        Returns:
            The model's logits, the pools, and the hidden states of all tokens, float[T, width].
        """
        from model_adapters.program.packed_forward import forward_with_hidden  # tracing needs torch, running does not

        of_model, own, state = self._split(pools)
        arguments = program.with_module(), weights.model, of_model, batch, layout.without_last(len(own))
        logits, of_model_after, hidden = forward_with_hidden(*arguments, self.loaded.layers)
        assert hidden is not None
        return logits, (*of_model_after, *self.follow(weights, (*own, state), batch, hidden, layout)), hidden

    def _split(self, pools: Pools) -> tuple[tuple[Pool, ...], tuple[Pool, ...], HeadState]:
        """Returns the model's pools, the head's, and its state."""
        own = len(pools) - 1 - self.loaded.num_pools
        return pools[:own], pools[own:-1], pools[-1]

    def follow(
        self, weights: HeadedWeights, own: Pools, batch: PackedBatch, hidden: jax.Array, layout: PagedLayout
    ) -> Pools:
        """Computes positions whose next token is known now; returns the head's pools and state.

        Args:
            weights: Weights of model and head.
            own: The head's pools and state.
            batch: The tokens of the step.
            hidden: float[T, width], the model's hidden states of these tokens.
            layout: Of the step.
        """
        *pools, state = own
        hidden = hidden.astype(self.dtype)
        table, pair = batch.page_tables[layout.groups[-1]], _decode_pairs if layout.is_decode else _pairs
        pairs = pair(batch, state, hidden, table)
        after = self._run(weights, tuple(pools), *pairs, self._layout(layout), is_captured=True)[2]
        return *after, self._with_last(state, batch, hidden)

    def _with_last(self, state: HeadState, batch: PackedBatch, hidden: jax.Array) -> HeadState:
        """Returns the state with the hidden state of each row's last token in a step."""
        assert batch.slots is not None
        return state.kept(batch.slots, batch.kv_lens > 0, hidden[batch.last], batch.kv_lens)

    def kept(self, pools: Pools, steps: VerifySteps, is_active: jax.Array, hidden: jax.Array, lens: jax.Array) -> Pools:
        """Returns the pools with the hidden state of each row's last accepted token.

        Args:
            pools: Pools and state.
            steps: The inputs of the call.
            is_active: Rows that were computed, bool[S].
            hidden: The hidden states.
            lens: int32[S], number of computed tokens of each row.
        """
        *others, state = pools
        return (*others, state.kept(steps.slots, is_active, hidden, lens))

    def constrain_pools(self, pools: Pools) -> Pools:
        """Constrains the head's own pools and its state to the shardings that programs take.

        Inside of a program XLA may divide them as it sees fit.
        """
        sharding = self.loaded.program.sharding
        if sharding is None:
            return pools
        of_model, own, state = self._split(pools)
        placed = (laid_out(pool, sharding.pool_sharding, jax.lax.with_sharding_constraint) for pool in own)
        return (*of_model, *placed, jax.lax.with_sharding_constraint(state, sharding.replicated()))

    def _run(
        self,
        weights: HeadedWeights,
        own: tuple[Pool, ...],
        batch: PackedBatch,
        before: jax.Array,
        layout: PagedLayout,
        *,
        is_captured: bool,
    ) -> tuple[jax.Array, jax.Array, tuple[Pool, ...]]:
        from model_adapters.program.head_forward import forward_head

        tensors = self.loaded.tensors(weights)
        logits, hidden, own = forward_head(
            self.loaded.program, tensors, own, batch, layout, before, is_captured=is_captured
        )
        return self._as_wide(logits, weights.token_ids), hidden, own

    def _layout(self, layout: PagedLayout, *, is_decode: bool | None = None) -> PagedLayout:
        """Returns the layout of the head's own pools."""
        num_pools = self.loaded.num_pools
        return PagedLayout(
            groups=(0,) * num_pools,
            windows=(None,) * num_pools,
            max_len=layout.max_len,
            is_decode=layout.is_decode if is_decode is None else is_decode,
            parts=((0, INDEX_KEYS, 1),) if self.loaded.has_indexer else (),
        )

    def _as_wide(self, logits: jax.Array, token_ids: jax.Array | None) -> jax.Array:
        """Returns logits over the model's vocabulary; -inf for tokens that the head lacks."""
        if token_ids is None:
            token_ids = jnp.arange(min(logits.shape[1], self._vocab_size))
            logits = logits[:, : len(token_ids)]
        wide = jnp.full((len(logits), self._vocab_size), -jnp.inf, logits.dtype)
        return wide.at[:, token_ids].set(logits)

    def steps(self, weights: HeadedWeights, pools: Pools, steps: VerifySteps) -> HeadSteps:
        """Returns the steps that draft, traced: in front of the loop that runs them."""
        layout = steps.spec.packed.layout
        table, of_head = steps.tables[layout.groups[-1]], self._layout(layout, is_decode=True)
        _, own, state = self._split(pools)

        def step(is_captured: bool, own: Pools, hidden: Any, ids: Any, positions: Any, is_active: Any) -> Any:
            batch = _one_token_each(ids, positions, is_active, table)
            return self._run(weights, own, batch, hidden, of_head, is_captured=is_captured)

        example = steps.slots, jnp.maximum(steps.ends, 0), steps.ends > 0
        first = TracedFunction(functools.partial(step, True), own, state.hidden[steps.slots], *example)
        hidden = first.result_shape[1]
        return HeadSteps(first, TracedFunction(functools.partial(step, False), own, hidden, *example))

    def propose(
        self, head: HeadSteps, pools: Pools, rows: TokenHistory, steps: VerifySteps, pick: Pick
    ) -> tuple[jax.Array, jax.Array, Pools]:
        """Drafts tokens of each row; to be traced.

        Args:
            head: What `steps` returned.
            pools: Pools and state.
            rows: Tokens of S rows.
            steps: The inputs of the call.
            pick: Draws a token.

        Returns:
            Drafts int32[S, k], whether a row has any, bool[S], and the pools.
        """
        of_model, own, state = self._split(pools)
        num_drafts, position = steps.spec.num_drafts, rows.lens - 2
        is_found = steps.is_drafted(rows) & (state.lens[steps.slots] == rows.lens - 1) & (position >= 0)

        def draft(index: jax.Array, step: Callable[..., Any], hidden: jax.Array, own: Pools, ids: jax.Array) -> Any:
            at = position + index
            # Behind a row's end there are no pages.
            logits, hidden, own = step(own, hidden, ids, jnp.maximum(at, 0), is_found & (at < steps.ends))
            return pick(logits, at + 1), hidden, own

        # The loop over the later drafts. The carry, in front of draft i:
        #
        #   drafts  int32[S, k], of which the first i are there
        #   token   int32[S], draft i - 1: the token behind the position that is computed next, `position + i`
        #   hidden  the head's hidden state at the position in front of that one
        #   own     the head's pools, with all positions in front of it
        #
        # Positions of drafts are written for the loop only: steps that verify drafts write them again.
        def later(index: jax.Array, carry: Any) -> Any:
            drafts, token, hidden, own = carry
            token, hidden, own = draft(index, head.later, hidden, own, token)
            return drafts.at[:, index].set(token), token, hidden, own

        token, hidden, own = draft(jnp.int32(0), head.first, state.hidden[steps.slots], own, last_tokens(rows))
        drafts = jnp.zeros((len(token), num_drafts), jnp.int32).at[:, 0].set(token)
        drafts, _, _, own = jax.lax.fori_loop(1, num_drafts, later, (drafts, token, hidden, own))
        return drafts, is_found, (*of_model, *own, state)


def _one_token_each(ids: jax.Array, positions: jax.Array, is_active: jax.Array, table: jax.Array) -> PackedBatch:
    """Returns a decode step of a head; rows that are not active write to the null page."""
    index = jnp.arange(len(ids) + 1, dtype=jnp.int32)
    return PackedBatch(
        token_ids=ids,
        positions=positions,
        cu_q_lens=index,
        kv_lens=jnp.where(is_active, positions + 1, 0),
        last=index[:-1],
        page_tables=(jnp.where(is_active[:, None], table, 0),),
    )


def _decode_pairs(
    batch: PackedBatch, state: HeadState, hidden: jax.Array, table: jax.Array
) -> tuple[PackedBatch, jax.Array]:
    """Returns the head's step behind a decode step, and the hidden states before its tokens."""
    assert batch.slots is not None
    is_known = (state.lens[batch.slots] == batch.positions) & (batch.positions > 0) & (batch.kv_lens > 0)
    positions = jnp.maximum(batch.positions - 1, 0)
    return _one_token_each(batch.token_ids, positions, is_known, table), state.hidden[batch.slots]


def _pairs(batch: PackedBatch, state: HeadState, hidden: jax.Array, table: jax.Array) -> tuple[PackedBatch, jax.Array]:
    """Returns the head's step behind other steps, and the hidden states before its tokens.

    The first token of a row has a hidden state in front if the slot's last step ended there; else it is left out.
    """
    assert batch.slots is not None
    starts, num_tokens = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    first = batch.kv_lens - num_tokens
    is_known = (state.lens[batch.slots] == first) & (first > 0)
    counts = num_tokens - jnp.where(is_known, 0, jnp.minimum(num_tokens, 1))
    is_active = (counts > 0) & (batch.kv_lens > 0)
    tokens = verify_rows(counts - 1, is_active, len(batch.token_ids))
    rows = jnp.minimum(tokens.rows, len(counts) - 1)  # no row may have a token
    source = jnp.clip(starts[rows] + tokens.offsets + ~is_known[rows], 0, len(batch.token_ids) - 1)
    waiting = (tokens.offsets == 0) & is_known[rows]
    before = jnp.where(waiting[:, None], state.hidden[batch.slots[rows]], hidden[jnp.maximum(source - 1, 0)])
    paired = PackedBatch(
        token_ids=batch.token_ids[source],
        positions=jnp.maximum(batch.positions[source] - 1, 0),
        cu_q_lens=tokens.cu_q_lens,
        kv_lens=jnp.where(is_active, batch.kv_lens - 1, 0),
        last=jnp.maximum(tokens.cu_q_lens[1:] - 1, 0),
        page_tables=(table,),
    )
    return paired, before
