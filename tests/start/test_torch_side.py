"""The torch side of a recorded model: loaded when something needs it, also in the middle of a trace."""

import threading

import jax
import jax.numpy as jnp

from model_adapters.program.trace_context import trace_lock
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.start.torch_side import TorchSide


def test_it_is_loaded_outside_of_the_trace_that_needs_it():
    side = TorchSide(lambda: jnp.ones(3).block_until_ready())
    assert jax.jit(lambda x: x + (side.get() is not None))(1.0) == 2.0
    assert not isinstance(side.loaded, jax.core.Tracer)


def test_a_thread_that_traces_and_one_that_loads_do_not_wait_for_each_other():
    begun, seen = threading.Event(), []

    def load():
        begun.set()
        tracer.join(1)  # which meanwhile asks for the torch side
        with trace_lock():  # as the watch of a loaded module does
            return "loaded"

    side = TorchSide(load)
    cache = ExecutableCache(before_trace=side.get)
    function = CachedFunction(cache, "f", lambda weights, x, *, spec: seen.append(side.get()) or x)
    tracer = threading.Thread(target=lambda: begun.wait() and function({}, jnp.ones(2), spec=None), daemon=True)
    tracer.start()
    loader = threading.Thread(target=side.get, daemon=True)
    loader.start()
    loader.join(20)
    tracer.join(20)
    assert not loader.is_alive() and not tracer.is_alive()
    assert seen == ["loaded"]
