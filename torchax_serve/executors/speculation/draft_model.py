"""Drafts by a smaller model, in the verify steps of a larger one.

The draft model has a cache of its own: a run of pages for each slot, as long as the longest request. It computes the
tokens that are new to it whenever it is asked, a prompt in chunks, so that steps without drafts do not run it. Drafts
are drawn with the request's own random numbers, those that the larger model's token is drawn with (Gumbel coupling):
where both models have the same distribution they draw the same token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import PackedBatch, PagedLayout, Pool
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, verify_rows
from torchax_serve.executors.traced_function import TracedFunction
from torchax_serve.kv_cache.pools import PagedLayerSpec, parts_of
from torchax_serve.scheduler.speculative_config import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram

CATCH_UP = 32
"""Tokens of a row in a step that computes what the draft model has not seen of its text."""

NUM_NEW = 2
"""Most tokens of a row that are new to the draft model after a verify step: its last draft, and the one behind."""

Pick = Callable[[jax.Array, jax.Array], jax.Array]
"""Draws the token behind each row, int32[S], from logits float[S, vocab] of the tokens at positions int32[S]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftCache:
    """Keys and values of the draft model, donated."""

    pools: tuple[Pool, ...]
    lens: jax.Array  # int32[n], by slot or row: tokens of the text that are in the cache


DraftStep = Callable[[DraftCache, TokenHistory, jax.Array], tuple[jax.Array, DraftCache]]
"""Computes the next tokens of each row, as many as int32[S]: logits [S, vocab] of the last, and the cache."""


class DraftSteps(NamedTuple):
    """The steps of the draft model by the tokens of a row: `CATCH_UP`, `NUM_NEW` and 1 at most."""

    catch_up: DraftStep
    first: DraftStep
    later: DraftStep


