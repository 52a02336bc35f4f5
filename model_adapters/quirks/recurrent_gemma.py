"""RecurrentGemma keeps states on its modules, and walks over a prompt in Python.

Here states are those of cache layers, of which each recurrent block is told the index, and the recurrence is one loop
on the device (see `mamba`), or an op on the states of all sequences of a packed step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.state_layer import convolved, only_sequence, recurrent_of
from model_adapters.ops.linear_recurrence import linear_recurrence
from model_adapters.program.call_signature import cache_in
from model_adapters.quirks.quirk import Quirk


def _model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the original, in which each recurrent block has an attribute with its index."""
    blocks = [(index, layer.temporal_block) for index, layer in enumerate(self.layers)]
    blocks = [(index, block) for index, block in blocks if not hasattr(block, "layer_idx")]
    for index, block in blocks:
        block.layer_idx = index
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        for _, block in blocks:
            del block.layer_idx


def _block(
    self: Any,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    use_cache: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the original with the states of the cache; without one, it is the original."""
    cache, lru = cache_in(kwargs), self.rg_lru
    if cache is None:
        result: tuple[torch.Tensor, None] = type(self).forward(
            self, input_states, position_ids, attention_mask, use_cache, **kwargs
        )
        if not use_cache:
            lru.recurrent_states = None  # of a forward that nobody goes on from
        return result
    gate, inputs = self.act_fn(self.linear_y(input_states)), self.linear_x(input_states).transpose(1, 2)
    before, length, convolution = cache.get_recurrent_state(self.layer_idx), inputs.shape[2], self.conv_1d
    inputs = cache.update_conv_state(inputs, self.layer_idx, conv_kernel_size=self.conv1d_width)
    made = convolved(inputs, jax_view(convolution.weight.squeeze(1)), jax_view(convolution.bias))
    if made is None:
        made = convolution(inputs)[..., : inputs.shape[2]][..., -length:]
    # Its code takes the state from its attribute, and leaves the new one there.
    lru.recurrent_states = before
    out = lru(made.transpose(1, 2), position_ids)
    after, lru.recurrent_states = lru.recurrent_states, None
    cache.update_recurrent_state(after, self.layer_idx)
    return self.linear_out(out * gate), None


def _rnn_scan(
    self: Any,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the original as one loop on the device, or an op on the states of a packed step.

    `hidden_states` and `recurrent_gate` are [batch, len, width], the states [batch, width].
    """
    if (layer := recurrent_of(recurrent_states)) is not None:
        gates, inputs = only_sequence(recurrent_gate * ~reset), only_sequence(hidden_states)
        out = layer.run_recurrence(
            inputs.shape[1:], lambda pool, segments: linear_recurrence(gates, inputs, pool, segments)
        )
        return torch_view(out[None]), layer.recurrent_handle()
    if hidden_states.shape[1] == 1 and recurrent_states is None:
        return hidden_states, hidden_states[:, 0].type(acc_dtype)
    gates = jax_view((recurrent_gate * ~reset).type(acc_dtype))
    inputs = jax_view(hidden_states.type(acc_dtype))
    if recurrent_states is None:
        recurrent_states = torch.zeros_like(hidden_states[:, 0], dtype=acc_dtype)

    def step(state: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gate, new = token
        state = gate * state + new
        return state, state

    by_token = jnp.moveaxis(gates, 1, 0), jnp.moveaxis(inputs, 1, 0)
    last, states = jax.lax.scan(step, jax_view(recurrent_states).astype(gates.dtype), by_token)
    return torch_view(jnp.moveaxis(states, 0, 1)).type(hidden_states.dtype), torch_view(last)


QUIRK = Quirk(
    methods={
        "RecurrentGemmaModel.forward": _model,
        "RecurrentGemmaRecurrentBlock.forward": _block,
        "RecurrentGemmaRglru._rnn_scan": _rnn_scan,
    }
)
