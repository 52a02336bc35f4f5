"""Recurrent layers in plain float64 loops, and the inputs that their tests share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.causal_convolution import causal_convolution
from model_adapters.ops.gated_delta_rule import gated_delta_rule
from model_adapters.ops.linear_recurrence import linear_recurrence
from model_adapters.ops.segments import Segments
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.ops.state_space import state_space

MAX_TOKENS, MAX_SEGMENTS, NUM_ROWS = 208, 8, 12


@dataclass(frozen=True)
class Layer:
    """An op with fixed weights.

    `tokens(rng, n)` are its arrays by token, `run(tokens, pool, segments)` the op, `loop(tokens, state)` the same in
    float64 for one sequence, which returns outputs and the state; `row` is the shape of a row of its pool.
    """

    op: str
    tokens: object
    run: object
    loop: object
    row: tuple
    pool_dtype: object = "float32"

    def jitted(self):
        """A new function, so that nothing that was traced with another implementation is found."""
        return jax.jit(lambda tokens, pool, segments: self.run(tokens, pool, segments), donate_argnums=1)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta_layer(dtype="float32", *, key_heads=2, heads=4, dim=24, width=40, by_column=False, is_normed=True):
    def tokens(rng, n):
        q, k, v = normal(rng, n, key_heads, dim), normal(rng, n, key_heads, dim), normal(rng, n, heads, width)
        g = -np.abs(normal(rng, n, heads, dim) if by_column else normal(rng, n, heads)) / 2
        beta = 1 / (1 + np.exp(-normal(rng, n, heads)))
        if not is_normed:
            q, k = q / dim**0.5, k / dim**0.5
        return [*(x.astype(jnp.dtype(dtype)) for x in (q, k, v)), g, beta]

    def run(tokens, pool, segments):
        return gated_delta_rule(*tokens, pool, segments, is_normed=is_normed)

    def loop(tokens, state):
        q, k, v, g, beta = tokens
        q, k = (np.repeat(unit(x) if is_normed else x, heads // key_heads, axis=1) for x in (q, k))
        out = np.zeros_like(v)
        for t in range(len(q)):
            state = state * (np.exp(g[t])[..., None] if by_column else np.exp(g[t])[:, None, None])
            delta = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + k[t][..., None] * delta[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t]) * dim**-0.5
        return out, state

    return Layer("gated_delta_rule", tokens, run, loop, (heads, dim, width))


def space_layer(
    dtype="float32", *, heads=6, dim=20, groups=2, states=24, has_options=True, dt_limit=(0.0, float("inf"))
):
    rng = np.random.default_rng(7)
    a, d, bias = -np.exp(normal(rng, heads)), normal(rng, heads), normal(rng, heads)

    def tokens(rng, n):
        b, c = normal(rng, n, groups, states), normal(rng, n, groups, states)
        return [x.astype(jnp.dtype(dtype)) for x in (normal(rng, n, heads, dim), normal(rng, n, heads), b, c)]

    def run(tokens, pool, segments):
        x, dt, b, c = tokens
        options = (jnp.asarray(d), jnp.asarray(bias)) if has_options else (None, None)
        return state_space(x, dt, jnp.asarray(a), b, c, *options, pool, segments, dt_limit=dt_limit)

    def loop(tokens, state):
        x, dt, b, c = tokens
        dt = np.clip(np.logaddexp(0, dt + (bias if has_options else 0)), *dt_limit)
        b, c = (np.repeat(each, heads // groups, axis=1) for each in (b, c))
        out = np.zeros_like(x)
        for t in range(len(x)):
            state = state * np.exp(dt[t] * a)[:, None, None] + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
            out[t] = np.einsum("hpn,hn->hp", state, c[t]) + (x[t] * d[:, None] if has_options else 0)
        return out, state

    return Layer("state_space", tokens, run, loop, (heads, dim, states))


def scan_layer(dtype="float32", *, dim=40, states=16, groups=None, has_skip=True):
    rng = np.random.default_rng(8)
    a, d = -np.exp(normal(rng, dim, states)), normal(rng, dim)

    def tokens(rng, n):
        of_groups = (n, states) if groups is None else (n, groups, states)
        x, b, c = normal(rng, n, dim), normal(rng, *of_groups), normal(rng, *of_groups)
        x, b, c = (each.astype(jnp.dtype(dtype)) for each in (x, b, c))
        return [x, np.abs(normal(rng, n, dim)), b, c]

    def run(tokens, pool, segments):
        x, dt, b, c = tokens
        return selective_scan(x, dt, jnp.asarray(a), b, c, jnp.asarray(d) if has_skip else None, pool, segments)

    def loop(tokens, state):
        x, dt, b, c = tokens
        b, c = (np.repeat(each.reshape(len(x), -1, states), dim // (groups or 1), axis=1) for each in (b, c))
        out = np.zeros_like(x)
        for t in range(len(x)):
            state = np.exp(a * dt[t][:, None]) * state + (dt[t] * x[t])[:, None] * b[t]
            out[t] = (state * c[t]).sum(-1) + (d * x[t] if has_skip else 0)
        return out, state

    return Layer("selective_scan", tokens, run, loop, (dim, states))


def convolution_layer(dtype="float32", *, channels=150, width=4, has_bias=True, weight_dtype=None):
    rng = np.random.default_rng(9)
    weight, bias = (
        jnp.asarray(normal(rng, *shape), weight_dtype or dtype) for shape in ((channels, width), (channels,))
    )

    def tokens(rng, n):
        return [normal(rng, n, channels).astype(jnp.dtype(dtype))]

    def run(tokens, pool, segments):
        return causal_convolution(*tokens, weight, bias if has_bias else None, pool, segments)

    def loop(tokens, state):
        row = np.concatenate([state, tokens[0]])
        taps = np.asarray(weight, np.float64)
        out = sum(row[i : i + len(tokens[0])] * taps[:, i] for i in range(width))
        return out + (np.asarray(bias, np.float64) if has_bias else 0), row[len(row) - (width - 1) :]

    return Layer("causal_convolution", tokens, run, loop, (width - 1, channels), dtype)


def recurrence_layer(dtype="float32", *, channels=150):
    def tokens(rng, n):
        gates = 1 / (1 + np.exp(-normal(rng, n, channels)))
        return [each.astype(jnp.dtype(dtype)) for each in (gates, normal(rng, n, channels))]

    def loop(tokens, state):
        gates, x = tokens
        out = np.zeros_like(x)
        for t in range(len(x)):
            out[t] = state = gates[t] * state + x[t]
        return out, state

    return Layer(
        "linear_recurrence", tokens, lambda tokens, *where: linear_recurrence(*tokens, *where), loop, (channels,)
    )


LAYERS = {
    "delta": delta_layer,
    "delta by column": lambda dtype="float32": delta_layer(dtype, key_heads=4, by_column=True),
    "space": space_layer,
    "scan": scan_layer,
    "scan by group": lambda dtype="float32": scan_layer(dtype, groups=2),
    "recurrence": recurrence_layer,
    "convolution": convolution_layer,
}


def table(cu, read, write, held, first, num_segments=MAX_SEGMENTS):
    """`Segments` of lists, filled up with unused ones that name any row."""
    unused = num_segments - len(read)
    cu, numbers = [*cu, *[cu[-1]] * unused], (np.array([*each, *[3] * unused], np.int32) for each in (read, write))
    first = [*first, *range(len(first), num_segments)]
    held = np.array([*held, *[True] * unused])
    return Segments(
        jnp.asarray(cu, jnp.int32), *map(jnp.asarray, numbers), jnp.asarray(held), jnp.asarray(first, jnp.int32)
    )


def as_float64(tokens):
    return [np.asarray(x, np.float64) for x in tokens]


def padded(tokens):
    """Tokens with NaN behind them, as many as any step of a test has."""
    return [np.concatenate([x, np.full((MAX_TOKENS - len(x), *x.shape[1:]), np.nan, x.dtype)]) for x in tokens]


def empty_pool(layer, held=None):
    """A pool of NaN, with the states of `held` by row."""
    pool = np.full((NUM_ROWS, *layer.row), np.nan, np.float32)
    for row, state in (held or {}).items():
        pool[row] = state
    return jnp.asarray(pool, layer.pool_dtype)


def expected_of(layer, tokens, segments, pool):
    """What a step is to give, sequence by sequence: outputs of the tokens in use and rows that are written."""
    tokens, pool = as_float64(tokens), np.array(pool, np.float64)
    cu, rows = np.asarray(segments.cu), {}
    outs = []
    for r in range(len(segments.read)):
        begin, end = int(cu[r]), int(cu[r + 1])
        if begin == end:
            continue
        state = pool[int(segments.read[r])] if bool(segments.held[r]) else np.zeros(layer.row)
        out, state = layer.loop([x[begin:end] for x in tokens], state)
        outs.append(out)
        write = int(segments.write[r])
        if write < len(pool) - 1:
            rows[write] = pool[write] = state
    return np.concatenate(outs) if outs else None, rows, pool


def assert_near(got, expected, tolerance=1e-5):
    """Within `tolerance` of the largest number."""
    got = np.asarray(got, np.float64)
    assert not np.isnan(got).any()
    error, largest = np.abs(got - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert error <= tolerance * max(largest, 1), (error, largest)