class DraftModel:
    """A model that drafts, and its cache.

    Args:
        program: Its forward.
        weights: Its weights by name.
        shapes: Paged cache of each of its layers.
        identity: Names the program in files.
        num_slots: Number of slots.
        max_len: Most tokens of a request.
        page_size: Tokens of a page.
        is_invariant: Whether matrix products sum in the same order for any number of rows.
        vocab_size: Columns of the larger model's logits.
    """

    def __init__(
        self,
        program: ModelProgram,
        weights: Weights,
        shapes: Sequence[PagedLayerSpec],
        identity: str,
        *,
        num_slots: int,
        max_len: int,
        page_size: int,
        is_invariant: bool,
        vocab_size: int,
    ) -> None:
        self._program, self.weights, self.identity = program, weights, identity
        self._shapes, self._num_slots, self._page_size = shapes, num_slots, page_size
        self._is_invariant, self._vocab_size = is_invariant, vocab_size
        # Drafts behind the longest length are computed before they are dropped.
        self._pages_per_seq = -(-(max_len + MAX_SPECULATIVE_TOKENS) // page_size)
        self._layout = PagedLayout(
            groups=(0,) * len(shapes),
            windows=tuple(shape.window for shape in shapes),
            max_len=self._pages_per_seq * page_size,
            parts=parts_of(shapes),
        )

    def abstract_cache(self, sharding: Any) -> DraftCache:
        """Returns shapes of the cache on `sharding`; on a mesh the pools lie by heads."""
        num_pages, on_mesh = 1 + self._num_slots * self._pages_per_seq, self._program.sharding

        def pool(shape: PagedLayerSpec) -> Any:
            size = shape.pool_shape(num_pages, self._page_size)
            place = sharding if on_mesh is None else on_mesh.pool_sharding(shape.num_heads)
            return jax.ShapeDtypeStruct(size, shape.dtype, sharding=place)

        lens: Any = jax.ShapeDtypeStruct((self._num_slots,), np.int32, sharding=sharding)
        return DraftCache(tuple(map(pool, self._shapes)), lens)

    def empty_cache(self, sharding: Any) -> DraftCache:
        """Returns a cache without tokens on `sharding`."""
        abstract = self.abstract_cache(sharding)
        cache: DraftCache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)
        return cache

    def steps(self, weights: Weights, cache: DraftCache, text: TokenHistory, slots: jax.Array) -> DraftSteps:
        """Returns the steps for `text` of S rows in `slots` int32[S], traced ahead of the loop."""
        step = functools.partial(self._step, weights, tables=self._tables(slots), example=(cache.pools, text))
        return DraftSteps(step(size=CATCH_UP), step(size=NUM_NEW), step(size=1))

    def propose(
        self,
        steps: DraftSteps,
        cache: DraftCache,
        text: TokenHistory,
        is_drafted: jax.Array,
        pick: Pick,
        num_drafts: int,
    ) -> tuple[jax.Array, DraftCache]:
        """Drafts `num_drafts` tokens of each row, int32[S, num_drafts]; to be traced.

        Args:
            steps: What `steps` returned.
            cache: Keys and values, with lengths by row.
            text: Tokens of S rows.
            is_drafted: bool[S], rows that want drafts; others have some without meaning.
            pick: Draws a token.
            num_drafts: Number of drafts, k.

        Returns:
            The drafts, and the cache with all of the text and all drafts but the last.
        """

        # Two loops, for rows that want drafts. The first computes, in chunks, what the draft model has not seen of the
        # text, until no row lacks more than NUM_NEW tokens; its carry is the cache. `steps.first` computes those and
        # gives the first draft. The second has the carry, in front of draft i:
        #
        #   drafts  int32[S, num_drafts], of which the first i are there
        #   cache   with all tokens of `text` but its last one, draft i - 1
        #   text    the tokens of the rows, with the drafts so far behind them
        #
        # `kept` takes the drafts that are rejected off the cache, by its lengths: what is behind is written again.
        def is_behind(cache: DraftCache) -> jax.Array:
            return is_drafted & (text.lens - cache.lens > NUM_NEW)

        def follow(cache: DraftCache) -> DraftCache:
            counts = jnp.where(is_behind(cache), jnp.minimum(text.lens - cache.lens - 1, CATCH_UP), 0)
            return steps.catch_up(cache, text, counts)[1]

        def draft(index: jax.Array, carry: Any) -> Any:
            drafts, cache, text = carry
            logits, cache = steps.later(cache, text, is_drafted.astype(jnp.int32))
            token = pick(self._as_wide(logits), text.lens - 1)
            return drafts.at[:, index].set(token), cache, text.append(token)

        cache = jax.lax.while_loop(lambda cache: is_behind(cache).any(), follow, cache)
        logits, cache = steps.first(cache, text, jnp.where(is_drafted, text.lens - cache.lens, 0))
        token = pick(self._as_wide(logits), text.lens - 1)
        drafts = jnp.zeros((len(token), num_drafts), jnp.int32).at[:, 0].set(token)
        drafts, cache, _ = jax.lax.fori_loop(1, num_drafts, draft, (drafts, cache, text.append(token)))
        return drafts, cache

    def _as_wide(self, logits: jax.Array) -> jax.Array:
        """Returns logits over the larger model's vocabulary; what is not common is padding."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)

    def _tables(self, slots: jax.Array) -> jax.Array:
        """Returns int32[S, pages_per_seq]: the pages of each slot, which are always its own."""
        return 1 + slots[:, None] * self._pages_per_seq + jnp.arange(self._pages_per_seq, dtype=jnp.int32)

    def _step(
        self, weights: Weights, *, tables: jax.Array, example: tuple[tuple[Pool, ...], TokenHistory], size: int
    ) -> DraftStep:
        """Returns a function that computes the next tokens of each row, at most `size`."""
        from model_adapters.program.packed_forward import forward_packed  # tracing needs torch, running does not

        def batch_of(lens: jax.Array, text: TokenHistory, counts: jax.Array) -> PackedBatch:
            is_active = counts > 0
            tokens = verify_rows(jnp.maximum(counts - 1, 0), is_active, len(counts) * size)
            positions = lens[tokens.rows] + tokens.offsets
            return PackedBatch(
                token_ids=text.ids.at[tokens.rows, positions].get(mode="clip"),
                positions=positions,
                cu_q_lens=tokens.cu_q_lens,
                kv_lens=jnp.where(is_active, lens + counts, 0),
                last=jnp.maximum(tokens.cu_q_lens[1:] - 1, 0),
                page_tables=(tables,),
                rope_lens=None if self._program.rope is None else positions + 1,
            )

        def forward(weights: Weights, pools: tuple[Pool, ...], batch: PackedBatch) -> Any:
            with batch_invariant(self._is_invariant):
                return forward_packed(self._program, weights, pools, batch, self._layout)

        pools, text = example
        traced = TracedFunction(forward, weights, pools, batch_of(text.lens, text, text.lens))

        def run(cache: DraftCache, text: TokenHistory, counts: jax.Array) -> tuple[jax.Array, DraftCache]:
            logits, pools = traced(weights, cache.pools, batch_of(cache.lens, text, counts))
            return logits, DraftCache(pools, cache.lens + counts)

        return run


def kept(cache: DraftCache, text: TokenHistory) -> DraftCache:
    """Returns the cache without rejected drafts: `text` has the accepted tokens.

    The last token is never in it.
    """
    return DraftCache(cache.pools, jnp.minimum(cache.lens, text.lens - 1))
