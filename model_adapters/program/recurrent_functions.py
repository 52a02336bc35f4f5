"""Functions that recurrent layers call, on the states of all sequences of a packed step.

Layers of transformers call a convolution and a recurrence by names of their modeling file. In a packed trace the cache
has given them handles (`caches/state_layer.py`); functions of these names that get a handle run the op of that layer.
Calls without one may be a batch's (`batch_recurrences`); all others are the original's. A function is replaced only
where its arguments have the names that are read here (transformers 5.24); elsewhere a handle meets code that does not
know it, and the model is not packed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.activations import ACT2FN

from model_adapters import quirks
from model_adapters.bridge.views import in_torch_mode, jax_view, torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.state_layer import StateLayer, convolved, layer_asked_last, only_sequence, recurrent_of
from model_adapters.once import once
from model_adapters.ops.gated_delta_rule import gated_delta_rule
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.ops.state_space import state_space
from model_adapters.program import batch_recurrences
from model_adapters.sharding.sharded_trace import channel_layout

UNLIMITED = (0.0, float("inf"))


def _arrays(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    return tuple(None if tensor is None else jax_view(tensor) for tensor in tensors)


def _causal_conv1d_fn(given: dict[str, Any]) -> torch.Tensor | None:
    """Computes [1, D, T]; returns None for inputs that come from no cache of a packed step."""
    weight, bias = _arrays(given["weight"], given["bias"])
    made = convolved(given["hidden_states"], weight, bias, channel_layout(weight))
    return made if made is None or given["activation"] is None else ACT2FN[given["activation"]](made)


def _gated_delta_rule(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Computes [1, T, heads, dim] and a handle; with ``g`` by column of keys, too (Kimi)."""
    layer = recurrent_of(given["initial_state"])
    if layer is None:
        return None
    q, k, v, g, beta = (only_sequence(given[name]) for name in ("query", "key", "value", "g", "beta"))

    def run(pool: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
        is_normed = bool(given["use_qk_l2norm_in_kernel"])
        return gated_delta_rule(q, k, v, g, beta, pool, segments, is_normed=is_normed)

    out = layer.run_recurrence((v.shape[1], k.shape[2], v.shape[2]), run)
    return torch_view(out[None]), layer.recurrent_handle()


def _state_space(layer: StateLayer, x: jax.Array, b: jax.Array, *others: Any) -> jax.Array:
    """Runs Mamba-2's op on x [T, H, P] and b [T, G, N]; others: dt, A, C, D, bias of dt."""
    dt, a, c, d, dt_bias = others

    def run(pool: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
        return state_space(x, dt, a.astype(jnp.float32), b, c, d, dt_bias, pool, segments)

    return layer.run_recurrence((*x.shape[1:], b.shape[2]), run)


def _limited(dt: jax.Array, dt_bias: jax.Array | None, limit: Any, generated: jax.Array) -> jax.Array:
    """Returns dt [T, H] with its bias, so that softplus of it is limited for tokens of prompts.

    Generated tokens are computed by `mamba2_selective_state_update`, which knows no limit (transformers 5.24).
    """
    dt = dt.astype(jnp.float32) + (0 if dt_bias is None else dt_bias.astype(jnp.float32))
    least, most = (
        math.log(math.expm1(each)) if 0 < each < 700 else math.copysign(math.inf, each - 1) for each in limit
    )
    return jnp.where(generated[:, None], dt, jnp.clip(dt, least, most))


def _mamba2_chunk_scan(given: dict[str, Any]) -> Any:
    """Computes [1, T, H, P], and a handle if it is asked for."""
    layer = recurrent_of(given["initial_states"])
    if layer is None:
        return None
    if not given["dt_softplus"]:
        raise NotPackableError("a layer takes its time steps as they are")
    x, dt, b, c = (only_sequence(given[name]) for name in ("hidden_states", "dt", "B", "C"))
    a, d, dt_bias = _arrays(given["A"], given["D"], given["dt_bias"])
    if tuple(given["dt_limit"]) != UNLIMITED and layer.generated is not None:
        dt, dt_bias = _limited(dt, dt_bias, given["dt_limit"], layer.generated), None
    out = torch_view(_state_space(layer, x, b, dt, a, c, d, dt_bias)[None])
    return (out, layer.recurrent_handle()) if given["return_final_states"] else out


def _mamba2_selective_state_update(given: dict[str, Any]) -> torch.Tensor | None:
    """Computes [1, H, P] of one token; arguments are expanded to the shape of the state."""
    layer = recurrent_of(given["state"])
    if layer is None:
        return None
    if given["z"] is not None or not given["dt_softplus"]:
        raise NotPackableError("a layer's step has a gate, or takes its time steps as they are")
    x, dt, b, c, a, d, dt_bias = _arrays(
        *(given[name] for name in ("hidden_states", "dt", "B", "C", "A", "D", "dt_bias"))
    )
    d, dt_bias = (None if each is None else each[:, 0] for each in (d, dt_bias))
    return torch_view(_state_space(layer, x, b, dt[..., 0], a[:, 0, 0], c, d, dt_bias))


def _selective_scan(layer: StateLayer, given: dict[str, Any], dt_bias: str, *operands: jax.Array | None) -> jax.Array:
    """Runs Mamba's op on x, dt [T, D] and b, c [T, N]; returns [T, D], gated."""
    x, dt, b, c, gate = operands
    assert x is not None and dt is not None and b is not None and c is not None
    a, d, bias = _arrays(given["A"], given["D"], given[dt_bias])
    if bias is not None:
        dt = dt + bias.astype(dt.dtype)
    if given["dt_softplus" if dt_bias == "dt_bias" else "delta_softplus"]:
        dt = jax.nn.softplus(dt)

    def run(pool: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
        return selective_scan(x, dt, a, b, c, d, pool, segments)

    out = layer.run_recurrence(tuple(a.shape), run)
    return out if gate is None else (out * jax.nn.silu(gate)).astype(x.dtype)


def _mamba_selective_scan(given: dict[str, Any]) -> Any:
    """Computes [1, D, T], and a handle if asked; the state is that of the layer asked last."""
    layer = layer_asked_last()
    if layer is None:
        return None
    x, dt, b, c = (only_sequence(given[name]).T for name in ("hidden_states", "dt", "B", "C"))
    gate = None if given["z"] is None else only_sequence(given["z"]).T
    out = torch_view(_selective_scan(layer, given, "delta_bias", x, dt, b, c, gate).T[None])
    return (out, layer.recurrent_handle()) if given["return_last_state"] else out


def _mamba_selective_state_update(given: dict[str, Any]) -> torch.Tensor | None:
    """Computes [1, D] of one token."""
    layer = recurrent_of(given["state"])
    if layer is None:
        return None
    operands = _arrays(*(given[name] for name in ("hidden_states", "dt", "B", "C", "z")))
    return torch_view(_selective_scan(layer, given, "dt_bias", *operands))


_DELTA = "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel"
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_fn": (_causal_conv1d_fn, "hidden_states weight bias activation"),
    "torch_chunk_gated_delta_rule": (_gated_delta_rule, _DELTA),
    "torch_recurrent_gated_delta_rule": (_gated_delta_rule, _DELTA),
    "chunk_kimi_delta_attention": (_gated_delta_rule, _DELTA),
    "recurrent_kimi_delta_attention": (_gated_delta_rule, _DELTA),
    "mamba2_chunk_scan": (
        _mamba2_chunk_scan,
        "hidden_states dt A B C D dt_bias initial_states dt_softplus dt_limit return_final_states",
    ),
    "mamba2_selective_state_update": (
        _mamba2_selective_state_update,
        "state hidden_states dt A B C D dt_bias dt_softplus z",
    ),
    "mamba_selective_scan": (
        _mamba_selective_scan,
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state",
    ),
    "mamba_selective_state_update": (
        _mamba_selective_state_update,
        "state hidden_states dt A B C D dt_bias dt_softplus z",
    ),
}
"""What stands for a function of a modeling file, by its name, and the names of the arguments that it reads."""


def install(module: torch.nn.Module) -> None:
    """Gives the modeling files of `module` the functions of quirks and `FUNCTIONS`.

    A call without a handle is a quirk's. What watches the module for changes has to begin after it.
    """
    quirks.install_functions(module)
    for file in {type(child).__module__ for child in module.modules()}:
        _install_in(file)


def _is_of_torch(record: logging.LogRecord) -> bool:
    """Returns whether a message is about functions that PyTorch runs, not JAX."""
    return not in_torch_mode()


@once
def _install_in(file: str) -> None:
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_of_torch)
    names = vars(sys.modules[file])
    for name, (function, arguments) in FUNCTIONS.items():
        original = names.get(name)
        if original is None or not callable(original):
            continue
        signature = inspect.signature(original)
        if set(arguments.split()) <= set(signature.parameters):
            names[name] = _with_ops(name, function, original, signature)


def _with_ops(
    name: str, function: Callable[..., Any], original: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if in_torch_mode():
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            result = function(given.arguments)
            if result is None:
                result = batch_recurrences.of_batch(name, given.arguments)
            if result is not None:
                return result
        return original(*args, **kwargs)

    return chosen
