"""The torch side of a recorded model: loaded when something needs it, also in the middle of a trace."""

import jax
import jax.numpy as jnp

from torchax_serve.start.torch_side import TorchSide


def test_it_is_loaded_outside_of_the_trace_that_needs_it():
    side = TorchSide(lambda: jnp.ones(3).block_until_ready())
    assert jax.jit(lambda x: x + (side.get() is not None))(1.0) == 2.0
    assert not isinstance(side.loaded, jax.core.Tracer)
