"""Zamba calls Mamba's functions once for each head of a layer.

In a packed step an op computes all heads at once. Outside of one, the functions walk over a prompt as Mamba's do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.state_layer import convolved, recurrent_of
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.quirks.mamba import selective_scan as scan_of_one_head
from model_adapters.quirks.quirk import Quirk


def _mixer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Computes ``[1, T, hidden]`` of a packed step; outside of one, it is the original."""
    cache: Any = kwargs.get("cache")
    layer = None if cache is None else recurrent_of(cache.get_recurrent_state(self.layer_idx))
    if layer is None:
        result: torch.Tensor = type(self).forward(self, hidden_states, **kwargs)
        return result
    # Columns of the projection are inputs and gates in turns.
    inputs, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    inputs = cache.update_conv_state(inputs.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
    bias = None if self.conv1d.bias is None else jax_view(self.conv1d.bias)
    made = convolved(inputs, jax_view(self.conv1d.weight.squeeze(1)), bias)
    if made is None:
        raise NotPackableError("a layer's convolution does not get what its cache returned")
    by_head = self.act(made)[0].unflatten(0, (self.n_mamba_heads, -1))  # [heads, width, T]
    sizes = self.time_step_rank, self.ssm_state_size, self.ssm_state_size
    steps, b, c = (self.x_proj_weight @ by_head).split(sizes, dim=1)
    x, dt, b, c = (jnp.moveaxis(jax_view(each), 2, 0) for each in (by_head, self.dt_proj_weight @ steps, b, c))
    x, dt = (each.reshape(len(x), -1) for each in (x, dt))
    # In float32, as the bias is that the original gives to the function.
    dt = jax.nn.softplus(dt.astype(jnp.float32) + jax_view(self.dt_proj_bias).reshape(-1).astype(jnp.float32))
    a = -jnp.exp(jax_view(self.A_log).astype(jnp.float32)).reshape(x.shape[1], -1)
    d = jax_view(self.D).reshape(-1)
    out = layer.run_recurrence(a.shape, lambda pool, segments: selective_scan(x, dt, a, b, c, d, pool, segments))
    cache.update_recurrent_state(layer.recurrent_handle(), self.layer_idx)
    gated = torch_view(out[None]) * torch.nn.functional.silu(gate)
    projected: torch.Tensor = self.out_proj(gated.to(hidden_states.dtype))
    return projected


QUIRK = Quirk(functions={"mamba_selective_scan": scan_of_one_head}, methods={"ZambaMambaMixer.forward": _mixer})
