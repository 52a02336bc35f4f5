"""Ops of recurrent layers: references and kernels against loops over the tokens of each sequence."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_oracle import (
    LAYERS,
    NUM_ROWS,
    as_float64,
    assert_near,
    convolution_layer,
    delta_layer,
    empty_pool,
    expected_of,
    normal,
    padded,
    recurrence_layer,
    scan_layer,
    space_layer,
    table,
)
from thorough import thorough

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, use
from model_adapters.ops.cpu import ffi
from model_adapters.ops.segments import Segments

IMPLEMENTATIONS = ("reference", "cpu-ffi")
ON_GPUS = {"delta": "gpu-triton", "delta by column": "gpu-triton", "space": "gpu-triton"}
"""Kernels that run here as well, interpreted."""
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)
EACH_PAIR = pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, each) for name in LAYERS for each in IMPLEMENTATIONS), *(thorough(*pair) for pair in ON_GPUS.items())],
)


@functools.cache
def compiled(name, implementation, dtype="float32", is_invariant=False):
    """The layer and its step, compiled once for all tests that have the same shapes."""
    layer = LAYERS[name](dtype)
    run = layer.jitted()

    def call(tokens, pool, segments):
        with use(layer.op, implementation), ffi.batch_invariant(is_invariant):
            return run(tokens, pool, segments)

    return layer, call


def states_of(layer, seed, rows):
    """States that some sequences have left in rows of a pool, as numbers of the pool's dtype."""
    rng = np.random.default_rng(seed)
    made = {row: jnp.asarray(normal(rng, *layer.row) / 2, layer.pool_dtype) for row in rows}
    return {row: np.asarray(state, np.float32) for row, state in made.items()}


@st.composite
def steps(draw):
    """A step's segments: up to eight, of sequences that are new or go on, cut or not, with or without snapshots."""
    cu, read, write, held, first = [0], [], [], [], []
    rows = iter(draw(st.permutations(range(NUM_ROWS - 1))))
    num_sequences = draw(st.integers(1, 8))
    snapshot = next(rows)  # which any sequence may begin with
    for _ in range(num_sequences):
        begins_with = draw(st.sampled_from(["nothing", "own row", "snapshot"]))
        own, here = next(rows, None), len(read)
        if own is None:
            break
        at = snapshot if begins_with == "snapshot" else own
        for cut in range(draw(st.integers(1, 3))):
            length = draw(st.sampled_from([0, 1, 1, 2, 3, 15, 16, 17, 40, 64, 65, 129, 200]))
            if len(read) == 8 or cu[-1] + length > 200:
                break
            if length == 0 and cut:
                continue
            to = draw(st.sampled_from([own, own, next(rows, own)]))
            read.append(at)
            write.append(to)
            held.append(begins_with != "nothing" or len(read) > here + 1)
            first.append(here)
            cu.append(cu[-1] + length)
            at = to
            if length == 0:
                break
        else:
            if draw(st.booleans()):
                write[-1] = NUM_ROWS - 1
    return (cu, read, write, held, first), snapshot


