"""Recurrent layers' kernels on a GPU, beside loops over the tokens of each sequence in float64."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_oracle import (
    NUM_ROWS,
    assert_near,
    delta_layer,
    empty_pool,
    expected_of,
    normal,
    padded,
    space_layer,
    table,
)

from model_adapters.ops import use
from model_adapters.ops.cpu import ffi

LAYERS = {
    "delta": delta_layer(key_heads=16, heads=32, dim=128, width=128),
    "delta in bfloat16": delta_layer("bfloat16", key_heads=16, heads=32, dim=128, width=128),
    "delta by column": delta_layer(key_heads=4, dim=128, width=128, by_column=True),
    "odd delta": delta_layer(key_heads=2, heads=6, dim=96, width=200),
    "space": space_layer(heads=64, dim=64, groups=8, states=128),
    "odd space": space_layer(heads=6, dim=37, groups=2, states=33),
    "large delta": delta_layer(key_heads=1, heads=2, dim=256, width=64),
    "large delta by column": delta_layer(key_heads=1, heads=2, dim=256, width=64, by_column=True),
    "large space": space_layer(heads=4, dim=64, groups=1, states=256),
}
CASES = {
    "single tokens": table([0, 1, 2, 3, 4], [0, 1, 2, 7], [0, 3, NUM_ROWS - 1, 7], [True, True, False, True], range(4)),
    "prompts and single tokens": table(
        [0, 39, 40, 57, 90, 130, 190], [0, 1, 2, 5, 2, 4], [0, 1, 5, 2, 2, NUM_ROWS - 1],
        [False, True, False, True, True, True], [0, 1, 2, 2, 2, 5],
    ),
    "edges of chunks": table(
        [0, 31, 63, 127, 128, 193, 194, 194, 208], [0, 1, 2, 7, 9, 4, 3, 5], [0, 1, 6, 9, 3, 4, 3, NUM_ROWS - 1],
        [True, False, False, True, True, True, True, False], [0, 1, 2, 3, 3, 5, 6, 7],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_that_of_a_loop(name, case):
    layer, segments, rng = LAYERS[name], CASES[case], np.random.default_rng(1)
    num_tokens = int(segments.cu[-1])
    tokens = layer.tokens(rng, num_tokens)
    pool = empty_pool(layer, {row: normal(rng, *layer.row) / 2 for row in (0, 1, 4, 7)})
    before = np.asarray(pool)
    expected, written, after = expected_of(layer, tokens, segments, pool)
    with use(layer.op, "gpu-triton"):
        out, got = layer.jitted()(padded(tokens), pool, segments)
    assert_near(out[:num_tokens], expected, 2**-8 if out.dtype == "bfloat16" else 1e-5)
    assert (np.asarray(out[num_tokens:], np.float32) == 0).all()
    for row in range(NUM_ROWS - 1):
        if row in written:
            assert_near(got[row], after[row], 2e-5)
        else:
            np.testing.assert_array_equal(got[row], before[row])


def microseconds_of(layer, tokens, pool, segments, *, is_invariant):
    """Of one call out of many, the quickest of five rounds."""
    run, rounds, calls = layer.jitted(), [], 20
    with use(layer.op, "gpu-triton"), ffi.batch_invariant(is_invariant):
        out, pool = run(tokens, pool, segments)
    for _ in range(5):
        jax.block_until_ready(pool)
        begin = time.perf_counter()
        for _ in range(calls):
            out, pool = run(tokens, pool, segments)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - begin) / calls * 1e6)
    return min(rounds)


@pytest.mark.parametrize("name", ["delta in bfloat16", "long delta by column", "space"])
def test_a_prompt_in_chunks_takes_less_time_than_token_by_token(name, record_property):
    """One sequence of 2,048 tokens, results beside each other, within the rounding of float32 sums in another order."""
    layer = LAYERS.get(name) or delta_layer(key_heads=32, heads=32, dim=128, width=128, by_column=True)
    tokens = [jnp.asarray(x) for x in layer.tokens(np.random.default_rng(2), 2048)]
    segments = table([0, 2048], [0], [0], [False], [0], 1)
    made = {}
    for kind, is_invariant in (("in chunks", False), ("token by token", True)):
        with use(layer.op, "gpu-triton"), ffi.batch_invariant(is_invariant):
            out, pool = layer.jitted()(tokens, jnp.zeros((2, *layer.row)), segments)
        made[kind] = np.asarray(out, np.float64), np.asarray(pool[0], np.float64)
    for got, expected in zip(*made.values(), strict=True):
        assert_near(got, expected, 2**-7 if name.endswith("bfloat16") else 2e-5)
    pool = {kind: jnp.zeros((2, *layer.row)) for kind in made}
    taken = {
        kind: microseconds_of(layer, tokens, pool[kind], segments, is_invariant=kind != "in chunks") for kind in made
    }
    for kind, microseconds in taken.items():
        record_property(f"microseconds {kind}", round(microseconds))
        print(f"{name}, 2,048 tokens {kind}: {microseconds:.0f} us")
    assert taken["in chunks"] < taken["token by token"]
