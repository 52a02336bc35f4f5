"""Drafts by Gemma 4's assistant, which reads the pages of its model and has none itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from model_adapters.caches.packed_batch import PackedBatch, PagedLayout
from model_adapters.draft_heads.loaded_head import HeadedWeights, LoadedAssistant
from torchax_serve.executors.speculation.draft_head import DraftHead, HeadSteps, Pools
from torchax_serve.executors.speculation.draft_model import Pick
from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, last_tokens
from torchax_serve.executors.speculation.verify_steps import VerifySteps
from torchax_serve.executors.traced_function import TracedFunction

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram


class DraftAssistant(DraftHead):
    """An assistant beside its model. Pools are those of the model, with a `HeadState` last."""

    loaded: LoadedAssistant

    def forward(
        self, program: ModelProgram, weights: HeadedWeights, pools: Pools, batch: PackedBatch, layout: PagedLayout
    ) -> tuple[jax.Array, Pools, jax.Array]:
        """Runs the model and keeps each row's last hidden state; as `DraftHead.forward`."""
        from model_adapters.program.packed_forward import forward_with_hidden  # tracing needs torch, running does not

        *of_model, state = pools
        arguments = program.with_module(), weights.model, tuple(of_model), batch, layout
        logits, of_model_after, hidden = forward_with_hidden(*arguments, self.loaded.layers)
        assert hidden is not None
        return logits, (*of_model_after, self._with_last(state, batch, hidden)), hidden

    def steps(self, weights: HeadedWeights, pools: Pools, steps: VerifySteps) -> HeadSteps:
        """Returns the step that drafts, traced: in front of the loop that runs it."""
        from model_adapters.program.assistant_forward import forward_assistant

        layers = [layer for _, layer, _ in self.loaded.reads]
        kinds = {kind: dim for kind, _, dim in self.loaded.reads}
        layout = steps.spec.packed.layout
        tables = tuple(steps.tables[layout.groups[layer]] for layer in layers)
        of_reads = dataclasses.replace(
            layout,
            groups=tuple(range(len(layers))),
            windows=tuple(layout.windows[layer] for layer in layers),
            is_decode=True,
            all_logits=False,
        )

        def step(read: Pools, hidden: jax.Array, ids: jax.Array, lens: jax.Array) -> Any:
            index = jnp.arange(len(ids) + 1, dtype=jnp.int32)
            batch = PackedBatch(ids, lens, index, lens, index[:-1], tables)
            tensors = self.loaded.tensors(weights)
            logits, own, read = forward_assistant(
                self.loaded.program, tensors, read, batch, of_reads, hidden.astype(self.dtype), kinds
            )
            return self._as_wide(logits, None), own.astype(self.dtype), read

        *_, state = pools
        read = tuple(pools[layer] for layer in layers)
        traced = TracedFunction(step, read, state.hidden[steps.slots], steps.slots, jnp.maximum(steps.ends, 0))
        return HeadSteps(traced, traced)

    def propose(
        self, head: HeadSteps, pools: Pools, rows: TokenHistory, steps: VerifySteps, pick: Pick
    ) -> tuple[jax.Array, jax.Array, Pools]:
        """Drafts tokens of each row, all at the position of its last token; as `DraftHead.propose`."""
        state, layers = pools[-1], [layer for _, layer, _ in self.loaded.reads]
        num_drafts, num_computed = steps.spec.num_drafts, rows.lens - 1
        is_found = steps.is_drafted(rows) & (state.lens[steps.slots] == num_computed) & (num_computed > 0)
        lens = jnp.where(is_found, num_computed, 0)

        # The carry, in front of draft i: drafts int32[S, k], of which the first i are there; the token in front of
        # draft i; the hidden state at it, of the served model for i = 0 and else the assistant's own; the pools that
        # are read. They come back as they were: the assistant has no keys and values, and all drafts are at one
        # position.
        def draft(index: jax.Array, carry: Any) -> Any:
            drafts, token, hidden, read = carry
            logits, hidden, read = head.later(read, hidden, token, lens)
            token = pick(logits, num_computed + index)
            return drafts.at[:, index].set(token), token, hidden, read

        drafts = jnp.zeros((len(lens), num_drafts), jnp.int32)
        carry = drafts, last_tokens(rows), state.hidden[steps.slots], tuple(pools[layer] for layer in layers)
        drafts, _, _, read = jax.lax.fori_loop(0, num_drafts, draft, carry)
        after = list(pools)
        for layer, pool in zip(layers, read, strict=True):
            after[layer] = pool
        return drafts, is_found, tuple(after)
