"""RWKV writes into its weights at its first inference, and walks over prompts in Python.

It divides some weights by powers of two and the hidden states alike, against overflow in 16 bits; what comes out is the
same. Weights here are arguments of a program, and stay as they are. Its recurrence is one loop on the device, since a
program that grows with the prompt takes minutes to compile (see `mamba`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.quirks.quirk import Quirk

_State = tuple[jax.Array, jax.Array, jax.Array]
"""Numerator and denominator, divided by the exponential of the third, each float32[batch, width]."""


def _rescale_layers(self: Any) -> None:
    """Does nothing: the layers stay as they were loaded."""


def _linear_attention(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Computes the original as one loop on the device.

    `key` and `value` are [batch, len, width], the rest [width]; the state's three parts are a list.
    """
    decay, first, keys, values = jax_view((-torch.exp(time_decay), time_first, key, value))

    def step(carry: _State, token: tuple[jax.Array, jax.Array]) -> tuple[_State, jax.Array]:
        numerator, denominator, highest = carry
        k, v = token[0].astype(jnp.float32), token[1]
        most = jnp.maximum(highest, k + first)
        old, new = jnp.exp(highest - most), jnp.exp(k + first - most)
        out = (old * numerator + new * v) / (old * denominator + new)
        most = jnp.maximum(highest + decay, k)
        old, new = jnp.exp(highest + decay - most), jnp.exp(k - most)
        after = old * numerator + new * v, old * denominator + new, most
        return (after[0], after[1], after[2]), out.astype(keys.dtype)

    if state is None:
        zeros = jnp.zeros_like(keys[:, 0], jnp.float32)
        begin: _State = (zeros, zeros, zeros - 1e38)
    else:
        numerator, denominator, highest = (jnp.asarray(part, jnp.float32) for part in jax_view(tuple(state)))
        begin = (numerator, denominator, highest)
    by_token = jnp.moveaxis(keys, 1, 0), jnp.moveaxis(values, 1, 0)
    last, outputs = jax.lax.scan(step, begin, by_token)
    rest = list(torch_view(last)) if return_state or state is not None else None
    return torch_view(jnp.moveaxis(outputs, 0, 1)), rest


QUIRK = Quirk(
    methods={"RwkvModel._rescale_layers": _rescale_layers},
    functions={"rwkv_linear_attention": _linear_attention},
    ignored_arguments=frozenset({"attention_mask"}),
    causal_without_mask=True,
)
