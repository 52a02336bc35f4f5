"""RecurrentGemma walks over a prompt in Python; here its recurrence is one loop.

The loop runs on the device (see `mamba`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.quirks.quirk import Quirk

_LRU = "RecurrentGemmaRglru"


def _rnn_scan(
    self: Any,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the original as one loop on the device.

    `hidden_states` and `recurrent_gate` are [batch, len, width], the states [batch, width].
    """
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


QUIRK = Quirk(methods={f"{_LRU}._rnn_scan": _rnn_scan})
