"""Races in interpreted TPU kernels are reported as by JAX's own class, which looks at each pair of accesses."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreted_tpu import IS_KNOWN, PARAMS, AccessesInOrder
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CLOCKS = st.tuples(*[st.integers(0, 3)] * 3)
RANGES = st.integers(0, 3).flatmap(lambda start: st.integers(1, 3).map(lambda size: (slice(start, start + size, 1),)))


@pytest.mark.skipif(not IS_KNOWN, reason="this JAX's class is another one, and is used itself")
@given(accesses=st.lists(st.tuples(st.booleans(), CLOCKS, st.sampled_from("ab"), RANGES), max_size=20))
def test_reports_are_those_of_all_pairs(accesses):
    reports = []
    for kind in (AccessesInOrder, RaceDetectionState):
        state, printed = kind(num_cores=2), io.StringIO()
        for is_write, clock, buffer, rnge in accesses:
            check = state.check_write if is_write else state.check_read
            with contextlib.redirect_stdout(printed):
                check(0, 0, np.array(clock, np.int32), buffer, rnge)
        reports.append((printed.getvalue(), state.races_found))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_beside_a_copy_is_reported(waits, capfd):
    def kernel(x, out, block, arrived):
        copy = pltpu.make_async_copy(x, block, arrived)
        copy.start()
        if waits:
            copy.wait()
        out[...] = block[...]
        if not waits:
            copy.wait()

    with pltpu.force_tpu_interpret_mode(PARAMS):
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        )
        jax.block_until_ready(jax.jit(call)(jnp.ones((8, 128))))
    pltpu.reset_tpu_interpret_mode_state()
    printed = capfd.readouterr().out
    assert ("RACE DETECTED" in printed) == (not waits)
    assert waits or "test_interpreted_tpu.py" in printed
