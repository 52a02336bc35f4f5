"""Recurrences over a dense cache: C++ kernels in place of functions of transformers.

In a forward over a dense cache a layer passes hidden states ``[batch, T, ...]`` and the states of its rows. Compiled by
XLA, transformers' functions take several times as long as in PyTorch (triangular solves, sums over short axes). On a
CPU the ops of packed steps compute the same, with one segment of T tokens for each row. Elsewhere, on a mesh, and where
a gradient may be taken, which is without a cache, transformers' functions stay, as they do for what an op cannot do.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.ops import registry
from model_adapters.ops.cpu.batching import with_rows_folded
from model_adapters.ops.gated_delta_rule import gated_delta_rule
from model_adapters.ops.segments import Segments
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.ops.state_space import reference as state_space_reference
from model_adapters.ops.state_space import state_space

KERNEL = "cpu-ffi"
UNIT_STEPS, UNIT_STEPS_LIMIT = 0.0, (1.0, 1.0)
"""Steps of Mamba-2's op, and their limits, with which each is one: its recurrence is that of lightning attention."""
Given = dict[str, Any]
Results = tuple[jax.Array, jax.Array]
_has_cache: contextvars.ContextVar[bool] = contextvars.ContextVar("has_cache", default=False)


@contextlib.contextmanager
def tracing(*, has_cache: bool) -> Iterator[None]:
    """Tells functions inside whether the forward has a dense cache."""
    token = _has_cache.set(has_cache)
    try:
        yield
    finally:
        _has_cache.reset(token)


def of_batch(name: str, given: Given) -> Any:
    """Returns what the function `name` of a modeling file computes; None: it has to do so."""
    return FUNCTIONS[name](given) if _has_cache.get() and name in FUNCTIONS else None


def _arrays(given: Given, names: str) -> list[Any]:
    return [None if given[name] is None else jax_view(given[name]) for name in names.split()]


def _can_run(op: str, tokens: Sequence[jax.Array], state: jax.Array) -> bool:
    """Returns whether the CPU's kernel of `op` takes ``[batch, T, ...]`` and this state."""
    if registry.platform() != "cpu" or state.dtype != jnp.float32 or not all(tokens[0].shape[:2]):
        return False
    return registry.implementation_for(op, *tokens).name == KERNEL


def _run(
    op: Callable[..., Results], tokens: Sequence[jax.Array], state: jax.Array, others: Sequence[Any], *, is_held: bool
) -> Results:
    """Runs an op on one segment for each row of a batch.

    Args:
        op: Of tokens ``[batch * T, ...]``, others, states ``[batch, ...]`` and segments.
        tokens: Arrays ``[batch, T, ...]``.
        state: ``[batch, ...]``.
        others: Weights, or None for those that there are not.
        is_held: Whether `state` is begun with; else zeros are.

    Returns:
        ``[batch, T, ...]``, and the new states.
    """

    def of_rows(*arrays: Any) -> Results:
        rows, others = arrays[: len(tokens) + 1], arrays[len(tokens) + 1 :]
        batch, length = rows[0].shape[:2]
        flat = [each.reshape(batch * length, *each.shape[2:]) for each in rows[:-1]]
        out, state = op(flat, others, rows[-1], Segments.of_batch(batch, length, are_held=is_held))
        return out.reshape(batch, length, *out.shape[1:]), state

    made: Results = with_rows_folded(of_rows, len(tokens) + 1)(*tokens, state, *others)
    return made


def _gated_delta_rule(given: Given) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Computes [batch, T, heads, dim] and, if asked, the states [batch, heads, key dim, dim]."""
    tokens = _arrays(given, "query key value g beta")
    query, key, value = tokens[:3]
    is_held, is_normed = given["initial_state"] is not None, bool(given["use_qk_l2norm_in_kernel"])
    shape = value.shape[0], value.shape[2], key.shape[3], value.shape[3]
    state = jax_view(given["initial_state"]) if is_held else jnp.zeros(shape)
    if not _can_run("gated_delta_rule", tokens, state):
        return None

    def op(tokens: Any, _: Any, state: jax.Array, segments: Segments) -> Results:
        q, k, v, g, beta = tokens
        return gated_delta_rule(q, k, v, g, beta, state, segments, is_normed=is_normed)

    out, state = _run(op, tokens, state, (), is_held=is_held)
    return torch_view(out.astype(query.dtype)), torch_view(state) if given["output_final_state"] else None


def _space(tokens: Any, state: jax.Array, others: Any, *, is_held: bool, **options: Any) -> Results:
    """Runs Mamba-2's op: tokens are x, dt, B, C, others A, D and the bias of dt."""

    def op(tokens: Any, others: Any, state: jax.Array, segments: Segments) -> Results:
        (x, dt, b, c), (a, d, dt_bias) = tokens, others
        return state_space(x, dt, a.astype(jnp.float32), b, c, d, dt_bias, state, segments, **options)

    return _run(op, tokens, state, others, is_held=is_held)


