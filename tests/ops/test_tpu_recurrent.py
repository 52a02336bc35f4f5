"""Recurrent layers' TPU kernels in interpret mode, against loops over the tokens of each sequence in float64.

Memory begins as NaN, a DMA happens no sooner than somebody waits for it, and accesses that nothing orders are reported.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_on_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_tpu import PARAMS
from jax.experimental.pallas import tpu as pltpu
from recurrent_oracle import (
    NUM_ROWS,
    assert_near,
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
from test_ops_recurrent import states_of, steps

from model_adapters.ops import registry, use
from model_adapters.ops.tpu import state_scans, state_steps
from model_adapters.ops.tpu.gated_delta_rule import _inverses
from model_adapters.ops.tpu.state_steps import Columns

LAYERS = {
    "delta": delta_layer,
    "delta by column": functools.partial(delta_layer, key_heads=4, by_column=True),
    "space": functools.partial(space_layer, dim=24),
    "scan": scan_layer,
    "recurrence": recurrence_layer,
}
SINGLES = ([0, 1, 2, 3, 4, 5, 5], [0, 7, 2, 7, 9, 4], [0, 1, 3, NUM_ROWS - 1, 9, 4], [1, 1, 0, 1, 0, 1], range(6))
"""Of rows that go on, in place or from a snapshot, one that begins, one that is dropped, one without tokens."""


def interpreted(layer):
    """The layer's step by its TPU kernel, which fails on a race."""
    run = layer.jitted()

    def call(tokens, pool, segments):
        with use(layer.op, "tpu-pallas"), pltpu.force_tpu_interpret_mode(PARAMS):
            made = jax.block_until_ready(run(tokens, pool, segments))
        pltpu.reset_tpu_interpret_mode_state()
        return made

    return call


@functools.cache
def compiled(name, dtype="float32"):
    """The layer and its step, compiled once for all tests that have the same shapes."""
    layer = LAYERS[name](dtype)
    return layer, interpreted(layer)


def check(layer, run, segments, capfd, seed=0, held=(), tolerances=(1e-5, 1e-5)):
    """A step of `segments` is that of a loop; rows that it does not write keep their bits, NaN too."""
    num_tokens = int(segments.cu[-1])
    tokens = layer.tokens(np.random.default_rng(seed), num_tokens)
    pool = empty_pool(layer, states_of(layer, seed, held))
    expected, written, after = expected_of(layer, tokens, segments, pool)
    out, got = run(padded(tokens), pool, segments)
    out, got = np.asarray(out, np.float64), np.asarray(got, np.float64)
    if expected is not None:
        assert_near(out[:num_tokens], expected, tolerances[0])
    assert (out[num_tokens:] == 0).all()
    for row in range(NUM_ROWS - 1):
        if row in written:
            assert_near(got[row], after[row], tolerances[1])
        else:
            np.testing.assert_array_equal(got[row], after[row])
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10, deadline=None)
@given(step=steps(), seed=st.integers(0, 3))
def test_any_step_is_that_of_a_loop(name, step, seed, capfd_of_all):
    layer, run = compiled(name)
    held = {row for row, has in zip(step[0][1], step[0][3], strict=True) if has}
    check(layer, run, table(*step[0]), capfd_of_all, seed, held | {step[1]})


