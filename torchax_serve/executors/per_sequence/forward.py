"""The forward of one request on its own cache, as a batch of one.

A model that cannot be packed is run as `generate` runs it for a single prompt: nothing is padded on the left, positions
begin at 0, and what the model makes of the length of its cache is right. Many requests at once are many such forwards
under `jax.vmap`, so no request can notice another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters import quirks
from model_adapters.caches.cross_attention_layer import CrossLayer
from model_adapters.caches.device_cache import AttentionLayer, LayerStates
from model_adapters.caches.encoder_mask import SourceMask
from model_adapters.caches.packed_batch import MediaTokens, with_pages
from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.media import features_in_place
from model_adapters.program.model_program import CallSpec
from torchax_serve.executors.encoder_inputs import HIDDEN, context
from torchax_serve.executors.per_sequence.blocks import begin_in_blocks, extend_in_blocks
from torchax_serve.executors.per_sequence.rows import begin_rows, extend_rows
from torchax_serve.kv_cache.cache_layout import UNBOUNDED, CacheLayout, Leaves, SlotStateSpec
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.runtime.model_runtime import ModelRuntime

PROBE_LEN = 16
MAX_GROWTH = 2.5
"""How many times as large as that of one token a program may be: models that loop over tokens in Python make programs
that grow with every token, and take minutes to compile."""


class SequenceForward:
    """Forwards of one request, to be traced.

    Keys and values are dense leaves ``[1, heads, capacity, width]``; what is behind the stored tokens is not read.
    New ones are returned by themselves, ``[T, heads, width]``.

    Attributes:
        layers: Hidden states that a draft head reads, as ``output_hidden_states`` counts them. With any, logits are a
            pair: logits, and hidden states of all tokens, [T, len(layers) * hidden].
    """

    def __init__(self, runtime: ModelRuntime) -> None:
        if not runtime.cache_support.is_supported:
            raise UnsupportedModelError(
                f"expected a decoder with a cache of fixed shapes, got {type(runtime.program.module).__name__}: "
                f"{runtime.cache_support.unsupported_reason}; generate runs it, one batch at a time"
            )
        self.program, self._weights = runtime.program, runtime.weights
        self._new_cache = runtime.cache_support.new
        self._trial_context = runtime.cache_support.abstract_encoder_output()
        mask = None if runtime.encoder is None else runtime.encoder.output_mask
        self._source_mask = mask or SourceMask()
        self._source_len_is_fixed = runtime.encoder is not None and runtime.encoder.fixed_output_len is not None
        self.num_learned_positions = runtime.limits.learned_positions
        self.needs_token_by_token = quirks.of(runtime.program.target).token_by_token
        self.layers: tuple[int, ...] = ()

    @property
    def infers_positions(self) -> bool:
        """Whether the model finds positions by itself and reads them from a table with an end."""
        return self.num_learned_positions is not None and not self.program.accepts(self.program.names.positions)

    @functools.cached_property
    def _first(self) -> tuple[LayerStates, Any]:
        """Shapes of the cache after a first forward, and their structure."""
        states, _ = self._after_first(PROBE_LEN)
        return states, _structure(states)

    def _after_first(self, length: int) -> tuple[LayerStates, int]:
        """Returns the abstract cache after a first forward, and its number of operations."""

        def first(weights: Any, ids: Any, source: Any) -> Any:
            states: LayerStates = self._new_cache(PROBE_LEN).states
            inputs = {**self._inputs(ids, 0, length, True), **source}
            return self.program.forward(weights, states, jnp.int32(0), inputs, CallSpec())

        with as_unsupported():
            ids = jax.ShapeDtypeStruct((length,), np.int32)
            traced = jax.jit(first).trace(self._weights, ids, self._trial_context)
        fields, states = traced.out_info
        if "logits" not in fields:
            raise UnsupportedModelError(
                f"expected a model whose forward returns logits, got {', '.join(sorted(fields)) or 'nothing'}; "
                "load it with its language-model head"
            )
        return states, len(traced.jaxpr.eqns)

    def layout(self) -> CacheLayout:
        """Finds what the model stores by tracing a first forward and a step after it.

        Raises:
            UnsupportedModelError: it stores nothing, outside of its cache, or changes shapes from step to step.
        """
        found = self._find_layout()
        self.program.check_no_leaked_tensors()
        return found

    def _find_layout(self) -> CacheLayout:
        if self.program.sliding_cache_unmasked:
            raise UnsupportedModelError(
                "a prompt sees tokens that steps have dropped from its sliding cache, so a request would be answered "
                "differently after it had to make room for others"
            )
        states, size = self._after_first(PROBE_LEN)
        # Columns of the key by pool; all of what is not a key and a value.
        k_dims = {
            id(pool := getattr(layer, name)): layer.k_dim if name == "pool" else pool.shape[3]
            for layer in states
            if isinstance(layer, AttentionLayer)
            for name in layer.POOLS
            if getattr(layer, name) is not None
        }
        of_source = {id(leaf) for layer in states if isinstance(layer, CrossLayer) for leaf in jax.tree.leaves(layer)}
        leaves: list[PagedLayerSpec | SlotStateSpec] = []
        for leaf in jax.tree.leaves(states):
            dtype = np.dtype(leaf.dtype)
            if id(leaf) in k_dims:
                # Pages behind a window stay: only the model's own masks say what is looked at.
                leaves.append(PagedLayerSpec(leaf.shape[1], leaf.shape[3], dtype, None, k_dims[id(leaf)]))
            elif id(leaf) in of_source:
                leaves.append(SlotStateSpec((1, leaf.shape[1], 1, leaf.shape[3]), dtype, is_of_source=True))
            else:
                leaves.append(SlotStateSpec(tuple(leaf.shape), dtype))
        if not leaves:
            raise UnsupportedModelError("expected a cache that is written to, got one that stays empty after a forward")
        short, short_size = self._after_first(1)
        if _structure(short) != _structure(states) or _shapes(short) != _shapes(states):
            raise UnsupportedModelError("what the model keeps of a prompt of one token has another form than of more")
        growth = (size - short_size) / (PROBE_LEN - 1)
        block_len = UNBOUNDED if growth < 1 else 1 + int((MAX_GROWTH - 1) * short_size / growth)
        found = CacheLayout(
            tuple(leaves),
            block_len=1 if self.needs_token_by_token else block_len,
            is_on_mesh=self.program.sharding is not None,
        )

        def step(weights: Any, leaves: Any, offset: Any, ids: Any) -> Any:
            return self.extend(weights, leaves, offset, ids, 1, found, offset)

        kept = tuple(jax.tree.leaves(states))
        number, one = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
        with as_unsupported():
            jax.eval_shape(step, self._weights, kept, number, one)
        is_vectorised = self._can_vectorise(found)
        found = dataclasses.replace(found, is_vectorised=is_vectorised)
        return dataclasses.replace(found, batches_prompts=is_vectorised and self._can_batch_prompts(found))

    def _can_vectorise(self, layout: CacheLayout) -> bool:
        kept = tuple(jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(self._first[0]))
        number = jax.ShapeDtypeStruct((2,), np.int32)
        rows = dataclasses.replace(layout, is_vectorised=True)

        def step(weights: Any, leaves: Any, offsets: Any, ids: Any) -> Any:
            return extend_rows(self, weights, leaves, offsets, ids[:, None], rows, source_lens=offsets)

        try:
            jax.eval_shape(step, self._weights, kept, number, number)
        except Exception:  # code that vmap cannot follow, whatever it is: rows then run one after the other
            return False
        return True

    def _can_batch_prompts(self, layout: CacheLayout) -> bool:
        """Tells whether chunks of prompts can be computed side by side, first and later ones."""
        kept = tuple(jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(self._first[0]))
        numbers, ids = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((2, 2), np.int32)
        context = self._trial_context.get(HIDDEN)
        hidden = None if context is None else jax.ShapeDtypeStruct((2, *context[0].shape[1:]), context[0].dtype)

        def begin(weights: Any, ids: Any, lens: Any, hidden: Any) -> Any:
            return begin_rows(self, weights, ids, lens, layout, hidden=hidden, source_lens=lens)

        def behind(weights: Any, leaves: Any, lens: Any, ids: Any) -> Any:
            return extend_rows(self, weights, leaves, lens, ids, layout, lens=lens, source_lens=lens)

        try:
            jax.eval_shape(begin, self._weights, ids, numbers, hidden)
            jax.eval_shape(behind, self._weights, kept, numbers, ids)
        except Exception:  # as in `_can_vectorise`: prompts then run in programs of their own
            return False
        return True

    def prefill(
        self,
        weights: Weights,
        ids: jax.Array,
        length: Any,
        layout: CacheLayout,
        hidden: jax.Array | None = None,
        source_len: Any = None,
        *,
        block_len: int = UNBOUNDED,
        all_logits: bool = False,
        rope_len: Any = 0,
        media: MediaTokens | None = None,
    ) -> Any:
        """Computes the first tokens of a prompt on an empty cache.

        Args:
            weights: Weights by name.
            ids: int32[T], padded on the right if the model's results do not depend on padding.
            length: int32[], number of tokens without padding.
            layout: Result of `layout`.
            hidden: Encoder output ``[1, padded_len, width]``; None without an encoder.
            source_len: int32[], length of the encoder output without padding.
            block_len: Maximum number of tokens of one forward; longer chunks, without padding, take several in turn.
            all_logits: Whether to return logits of every token instead of the last one's.
            rope_len: int32[], minimum length of the rotary frequencies; 0: each token's own.
            media: Images and audio of the tokens; None: they are text.

        Returns:
            Logits float32[1, vocab] (or [T, vocab]), and new keys and values or the state by leaf.
        """
        num_tokens = ids.shape[0]
        if num_tokens > block_len:
            how = {"all_logits": all_logits, "rope_len": rope_len, "media": media}
            return begin_in_blocks(self, weights, ids, layout, hidden, source_len, block_len, how)
        states: LayerStates = self._new_cache(num_tokens).states
        inputs = {**self._inputs(ids, 0, length, all_logits, rope_len), **self._source(hidden, source_len)}
        inputs |= self._positions(media)
        with features_in_place(self.program, media):
            return self._forward(weights, states, jnp.int32(0), inputs, layout)

    def extend(
        self,
        weights: Weights,
        leaves: Leaves,
        offset: Any,
        ids: jax.Array,
        length: Any,
        layout: CacheLayout,
        source_len: Any = None,
        *,
        block_len: int = UNBOUNDED,
        all_logits: bool = False,
        rope_len: Any = 0,
        media: MediaTokens | None = None,
        delta: Any = 0,
        wanted: jax.Array | None = None,
        table: jax.Array | None = None,
        slot: jax.Array | None = None,
        padded_source_len: int = 0,
    ) -> Any:
        """Computes tokens as `prefill`, behind the `offset` int32[] tokens that `leaves` hold.

        `delta` int32[] is added to positions for rotary embeddings; `wanted` int32[n] are the tokens whose logits are
        returned in place of the last one's. With `table` int32[pages], the row of the page table, leaves in pages are
        pools and returned as pools. With `slot` int32[], leaves of the encoder output are those of all slots, padded to
        `padded_source_len` for the model, and empty ones are returned.
        """
        if ids.shape[0] > block_len:
            how = {"all_logits": all_logits or wanted is not None, "rope_len": rope_len, "media": media, "table": table}
            found = extend_in_blocks(self, weights, leaves, offset, ids, layout, source_len, block_len, how)
            return found if wanted is None else (found[0][wanted], found[1])
        states = jax.tree.unflatten(self._first[1], leaves)
        for layer in states:
            if isinstance(layer, AttentionLayer) and layer.pool is not None:
                if table is None:
                    layer.capacity = layer.pool.shape[2]
                else:
                    layer.use_pages(table, length)
            elif isinstance(layer, CrossLayer) and slot is not None:
                layer.use_slot(slot, source_len, padded_source_len, is_fixed_len=self._source_len_is_fixed)
        inputs = self._inputs(ids, offset, length, all_logits, rope_len, delta) | self._positions(media)
        if wanted is not None:
            inputs["last"] = wanted
        inputs["starts"] = jnp.zeros(1, jnp.int32)  # in case the model cannot do without a mask
        _, kept = layout.partition(leaves)
        padded_lens = {state.shape[2] for state, row in zip(kept, layout.rows, strict=True) if row.is_of_source}
        for padded_len in padded_lens if slot is None else {padded_source_len}:  # one, or none
            known: Any = self._trial_context[HIDDEN][0]  # of the output itself only the shape is of use any more
            inputs |= self._source(jnp.zeros((1, padded_len, known.shape[2]), known.dtype), source_len)
        with features_in_place(self.program, media):
            before = None if table is None else leaves
            return self._forward(weights, states, jnp.asarray(offset), inputs, layout, before, slot is not None)

    def _source(self, hidden: jax.Array | None, source_len: Any) -> dict[str, Any]:
        """Returns the encoder arguments of a forward, with `source_len` valid positions."""
        if hidden is None:
            return {}
        return context(hidden, source_len, self._source_mask)

    def _inputs(
        self, ids: jax.Array, offset: Any, length: Any, all_logits: bool, rope_len: Any = 0, delta: Any = 0
    ) -> dict[str, Any]:
        names = self.program.names
        inputs: dict[str, Any] = {names.ids: ids[None]}
        # What lies behind the end of a table of positions is no number, so padding does not count on.
        positions = offset + jnp.minimum(jnp.arange(ids.shape[0], dtype=jnp.int32), length - 1)
        if self.program.accepts(names.positions):
            inputs[names.positions] = (positions + delta)[None]
        if self.program.rope is not None:
            inputs["rope_lens"] = jnp.maximum(positions + 1, rope_len)
        if not all_logits and ids.shape[0] > 1:
            inputs["last"] = jnp.asarray(length - 1)
        return inputs

    def _positions(self, media: MediaTokens | None) -> dict[str, Any]:
        """Returns the positions of tokens on several axes, int32[axes, 1, T]."""
        if media is None or media.positions is None:
            return {}
        return {self.program.names.positions: media.positions[:, None]}

    def _forward(
        self,
        weights: Weights,
        states: LayerStates,
        offset: jax.Array,
        inputs: dict[str, Any],
        layout: CacheLayout,
        before: Leaves | None = None,
        has_slot: bool = False,
    ) -> tuple[Any, Leaves]:
        spec = CallSpec(output_hidden_states=bool(self.layers))
        fields, after = self.program.forward(weights, states, offset, inputs, spec)
        assert after is not None
        num_tokens = inputs[self.program.names.ids].shape[1]
        news = self._cache_updates(after, layout, offset, num_tokens, before)
        if has_slot:
            pages, rows = layout.partition(news)
            of_source, others = layout.without_sources(rows)
            news = layout.merge(pages, layout.with_sources(tuple(jnp.zeros(0) for _ in of_source), others))
        logits = fields["logits"][0].astype(jnp.float32)
        if not self.layers:
            return logits, news
        if fields.get("hidden_states") is None:
            raise UnsupportedModelError("the model does not return its hidden states, which a draft head reads")
        hidden = jnp.concatenate([fields["hidden_states"][layer][0] for layer in self.layers], axis=-1)
        return (logits, hidden), news

    def _cache_updates(
        self,
        states: LayerStates,
        layout: CacheLayout,
        offset: jax.Array,
        num_tokens: int,
        before: Leaves | None,
    ) -> Leaves:
        """Returns the new keys and values ``[T, heads, width]`` and the states after the forward.

        `before` are the leaves before it if keys and values were written to pages: then their pools are returned.
        """
        if _structure(states) != self._first[1]:
            raise UnsupportedModelError("what the model keeps of a sequence changes its form from step to step")
        news: list[Any] = []
        pools = (None,) * len(layout.leaves) if before is None else before
        for leaf, kind, pool in zip(jax.tree.leaves(states), layout.leaves, pools, strict=True):
            if isinstance(kind, PagedLayerSpec) and pool is not None:
                news.append(with_pages(pool, leaf))
            elif isinstance(kind, PagedLayerSpec):
                new = jax.lax.dynamic_slice_in_dim(leaf[0], offset, num_tokens, axis=1)  # [heads, T, width]
                news.append(jnp.swapaxes(new, 0, 1).astype(kind.dtype))
            elif kind.is_of_source or (leaf.shape, leaf.dtype) == (kind.shape, kind.dtype):
                news.append(leaf)
            else:
                raise UnsupportedModelError(
                    f"a state of the model is {kind.dtype}{list(kind.shape)} before a step and "
                    f"{leaf.dtype}{list(leaf.shape)} after it"
                )
        return tuple(news)


@contextlib.contextmanager
def as_unsupported() -> Iterator[None]:
    """Raises UnsupportedModelError for any error of model code inside the block."""
    try:
        yield
    except TorchaxServeError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines()[:1]
        raise UnsupportedModelError(
            f"expected a forward that can be traced on a cache, got {type(error).__name__}: {''.join(said)}"
        ) from error


def _structure(states: LayerStates) -> Any:
    """Returns the structure of cache layers without their capacity."""
    for layer in states:
        if isinstance(layer, AttentionLayer):
            layer.capacity = PROBE_LEN
    return jax.tree.structure(states)


def _shapes(states: LayerStates) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(states)]