def lightning_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array, state: jax.Array | None
) -> Results:
    """Returns what queries read of decaying states, and the states.

    With each token a state is multiplied by ``exp(-slope)``.

    Args:
        query: ``[batch, T, heads, key dim]``.
        key: As query.
        value: ``[batch, T, heads, dim]``; results are like it.
        slopes: float32[heads].
        state: float32[batch, heads, dim, key dim] that tokens begin with; None: zeros.
    """
    is_held = state is not None
    if state is None:
        state = jnp.zeros((value.shape[0], *value.shape[2:], key.shape[3]))
    tokens = value, jnp.full(value.shape[:3], UNIT_STEPS), key, query
    run = state_space if _can_run("state_space", tokens, state) else state_space_reference

    def op(tokens: Any, others: Any, state: jax.Array, segments: Segments) -> Results:
        (x, dt, b, c), (slopes,) = tokens, others
        return run(x, dt, -slopes, b, c, None, None, state, segments, dt_limit=UNIT_STEPS_LIMIT)

    return _run(op, tokens, state, (slopes,), is_held=is_held)


def _mamba2_chunk_scan(given: Given) -> Any:
    """Computes float32[batch, T, H, P] and, if asked, the states [batch, H, P, N]."""
    x, dt, b, c = _arrays(given, "hidden_states dt B C")
    others = _arrays(given, "A D dt_bias")
    is_held = given["initial_states"] is not None
    state = jax_view(given["initial_states"]) if is_held else jnp.zeros((x.shape[0], *x.shape[2:], b.shape[3]))
    tokens = (x.astype(jnp.float32), dt, b, c)
    if not given["dt_softplus"] or not _can_run("state_space", tokens, state):
        return None
    limit = tuple(float(each) for each in given["dt_limit"])
    out, state = _space(tokens, state, others, is_held=is_held, dt_limit=limit)
    return (torch_view(out), torch_view(state)) if given["return_final_states"] else torch_view(out)


def _mamba2_selective_state_update(given: Given) -> torch.Tensor | None:
    """Computes [batch, H, P] of one token, and writes the state.

    Arguments are expanded to the shape of the state.
    """
    x, dt, b, c = _arrays(given, "hidden_states dt B C")
    a, d, dt_bias = _arrays(given, "A D dt_bias")
    state, tokens = jax_view(given["state"]), [each[:, None] for each in (x, dt[..., 0], b, c)]
    if not given["dt_softplus"] or not _can_run("state_space", tokens, state):
        return None
    others = a[:, 0, 0], *(None if each is None else each[:, 0] for each in (d, dt_bias))
    out, state = _space(tokens, state, others, is_held=True)
    given["state"].copy_(torch_view(state))
    return _gated(out[:, 0], given, x).to(given["hidden_states"].dtype)


def _scan(
    x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array, given: Given, *, is_held: bool
) -> Results | None:
    """Runs Mamba's op on ``[batch, T, ...]``; returns float32 and states, None if it cannot run."""
    name = "dt_bias" if is_held else "delta_bias"
    a, d, bias = _arrays(given, f"A D {name}")
    tokens = x.astype(jnp.float32), dt, b, c
    if x.ndim != 3 or a.ndim != 2 or not _can_run("selective_scan", tokens, state):
        return None
    if bias is not None:
        dt = dt + bias.astype(dt.dtype)
    if given["dt_softplus" if is_held else "delta_softplus"]:
        dt = jax.nn.softplus(dt)

    def op(tokens: Any, others: Any, state: jax.Array, segments: Segments) -> Results:
        (x, dt, b, c), (a, d) = tokens, others
        return selective_scan(x, dt, a, b, c, d, state, segments)

    return _run(op, (tokens[0], dt, b, c), state, (a, d), is_held=is_held)


def _gated(out: jax.Array, given: Given, *arrays: jax.Array | None) -> torch.Tensor:
    """Returns a result in the dtype that `arrays` have together, times the activated gate."""
    made = torch_view(out.astype(jnp.result_type(*(each for each in arrays if each is not None))))
    return made if given["z"] is None else made * torch.nn.functional.silu(given["z"])


def _mamba_selective_scan(given: Given) -> Any:
    """Computes [batch, D, T] from states of zeros and, if asked, the states [batch, D, N]."""
    x, dt, b, c = (jnp.swapaxes(each, 1, 2) for each in _arrays(given, "hidden_states dt B C"))
    made = _scan(x, dt, b, c, jnp.zeros((x.shape[0], *given["A"].shape)), given, is_held=False)
    if made is None:
        return None
    out = _gated(jnp.swapaxes(made[0], 1, 2), given, x, *_arrays(given, "D"))
    return (out, torch_view(made[1])) if given["return_last_state"] else out


def _mamba_selective_state_update(given: Given) -> torch.Tensor | None:
    """Computes [batch, D] of one token, and writes the state."""
    x, dt, b, c = (each[:, None] for each in _arrays(given, "hidden_states dt B C"))
    made = _scan(x, dt, b, c, jax_view(given["state"]), given, is_held=True)
    if made is None:
        return None
    given["state"].copy_(torch_view(made[1]))
    return _gated(made[0][:, 0], given, x, *_arrays(given, "D")).to(given["hidden_states"].dtype)


FUNCTIONS: dict[str, Callable[[Given], Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "recurrent_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba_selective_state_update": _mamba_selective_state_update,
}
"""What computes a function of a modeling file, by its name, from the arguments that `recurrent_functions` reads."""
