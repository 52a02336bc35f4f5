"""Ops of recurrent layers against transformers' own functions, and what XLA makes of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from recurrent_oracle import LAYERS, assert_near, empty_pool, normal, table
from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from model_adapters.ops import use
from model_adapters.ops.causal_convolution import causal_convolution
from model_adapters.ops.gated_delta_rule import gated_delta_rule
from model_adapters.ops.linear_recurrence import linear_recurrence
from model_adapters.ops.segments import Segments
from model_adapters.ops.selective_scan import selective_scan
from model_adapters.ops.state_space import state_space

IMPLEMENTATIONS = ("reference", "cpu-ffi")
EACH_IMPLEMENTATION = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
NUM_TOKENS = 70
PROMPT = table([0, NUM_TOKENS], [1], [1], [False], [0], 1)
TOKEN = table([0, 1], [1], [1], [True], [0], 1)


def pool_of(*row):
    return jnp.full((3, *row), jnp.nan, jnp.float32)


def both(run, arrays, pool):
    """A prompt and one token behind it: outputs of both and the state."""
    prompt, pool = run(*(jnp.asarray(x[:NUM_TOKENS]) for x in arrays), pool, PROMPT)
    token, pool = run(*(jnp.asarray(x[NUM_TOKENS:]) for x in arrays), pool, TOKEN)
    return np.concatenate([prompt, token]), np.asarray(pool[1])


def batch_of_one(arrays, tokens):
    return [torch.from_numpy(x[tokens])[None] for x in arrays]


def check_delta(implementation, chunk, step, arrays, is_normed):
    with use("gated_delta_rule", implementation):
        run = jax.jit(lambda *args: gated_delta_rule(*args, is_normed=is_normed))
        out, state = both(run, arrays, pool_of(*arrays[2].shape[1:2], arrays[0].shape[2], arrays[2].shape[2]))
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": is_normed}
    prompt, kept = chunk(*batch_of_one(arrays, slice(NUM_TOKENS)), initial_state=None, **options)
    token, kept = step(*batch_of_one(arrays, slice(NUM_TOKENS, None)), initial_state=kept, **options)
    assert_near(out, torch.cat([prompt, token], 1)[0].numpy())
    assert_near(state, kept[0].numpy())


def delta_inputs(num_heads, num_key_heads, by_column):
    rng, n = np.random.default_rng(0), NUM_TOKENS + 1
    q, k, v = normal(rng, n, num_key_heads, 16), normal(rng, n, num_key_heads, 16), normal(rng, n, num_heads, 24)
    g = -np.abs(normal(rng, n, num_heads, 16) if by_column else normal(rng, n, num_heads)) / 2
    return q / 4, k / 4, v, g, 1 / (1 + np.exp(-normal(rng, n, num_heads)))


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("is_normed", [True, False])
def test_gated_delta_rule_of_qwen3_next(implementation, is_normed):
    arrays = delta_inputs(4, 2, by_column=False)
    check_delta(implementation, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule, arrays, is_normed)


@EACH_IMPLEMENTATION
def test_delta_attention_of_kimi_linear(implementation):
    arrays = delta_inputs(4, 4, by_column=True)
    check_delta(implementation, chunk_kimi_delta_attention, recurrent_kimi_delta_attention, arrays, True)


@EACH_IMPLEMENTATION
def test_state_space_of_mamba2(implementation):
    rng, n, heads, dim, states = np.random.default_rng(0), NUM_TOKENS + 1, 4, 12, 16
    a, d, bias = -np.exp(normal(rng, heads)), normal(rng, heads), normal(rng, heads)
    x, dt = normal(rng, n, heads, dim), normal(rng, n, heads)
    b, c = normal(rng, n, 2, states), normal(rng, n, 2, states)

    def run(x, dt, b, c, pool, segments):
        return state_space(x, dt, a, b, c, jnp.asarray(d), jnp.asarray(bias), pool, segments)

    with use("state_space", implementation):
        out, state = both(jax.jit(run), (x, dt, b, c), pool_of(heads, dim, states))
    x, dt, b, c = batch_of_one((x, dt, b, c), slice(None))
    a, d, bias = map(torch.from_numpy, (a, d, bias))
    first = slice(NUM_TOKENS)
    prompt, kept = mamba2_chunk_scan(
        x[:, first], dt[:, first], a, b[:, first], c[:, first], 32, D=d, dt_bias=bias, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip
    by_number = [each[:, -1][..., None].expand(-1, -1, dim) for each in (dt, d[None, None], bias[None, None])]
    token = mamba2_selective_state_update(
        kept, x[:, -1], by_number[0], a[:, None, None].expand(-1, dim, states), b[:, -1], c[:, -1], by_number[1][0],
        z=None, dt_bias=by_number[2][0], dt_softplus=True,
    )  # fmt: skip
    assert_near(out, torch.cat([prompt, token[:, None].reshape(1, 1, heads, dim)], 1)[0].numpy())
    assert_near(state, kept[0].numpy())


@EACH_IMPLEMENTATION
def test_selective_scan_of_jamba(implementation):
    rng, n, dim, states = np.random.default_rng(0), NUM_TOKENS + 1, 24, 8
    a, d = -np.exp(normal(rng, dim, states)), normal(rng, dim)
    x, dt, b, c = normal(rng, n, dim), np.abs(normal(rng, n, dim)), normal(rng, n, states), normal(rng, n, states)

    def run(x, dt, b, c, pool, segments):
        return selective_scan(x, dt, a, b, c, jnp.asarray(d), pool, segments)

    with use("selective_scan", implementation):
        out, state = both(jax.jit(run), (x, dt, b, c), pool_of(dim, states))
    x, dt, b, c = (each.mT for each in batch_of_one((x, dt, b, c), slice(None)))
    a, d = map(torch.from_numpy, (a, d))
    first = [each[..., :NUM_TOKENS] for each in (x, dt, b, c)]
    prompt, kept = mamba_selective_scan(first[0], first[1], a, *first[2:], D=d, return_last_state=True)
    token = mamba_selective_state_update(kept, x[..., -1], dt[..., -1], a, b[..., -1], c[..., -1], D=d)
    assert_near(out, torch.cat([prompt, token[..., None]], 2)[0].T.numpy())
    assert_near(state, kept[0].numpy())


@EACH_IMPLEMENTATION
def test_linear_recurrence_of_recurrent_gemma(implementation):
    rng, n, width = np.random.default_rng(0), NUM_TOKENS + 1, 24
    gates, x = 1 / (1 + np.exp(-normal(rng, n, width))), normal(rng, n, width)
    with use("linear_recurrence", implementation):
        out, state = both(jax.jit(linear_recurrence), (gates, x), pool_of(width))
    kept, made = torch.zeros(1, width), []
    for part in (slice(NUM_TOKENS), slice(NUM_TOKENS, None)):
        gates_of_it, x_of_it = batch_of_one((gates, x), part)
        reset = torch.zeros(1, 1, 1, dtype=torch.bool)
        one, kept = RecurrentGemmaRglru._rnn_scan(None, x_of_it, gates_of_it, reset, kept)
        made.append(one)
    assert_near(out, torch.cat(made, 1)[0].numpy())
    assert_near(state, kept[0].numpy())


@EACH_IMPLEMENTATION
def test_convolution_of_qwen3_next(implementation):
    rng, channels = np.random.default_rng(0), 40
    weight, bias, x = normal(rng, channels, 4), normal(rng, channels), normal(rng, NUM_TOKENS + 1, channels)

    def run(x, pool, segments):
        return causal_convolution(x, jnp.asarray(weight), jnp.asarray(bias), pool, segments)

    with use("causal_convolution", implementation):
        out, state = both(jax.jit(run), (x,), pool_of(3, channels))
    expected = causal_conv1d_fn(torch.from_numpy(x).T[None], torch.from_numpy(weight), torch.from_numpy(bias))
    assert_near(out, expected[0].T.numpy())
    np.testing.assert_array_equal(state, x[-3:])


@pytest.mark.parametrize("sizes", [(1, 1), (9, 3)], ids=str)
@EACH_IMPLEMENTATION
@pytest.mark.parametrize("name", LAYERS)
def test_a_donated_pool_is_not_copied(name, implementation, sizes):
    num_tokens, num_segments = sizes
    layer = LAYERS[name]()
    numbers = [jax.ShapeDtypeStruct((num_segments + more,), "int32") for more in (1, 0, 0, 0)]
    segments = Segments(*numbers[:3], jax.ShapeDtypeStruct((num_segments,), "bool"), numbers[3])
    tokens = jax.eval_shape(lambda: layer.tokens(np.random.default_rng(0), num_tokens))
    with use(layer.op, implementation):
        text = layer.jitted().lower(tokens, jax.eval_shape(lambda: empty_pool(layer)), segments).compile().as_text()
    shape = ",".join(map(str, empty_pool(layer).shape))
    assert re.search(rf"input_output_alias=.*\{{1\}}: \({len(tokens)},", text)
    assert re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|convert|bitcast-convert)\(", text) == []
