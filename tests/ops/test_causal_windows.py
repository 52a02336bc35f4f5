"""Windows of the last inputs of each token, as convolutions with weights of each token read them."""

import re

import jax
import numpy as np
import pytest
from recurrent_oracle import Layer, empty_pool, expected_of, normal, padded, table

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import use
from model_adapters.ops.causal_convolution import causal_convolution, causal_windows

CHANNELS = 6


def windows_layer(width):
    def loop(tokens, state):
        row = np.concatenate([state, tokens[0]])
        windows = [row[token : token + width] for token in range(len(tokens[0]))]
        return np.stack(windows).reshape(-1, width, CHANNELS), row[len(row) - (width - 1) :]

    def run(tokens, pool, segments):
        return causal_windows(tokens[0], width, pool, segments)

    return Layer("causal_windows", lambda rng, n: [normal(rng, n, CHANNELS)], run, loop, (width - 1, CHANNELS))


@pytest.mark.parametrize("width", [2, 5])
def test_windows_are_those_of_a_loop(width):
    """Of a new sequence, one that goes on, single tokens, and one that is cut for a snapshot."""
    layer, rng = windows_layer(width), np.random.default_rng(0)
    segments = table(
        [0, 7, 8, 9, 11, 30], [0, 1, 2, 4, 5], [0, 1, 2, 5, 4], [False, True, False, True, True], [0, 1, 2, 3, 3]
    )
    tokens = layer.tokens(rng, 30)
    pool = empty_pool(layer, {row: normal(rng, *layer.row) for row in (1, 4)})
    expected, written, after = expected_of(layer, tokens, segments, pool)
    out, got = jax.jit(layer.run)(padded(tokens), pool, segments)
    np.testing.assert_array_equal(out[:30], np.float32(expected))
    assert (np.asarray(out[30:]) == 0).all() and written
    for row in written:
        np.testing.assert_array_equal(got[row], np.float32(after[row]))


@pytest.mark.parametrize(("num_tokens", "gathers"), [(32, False), (6, True)], ids=["prompts", "single tokens"])
def test_taps_of_prompts_are_no_gathers_of_the_row(num_tokens, gathers):
    """A TPU gathers row by row: it takes several times as long as the sum, which reads the row once."""
    rng, width = np.random.default_rng(0), 4
    x, weight = normal(rng, num_tokens, CHANNELS), normal(rng, CHANNELS, width)
    segments = table([0, num_tokens - 2, num_tokens], [0, 1], [0, 1], [False, True], [0, 1])
    with use("causal_convolution", "reference"):
        jaxpr = jax.make_jaxpr(causal_convolution)(
            x, weight, None, np.zeros((3, width - 1, CHANNELS), x.dtype), segments
        )
    shapes = re.findall(r":\w+\[([\d,]+)\] = gather", str(jaxpr))
    assert shapes and (f"{num_tokens},{CHANNELS}" in shapes) == gathers


def test_what_does_not_fit_is_refused():
    layer = windows_layer(3)
    tokens, segments = layer.tokens(np.random.default_rng(0), 4), table([0, 4], [0], [0], [False], [0])
    with pytest.raises(InvalidArgumentError, match="a width above one"):
        causal_windows(tokens[0], 1, empty_pool(layer), segments)
    with pytest.raises(InvalidArgumentError, match="pool of rows of shape"):
        causal_windows(tokens[0], 4, empty_pool(layer), segments)