@pytest.mark.parametrize(
    ("name", "implementations"),
    [*((name, IMPLEMENTATIONS) for name in LAYERS), *((name, (each,)) for name, each in ON_GPUS.items())],
)
@settings(max_examples=10)
@given(step=steps(), seed=st.integers(0, 3))
def test_any_step_is_that_of_a_loop(name, implementations, step, seed):
    segments = table(*step[0])
    for implementation in implementations:
        layer, run = compiled(name, implementation)
        tokens = layer.tokens(np.random.default_rng(seed), int(segments.cu[-1]))
        held = {row for row, has in zip(step[0][1], step[0][3], strict=True) if has}
        pool = empty_pool(layer, states_of(layer, seed, held | {step[1]}))
        expected, written, after = expected_of(layer, tokens, segments, pool)
        out, got = run(padded(tokens), pool, segments)
        out, got = np.asarray(out, np.float64), np.asarray(got, np.float64)
        if expected is not None:
            assert_near(out[: len(expected)], expected)
        assert (out[int(segments.cu[-1]) :] == 0).all()
        for row in range(NUM_ROWS - 1):
            if row in written:
                assert_near(got[row], after[row])
            else:
                np.testing.assert_array_equal(got[row], after[row])  # bit by bit what it was, NaN too


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@EACH_PAIR
def test_narrow_inputs_are_rounded_once(name, dtype, implementation):
    layer, run = compiled(name, implementation, dtype)
    segments = table([0, 70, 71, 75], [0, 1, 2], [0, 1, 2], [False, True, True], [0, 1, 2])
    tokens = layer.tokens(np.random.default_rng(1), 75)
    pool = empty_pool(layer, states_of(layer, 1, [1, 2]))
    expected, written, after = expected_of(layer, tokens, segments, pool)
    out, got = run(padded(tokens), pool, segments)
    assert out.dtype == dtype and got.dtype == layer.pool_dtype
    assert_near(out[:75], expected, 2**-8 if dtype == "bfloat16" else 2**-11)
    for row in written:
        assert_near(got[row], after[row], 2**-8 if name == "convolution" else 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "cpu-ffi") for name in LAYERS), *(thorough(*pair) for pair in ON_GPUS.items())],
)
def test_bits_depend_neither_on_the_batch_nor_on_cuts(name, implementation, dtype):
    layer, run = compiled(name, implementation, dtype, is_invariant=implementation == "gpu-triton")
    rng = np.random.default_rng(2)
    tokens, others = layer.tokens(rng, 90), layer.tokens(rng, 100)
    out, pool = run(padded(tokens), empty_pool(layer), table([0, 90], [2], [2], [False], [0]))
    out, state = np.asarray(out[:90], np.float32), np.asarray(pool[2], np.float32)

    # Among others, in segments of their own.
    row = [np.concatenate([b[:40], a, b[40:]]) for a, b in zip(tokens, others, strict=True)]
    segments = table(
        [0, 39, 40, 57, 90, 130, 190], [0, 1, 2, 5, 2, 4], [0, 1, 5, 2, 2, 4], [False, False, False, True, True, False],
        [0, 1, 2, 2, 2, 5],
    )  # fmt: skip
    among, pool = run(padded(row), empty_pool(layer), segments)
    np.testing.assert_array_equal(np.asarray(among[40:130], np.float32), out)
    np.testing.assert_array_equal(np.asarray(pool[2], np.float32), state)

    # In chunks of several steps, down to single tokens.
    pool, begin = empty_pool(layer), 0
    for length in (16, 1, 1, 33, 7, 1, 31):
        part = [x[begin : begin + length] for x in tokens]
        made, pool = run(padded(part), pool, table([0, length], [2], [2], [begin > 0], [0]))
        np.testing.assert_array_equal(np.asarray(made[:length], np.float32), out[begin : begin + length])
        begin += length
    np.testing.assert_array_equal(np.asarray(pool[2], np.float32), state)


@EACH_PAIR
def test_nan_stays_in_its_sequence(name, implementation):
    layer, run = compiled(name, implementation)
    tokens = layer.tokens(np.random.default_rng(3), 100)
    segments = table([0, 1, 31, 61, 62, 100], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [False] * 5, [0, 1, 2, 3, 4])
    expected, _, after = expected_of(layer, tokens, segments, empty_pool(layer))
    for x in tokens:
        x[31:62] = np.nan
    out, pool = run(padded(tokens), empty_pool(layer), segments)
    assert_near(np.concatenate([out[:31], out[62:100]]), np.concatenate([expected[:31], expected[62:]]))
    for row in (0, 1, 4):
        assert_near(pool[row], after[row])
    assert np.isnan(np.asarray(out[60])).any()


