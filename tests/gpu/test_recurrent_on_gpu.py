"""Recurrent layers' kernels on a GPU, beside loops over the tokens of each sequence in float64."""

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

LAYERS = {
    "delta": delta_layer(key_heads=16, heads=32, dim=128, width=128),
    "delta in bfloat16": delta_layer("bfloat16", key_heads=16, heads=32, dim=128, width=128),
    "delta by column": delta_layer(key_heads=4, dim=128, width=128, by_column=True),
    "odd delta": delta_layer(key_heads=2, heads=6, dim=96, width=200),
    "space": space_layer(heads=64, dim=64, groups=8, states=128),
    "odd space": space_layer(heads=6, dim=37, groups=2, states=33),
}
CASES = {
    "single tokens": table([0, 1, 2, 3, 4], [0, 1, 2, 7], [0, 3, NUM_ROWS - 1, 7], [True, True, False, True], range(4)),
    "prompts and single tokens": table(
        [0, 39, 40, 57, 90, 130, 190], [0, 1, 2, 5, 2, 4], [0, 1, 5, 2, 2, NUM_ROWS - 1],
        [False, True, False, True, True, True], [0, 1, 2, 2, 2, 5],
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