@pytest.fixture(scope="module")
def capfd_of_all(request):
    """`capfd` for tests whose examples share it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    class Captured:
        @staticmethod
        def readouterr():
            return capture.read_global_capture()

    return Captured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_single_tokens_of_several_kinds(name, dtype, capfd):
    layer, run = compiled(name, dtype)
    tolerances = (1e-5, 1e-5) if dtype == "float32" else (2**-8, 2e-5)
    check(layer, run, table(*SINGLES), capfd, 1, (0, 7, 4), tolerances)


@pytest.mark.parametrize("name", LAYERS)
def test_chains_read_what_the_segment_before_has_written(name, capfd):
    """From a snapshot over several chunks to a row, on from there, and a segment whose state is dropped."""
    layer, run = compiled(name)
    segments = table(
        [0, 130, 131, 196, 200, 201], [5, 1, 1, 2, 0], [1, 1, 2, NUM_ROWS - 1, 3], [True] * 5, [0, 0, 0, 0, 4]
    )
    check(layer, run, segments, capfd, 2, (5, 0))


@pytest.mark.parametrize("num_tokens", [5, 20, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_short_rows_of_tokens_have_short_chunks(name, num_tokens):
    layer = LAYERS[name]()
    segments = table([0, 1, num_tokens], [0, 1], [0, 1], [True, False], [0, 1], 2)
    tokens = layer.tokens(np.random.default_rng(3), num_tokens)
    pool = empty_pool(layer, states_of(layer, 3, [0]))
    expected, written, after = expected_of(layer, tokens, segments, pool)
    out, got = interpreted(layer)(tokens, pool, segments)
    assert_near(out, expected)
    for row in written:
        assert_near(got[row], after[row])


@pytest.mark.parametrize("name", LAYERS)
def test_nan_stays_in_its_sequence(name):
    layer, run = compiled(name)
    tokens = layer.tokens(np.random.default_rng(3), 101)
    segments = table([0, 1, 31, 61, 62, 100, 101], range(6), range(6), [False] * 6, range(6))
    expected, _, after = expected_of(layer, tokens, segments, empty_pool(layer))
    for x in tokens:
        x[31:62] = np.nan
    out, pool = run(padded(tokens), empty_pool(layer), segments)
    assert_near(np.concatenate([out[:31], out[62:101]]), np.concatenate([expected[:31], expected[62:]]))
    for row in (0, 1, 4, 5):
        assert_near(pool[row], after[row])
    assert np.isnan(np.asarray(out[60])).any() and np.isnan(np.asarray(out[61])).any()


@pytest.mark.parametrize("size", [16, 32, 64])
def test_triangular_matrices_are_inverted(size):
    rng = np.random.default_rng(size)
    systems = [np.tril(normal(rng, size, size), -1) * 0.3 for _ in range(3)]
    made = jax.jit(_inverses)([jnp.asarray(system) for system in systems])
    for system, inverse in zip(systems, made, strict=True):
        exact = np.linalg.inv(np.eye(size) + system.astype(np.float64))
        assert_near(inverse, exact, 2e-6)


def test_sums_over_rows_are_in_order():
    parts = normal(np.random.default_rng(0), 8, 16, 5)
    made = jax.jit(lambda *each: state_scans.sums_over_rows(each))(*map(jnp.asarray, parts))
    assert_near(made, parts.astype(np.float64).sum(1), 1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_single_token_nothing_is_touched(name, capfd):
    layer, run = compiled(name)
    check(layer, run, table([0, 0, 0], [0, 1], [0, 1], [True, False], [0, 1]), capfd, held=[0])


@pytest.mark.parametrize(
    "layer",
    [
        delta_layer(key_heads=1, heads=3, dim=8, width=7, is_normed=False),
        delta_layer(key_heads=2, heads=2, dim=136, width=101, by_column=True),
        delta_layer(key_heads=1, heads=1, dim=64, width=256),
        delta_layer(key_heads=16, heads=32, dim=128, width=128),
        space_layer(heads=1, dim=8, groups=1, states=5, has_options=False, dt_limit=(0.1, 0.5)),
        space_layer(heads=36, dim=64, groups=1, states=256),
        space_layer(heads=64, dim=16, groups=8, states=128),
        scan_layer(dim=256, states=8, groups=2, has_skip=False),
    ],
    ids=lambda layer: f"{layer.op} {'x'.join(map(str, layer.row))}",
)
def test_other_sizes(layer, capfd):
    segments = table([0, 2, 3, 4, 20], [0, 1, 3, 2], [0, 1, 3, 2], [True, True, False, False], range(4), 4)
    check(layer, interpreted(layer), segments, capfd, 5, [0, 1])


def test_channels_are_divided_into_blocks_and_parts(capfd, monkeypatch):
    monkeypatch.setattr(state_scans, "MAX_CHANNELS", 256)
    monkeypatch.setattr(state_scans, "MAX_PART", 128)
    segments = table([0, 100, 101, 150], [0, 1, 2], [3, 1, 2], [True, True, False], range(3), 3)
    for layer in (scan_layer(dim=512, groups=2), recurrence_layer(channels=768)):
        check(layer, interpreted(layer), segments, capfd, 6, [0, 1])


def test_blocks_are_of_whole_groups_or_of_one():
    def heads_of(heads, group, dim, width):
        return state_steps.block_heads(jax.ShapeDtypeStruct((9, heads, dim, width), jnp.float32), group)

    assert heads_of(32, 2, 128, 128) == 16
    assert heads_of(64, 8, 64, 128) == 32
    assert heads_of(36, 4, 128, 128) == 12
    assert heads_of(24, 24, 128, 128) == 12
    assert heads_of(2, 1, 512, 512) == 1


def test_columns_are_laid_out_by_block():
    columns = Columns(48, 5)
    vectors = normal(np.random.default_rng(0), 3, 5, 48, 16)
    tiles = columns.laid_out(jnp.asarray(vectors))
    assert tiles.shape == (3, 3, 16, 128)
    np.testing.assert_array_equal(tiles[1, 1, :, 48 + 7], vectors[1, 3, 7])
    np.testing.assert_array_equal(columns.vectors(tiles), vectors)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (delta_layer(dim=20), "states of 20 rows; the kernel needs a multiple of 8"),
        (delta_layer(key_heads=1, heads=1, dim=1024, width=1024), "states of 4194304 bytes a head; 2097152 fit"),
        (space_layer(dim=20), "states of 20 rows; the kernel needs a multiple of 8"),
        (scan_layer(states=12), "states of 12 rows; the kernel needs a multiple of 8"),
        (scan_layer(dim=700), "700 channels; the kernel needs a multiple of 128, or at most 512"),
        (scan_layer(dim=256, groups=4), "4 groups of 64 channels; the kernel needs a multiple of 128"),
        (recurrence_layer(channels=700), "700 channels; the kernel needs a multiple of 128, or at most 512"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(layer, reason):
    tokens, pool = layer.tokens(np.random.default_rng(0), 2), empty_pool(layer)
    segments = table([0, 2], [0], [0], [False], [0], 1)
    with registry.on_platform("tpu"), registry.fallbacks() as reasons, registry.record_calls() as record:
        layer.jitted().trace(tokens, pool, segments)
    assert record == {(layer.op, "reference")} and reasons == [f"{layer.op}, tpu-pallas: {reason}"]


def test_a_mesh_divides_heads():
    """Groups that do not divide are repeated, and heads that do not are computed everywhere."""
    script = Path(recurrent_on_mesh.__file__)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stderr[-4000:]
    used = ["sharded-kernel", "tpu-pallas"]
    assert made.stdout.splitlines() == [f"{name}: {used}" for name in recurrent_on_mesh.LAYERS]