@EACH_PAIR
def test_several_sequences_read_one_snapshot_and_drop_their_states(name, implementation):
    """As drafts do, and prompts with a common beginning."""
    layer, run = compiled(name, implementation)
    tokens = layer.tokens(np.random.default_rng(4), 23)
    last = NUM_ROWS - 1
    segments = table([0, 1, 11, 12, 17, 23], [5, 5, 5, 5, 7], [0, last, last, 7, last], [True] * 5, [0, 1, 2, 3, 3])
    pool = empty_pool(layer, states_of(layer, 4, [5]))
    expected, written, after = expected_of(layer, tokens, segments, pool)
    assert set(written) == {0, 7}
    out, got = run(padded(tokens), pool, segments)
    assert_near(out[:23], expected)
    for row in (0, 5, 7):
        assert_near(got[row], after[row])


SIZES = [
    delta_layer(key_heads=1, heads=3, dim=5, width=7, is_normed=False),
    delta_layer(key_heads=2, heads=2, dim=130, width=101, by_column=True, is_normed=True),
    delta_layer(key_heads=1, heads=1, dim=64, width=256),
    space_layer(heads=1, dim=3, groups=1, states=5, has_options=False, dt_limit=(0.1, 0.5)),
    space_layer(heads=2, dim=64, groups=1, states=128),
    space_layer(heads=2, dim=37, groups=2, states=33),
    scan_layer(dim=3, states=7, has_skip=False),
    scan_layer(dim=64, states=16),
    scan_layer(dim=30, states=5, groups=3),
    recurrence_layer(channels=5),
    recurrence_layer(channels=300),
    convolution_layer(channels=5, width=2, has_bias=False),
    convolution_layer("bfloat16", channels=256, width=3, weight_dtype="float32"),
]


@pytest.mark.parametrize(
    ("layer", "implementation"),
    [
        *((layer, each) for layer in SIZES for each in IMPLEMENTATIONS),
        *(thorough(layer, "gpu-triton") for layer in SIZES if layer.op in ("gated_delta_rule", "state_space")),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each.op} {'x'.join(map(str, each.row))}",
)
def test_other_sizes(layer, implementation):
    segments = table([0, 2, 3, 20], [0, 1, 2], [0, 1, 2], [True, True, False], [0, 1, 2], 3)
    tokens = layer.tokens(np.random.default_rng(5), 20)
    pool = empty_pool(layer, states_of(layer, 5, [0, 1]))
    expected, written, after = expected_of(layer, tokens, segments, pool)
    with use(layer.op, implementation):
        out, got = layer.jitted()(tokens, pool, segments)
    assert_near(out, expected, 2**-8 if out.dtype == "bfloat16" else 1e-5)
    for row in written:
        assert_near(got[row], after[row])


@EACH_LAYER
def test_each_platform_takes_its_kernel_or_the_reference(name):
    layer = LAYERS[name]()
    tokens, pool = layer.tokens(np.random.default_rng(0), 2), empty_pool(layer)
    # "space" has states of 20 rows, "scan by group" groups of 20 channels.
    on_tpus = "tpu-pallas" if name in ("delta", "delta by column", "scan", "recurrence") else "reference"
    for platform, expected in (("cpu", "cpu-ffi"), ("tpu", on_tpus), ("gpu", ON_GPUS.get(name, "reference"))):
        with registry.on_platform(platform), registry.record_calls() as record:
            segments = table([0, 2], [0], [0], [False], [0], 1)
            layer.jitted().trace(tokens, pool, segments)
        assert record == {(layer.op, expected)}


