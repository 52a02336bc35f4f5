"""Concatenations and merged rows that a traced program takes apart: the same numbers, without making them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.jaxpr.split_concats import split_concats

RNG = np.random.default_rng(0)


def drawn(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def primitives_in(closed):
    """Names of a program's primitives, also of the functions that it calls."""
    names = []
    for equation in closed.jaxpr.eqns:
        names.append(equation.primitive.name)
        for value in equation.params.values():
            names += primitives_in(value) if hasattr(value, "jaxpr") and hasattr(value, "consts") else []
    return names


def convolved(q, k, v, weight):
    """As a delta rule's layer: turned, multiplied by channel, an activation, turned back, cut."""
    x = jnp.concatenate([q, k, v], -1).transpose(0, 2, 1)
    x = jax.nn.silu(x * weight[None, :, None])[:, :, 1:]
    return jnp.split(x.transpose(0, 2, 1), [4, 8], -1)


def gated(gate, x, steps, scale):
    """As Mamba-2's layer: scaled by a vector, cut where two parts end, and again."""
    joined = jnp.concatenate([gate, x, steps], -1) * scale
    first, rest = joined[..., :4], joined[..., 4:]
    return first, rest[:, :, :4].reshape(-1, 2, 2), rest[..., 4:].astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (convolved, (drawn(1, 5, 4), drawn(1, 5, 4), drawn(1, 5, 6), drawn(14))),
        (gated, (drawn(1, 5, 4), drawn(1, 5, 4), drawn(1, 5, 2), drawn(10))),
    ],
)
def test_parts_stay_apart(function, args):
    assert "concatenate" in primitives_in(jax.make_jaxpr(function)(*args))
    assert "concatenate" not in primitives_in(jax.make_jaxpr(split_concats(function))(*args))
    for got, wanted in zip(split_concats(function)(*args), function(*args), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


def normed(x, gate, weight):
    """As the norm of each head: tokens and heads are merged to rows, and come apart behind it."""
    rows, gates = x.reshape(-1, x.shape[-1]), gate.reshape(-1, x.shape[-1])
    rows = rows * jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + 1e-6) * weight
    return (rows * jax.nn.silu(gates)).reshape(1, x.shape[1], -1)


def test_heads_of_a_norm_are_not_merged_with_tokens():
    args = drawn(1, 5, 3, 4), drawn(1, 5, 12), drawn(4)
    closed = jax.make_jaxpr(split_concats(normed))(*args)
    shapes = {var.aval.shape for equation in closed.jaxpr.eqns for var in equation.outvars}
    assert (15, 4) not in shapes and (1, 5, 3, 4) in shapes
    np.testing.assert_array_equal(split_concats(normed)(*args), normed(*args))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.concatenate([a, b], -1)[..., 2:5],  # across the border
        lambda a, b: jnp.concatenate([a, b], -1)[..., ::2],
        lambda a, b: jnp.concatenate([a, b], -1).reshape(-1),
        lambda a, b: jnp.concatenate([a, b], -1)[:, None] + jnp.concatenate([b, a], -1)[:, :, None],
        lambda a, b: jnp.concatenate([a, b], -1).sum(-1),
        lambda a, b: jnp.concatenate([jnp.concatenate([a, b], -1), a], -1)[..., :3],
        lambda a, b: jnp.concatenate([a, b], -1).reshape(-1, 7) @ jnp.ones((7, 2)),
        lambda a, b: a.reshape(-1, 3)[::-1].T,
        lambda a, b: jnp.where(a.reshape(-1, 3) > 0, a.reshape(-1, 3).sum(0), a.reshape(-1, 3).max(-1, keepdims=True)),
    ],
)
def test_what_cannot_stay_apart_is_computed(function):
    args = drawn(2, 5, 3), drawn(2, 5, 4)
    np.testing.assert_array_equal(split_concats(function)(*args), function(*args))
