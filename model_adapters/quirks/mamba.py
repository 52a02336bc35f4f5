"""Mamba's first state space walks over a prompt in Python, one operator after the other.

The walk is that of transformers' code. Traced, that is a program that grows with the prompt, and compiling it takes
minutes. Here it is one loop on the device, which computes the same of each token (transformers 5.23:
`mamba_selective_scan` of four modeling files).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.quirks.quirk import Quirk


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the original of [batch, width, len].

    `A` is [width, state], `B` and `C` are [batch, state, len]. Further arguments choose among the original's ways of
    computing the same.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = torch.nn.functional.softplus(dt)
    rates = jax_view(A)
    by_token = tuple(jnp.moveaxis(jax_view(x), 2, 0) for x in (hidden_states, dt, B, C))
    batch, width, _ = hidden_states.shape

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, delta, b, c = token  # [batch, width] twice, [batch, state] twice
        decay = jnp.exp(rates[None] * delta[:, :, None])
        added = delta[:, :, None] * b[:, None, :].astype(jnp.float32) * x[:, :, None].astype(jnp.float32)
        state = (decay * state + added).astype(state.dtype)
        out = jnp.einsum("bwn,bn->bw", state.astype(x.dtype), c, preferred_element_type=jnp.float32)
        return state, out.astype(x.dtype)

    first = jnp.zeros((batch, width, rates.shape[1]), jnp.result_type(rates.dtype, jnp.float32))
    last, outputs = jax.lax.scan(step, first, by_token)
    scanned = torch_view(jnp.moveaxis(outputs, 0, 2))
    if D is not None:
        scanned = scanned + hidden_states * D[None, :, None]
    if z is not None:
        scanned = scanned * torch.nn.functional.silu(z)
    return (scanned, torch_view(last)) if return_last_state else scanned


QUIRK = Quirk(functions={"mamba_selective_scan": selective_scan})