def test_what_the_kernel_for_gpus_does_not_take_is_said():
    layer = delta_layer(key_heads=1, heads=1, dim=1025, width=8)
    tokens, pool = layer.tokens(np.random.default_rng(0), 2), empty_pool(layer)
    with registry.on_platform("gpu"), registry.fallbacks() as reasons, registry.record_calls() as record:
        layer.jitted().trace(tokens, pool, table([0, 2], [0], [0], [False], [0], 1))
    said = "sums over 1025 numbers of a state; the kernel has room for 1024"
    assert record == {(layer.op, "reference")} and reasons == [f"{layer.op}, gpu-triton: {said}"]


def test_one_segment_a_sequence():
    segments = Segments.of(jnp.array([0, 1, 4]), jnp.array([3, 1]), jnp.array([True, False]))
    assert segments.read.tolist() == segments.write.tolist() == [3, 1]
    assert segments.first.tolist() == [0, 1] and segments.lens.tolist() == [1, 3]
    assert segments.is_single.tolist() == [True, False]
    assert segments.of_token(6).tolist() == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("are_held", [True, False])
@pytest.mark.parametrize("length", [1, 70])
@EACH_PAIR
def test_states_of_a_batch_are_a_pool_without_a_row_to_drop(name, length, are_held, implementation):
    layer = LAYERS[name]()
    rows = range(3)
    tokens = layer.tokens(np.random.default_rng(6), 3 * length)
    states = states_of(layer, 6, rows)
    pool = jnp.asarray(np.stack([states[row] for row in rows]), layer.pool_dtype)
    with use(layer.op, implementation):
        out, got = layer.jitted()(tokens, pool, Segments.of_batch(3, length, are_held=are_held))
    for row in rows:
        part = as_float64([x[row * length : (row + 1) * length] for x in tokens])
        expected, after = layer.loop(part, states[row].astype(np.float64) * are_held)
        assert_near(out[row * length : (row + 1) * length], expected)
        assert_near(got[row], after)


def without_the_last_column(x):
    return x[..., :-1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("delta", lambda tokens, pool: ([without_the_last_column(tokens[0]), *tokens[1:]], pool), "q of shape"),
        (
            "delta",
            lambda tokens, pool: (tokens, pool[:, :1]),
            r"pool of rows of shape \(4, 24, 40\), got \(1, 24, 40\)",
        ),
        ("space", lambda tokens, pool: (tokens, pool.astype(jnp.bfloat16)), "pool of dtype float32, got bfloat16"),
        (
            "space",
            lambda tokens, pool: ([*tokens[:3], without_the_last_column(tokens[3])], pool),
            "b and c of one shape",
        ),
        ("scan", lambda tokens, pool: ([tokens[0], tokens[1][:1], *tokens[2:]], pool), "dt of shape"),
        (
            "scan",
            lambda tokens, pool: ([*tokens[:2], *(each[:, None].repeat(3, 1) for each in tokens[2:])], pool),
            "channels of x a multiple of the groups of b, 3, remainder 0, got 1",
        ),
        ("recurrence", lambda tokens, pool: ([tokens[0][:1], tokens[1]], pool), "gates of shape"),
        ("convolution", lambda tokens, pool: ([tokens[0].astype(jnp.bfloat16)], pool), "pool of dtype bfloat16"),
        ("convolution", lambda tokens, pool: ([without_the_last_column(tokens[0])], pool), "x of shape"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    layer = LAYERS[name]()
    tokens, pool = change(layer.tokens(np.random.default_rng(0), 2), empty_pool(layer))
    with pytest.raises(InvalidArgumentError, match=message):
        layer.run(tokens, pool, table([0, 2], [0], [0], [False], [0], 1))


def test_segments_that_do_not_fit_are_refused():
    layer = LAYERS["scan"]()
    segments = table([0, 2], [0], [0], [False], [0], 1)
    bad = Segments(segments.cu[:1], segments.read, segments.write, segments.held, segments.first)
    with pytest.raises(InvalidArgumentError, match=r"cu of shape \(2,\), got \(1,\)"):
        layer.run(layer.tokens(np.random.default_rng(0), 2), empty_pool(layer), bad)
