"""The GPU kernels of recurrent layers in chunks, interpreted with the products' rounding, against float64 loops."""

import functools

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
from thorough import thorough

from model_adapters.ops import use
from model_adapters.ops.cpu import ffi
from model_adapters.ops.gpu import chunk_states
from model_adapters.ops.gpu.chunk_pairs import inverse, times
from model_adapters.ops.segments import Segments

LAYERS = {
    "delta": delta_layer(key_heads=1, heads=2, dim=70, width=40),
    "delta by column": delta_layer(key_heads=1, heads=2, dim=20, width=24, by_column=True),
    "space": space_layer(heads=2, dim=37, groups=1, states=70),
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)
EDGES = table(
    # Of 31, 32 and 64 tokens; one of 1 + 65 whose first state is a snapshot; one token; one that is dropped.
    [0, 31, 63, 127, 128, 193, 194, 194, 208],
    [0, 1, 2, 8, 9, 4, 3, 5],
    [0, 1, 6, 9, 3, 4, 3, NUM_ROWS - 1],
    [True, False, True, True, True, True, True, False],
    [0, 1, 2, 3, 3, 5, 6, 7],
)


@functools.cache
def compiled(layer):
    """The layer's step, compiled once for all tests."""
    return layer.jitted()


def run(layer, tokens, pool, segments):
    with use(layer.op, "gpu-triton"):
        return compiled(layer)(tokens, pool, segments)


def check(layer, segments, held, seed=0, change=lambda tokens: tokens):
    """A step of `segments` is that of a loop; rows that it does not write keep their bits, NaN too."""
    rng, num_tokens = np.random.default_rng(seed), int(segments.cu[-1])
    tokens = change(layer.tokens(rng, num_tokens))
    pool = empty_pool(layer, {row: normal(rng, *layer.row) / 2 for row in held})
    before = np.asarray(pool)
    expected, written, after = expected_of(layer, tokens, segments, pool)
    out, got = run(layer, padded(tokens), pool, segments)
    assert_near(out[:num_tokens], expected)
    assert (np.asarray(out[num_tokens:]) == 0).all()
    for row in range(NUM_ROWS - 1):
        if row in written:
            assert_near(got[row], after[row])
        else:
            np.testing.assert_array_equal(got[row], before[row])


@EACH_LAYER
def test_edges_of_chunks_and_sequences_of_both_kinds(name):
    check(LAYERS[name], EDGES, (0, 2, 8, 4))


@pytest.mark.parametrize(
    "layer",
    [
        thorough(delta_layer(key_heads=1, heads=1, dim=5, width=7, is_normed=False)),
        thorough(delta_layer(key_heads=1, heads=1, dim=64, width=100)),
        thorough(delta_layer(key_heads=2, heads=6, dim=128, width=128)),
        thorough(delta_layer(key_heads=1, heads=1, dim=70, width=20, by_column=True)),
        thorough(delta_layer(key_heads=2, heads=4, dim=128, width=128, by_column=True)),
        thorough(space_layer(heads=2, dim=20, groups=2, states=24, has_options=False, dt_limit=(0.1, 0.5))),
        thorough(space_layer(heads=2, dim=64, groups=1, states=256)),
        thorough(space_layer(heads=8, dim=64, groups=2, states=128)),
    ],
    ids=lambda layer: f"{layer.op} {'x'.join(map(str, layer.row))}",
)
def test_other_sizes(layer):
    check(layer, table([0, 1, 71, 104], [0, 1, 2], [0, 1, 2], [True, True, False], range(3)), (0, 1))


@pytest.mark.parametrize("name", ["delta", "delta by column"])
@pytest.mark.parametrize("size", [5.0, 60.0])
def test_strong_decays_overflow_nowhere(name, size):
    """Decays until a token are as small as exp(-3,840) in one column, and near 1 in others."""

    def change(tokens):
        q, k, v, g, beta = tokens
        return [q, k, v, (size * (np.arange(g.shape[-1]) % 3 / 2) * -np.abs(np.sin(g))).astype(np.float32), beta]

    check(LAYERS[name], table([0, 130], [1], [1], [True], [0]), (1,), change=change)


@EACH_LAYER
def test_nan_stays_in_its_sequence(name):
    layer = LAYERS[name]
    tokens = layer.tokens(np.random.default_rng(3), 140)
    segments = table([0, 40, 90, 91, 140], range(4), range(4), [False] * 4, range(4))
    expected, _, after = expected_of(layer, tokens, segments, empty_pool(layer))
    for x in tokens:
        x[60:90] = np.nan
    out, pool = run(layer, padded(tokens), empty_pool(layer), segments)
    assert_near(np.concatenate([out[:40], out[90:140]]), np.concatenate([expected[:40], expected[90:]]))
    assert np.isnan(np.asarray(out[89])).any()
    for row in (0, 2, 3):
        assert_near(pool[row], after[row])


@EACH_LAYER
def test_other_sequences_change_no_bit_of_one(name):
    """Chunks begin where segments do; few tokens of a sequence have one program, however they are cut."""
    layer, rng = LAYERS[name], np.random.default_rng(2)
    long, short, others = (layer.tokens(rng, n) for n in (90, 30, 50))
    out, pool = run(layer, padded(long), empty_pool(layer), table([0, 90], [2], [2], [False], [0]))
    made, states = run(layer, padded(short), empty_pool(layer), table([0, 30], [3], [3], [False], [0]))
    row = [np.concatenate(parts) for parts in zip(others, long, short, strict=True)]
    segments = table([0, 50, 140, 150, 170], [0, 2, 3, 3], [0, 2, 3, 3], [False, False, False, True], [0, 1, 2, 2])
    among, got = run(layer, padded(row), empty_pool(layer), segments)
    np.testing.assert_array_equal(among[50:140], out[:90])
    np.testing.assert_array_equal(among[140:170], made[:30])
    np.testing.assert_array_equal(got[2], pool[2])
    np.testing.assert_array_equal(got[3], states[3])


def test_which_sequences_are_long():
    def found(cu, first, num_tokens, dim=128):
        numbers = jnp.asarray(first, jnp.int32)
        held = jnp.zeros(len(first), bool)
        segments = Segments(jnp.asarray(cu, jnp.int32), numbers, numbers, held, numbers)
        made = chunk_states.long_sequences(segments, num_tokens, dim, most=256)
        return None if made is None else made.tolist()

    assert found([0, 31, 63, 64, 96], [0, 1, 2, 2], 96) == [False, True, True, True]
    assert found([0, 40], [0], 40, dim=256) == [True]
    assert found([0, 40], [0], 40, dim=257) is None
    assert found([0, 30], [0], 31) is None
    assert found(range(33), range(32), 32) is None  # one token each, as in a decode step
    with ffi.batch_invariant():
        assert found([0, 40], [0], 40) is None


@pytest.mark.parametrize("size", [16, 32, 64])
def test_triangular_matrices_are_inverted(size):
    rng = np.random.default_rng(size)
    for system in (np.tril(normal(rng, size, size), -1) * 0.3, np.tril(np.ones((size, size), np.float32), -1)):
        exact = np.linalg.inv(np.eye(size) + system.astype(np.float64))
        assert_near(jax.jit(inverse)(jnp.asarray(system)), exact, 2e-6)


def test_products_are_those_of_float32():
    x, y = (normal(np.random.default_rng(seed), 64, 128) for seed in (0, 1))
    exact = x.astype(np.float64) @ y.astype(np.float64).T
    got = jax.jit(lambda x, y: times(x, y, (1, 1)))(x, y)
    assert_near(got, exact, 1e-6)
