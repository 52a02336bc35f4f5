"""The torch side of a recorded model: loaded when something needs it, also in the middle of a trace."""

import threading

import jax
import jax.numpy as jnp

from model_adapters.program.trace_context import trace_lock
from torchax_serve.compilation.background import BackgroundCompiler, CompileTask
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


def test_an_answer_that_is_short_does_not_load_it_in_the_background():
    side, compiler = TorchSide(lambda: "loaded"), BackgroundCompiler()
    begun = threading.Event()
    compiler.submit(CompileTask("a program", lambda: begun.set() or side.get_before_trace()))
    assert begun.wait(20)
    compiler.hold_tracing()  # as when the model becomes idle
    compiler.close()
    assert side.loaded is None
    side.get_before_trace()  # a thread that needs the program now loads it at once
    assert side.loaded == "loaded"


def test_a_program_that_is_compiled_while_the_process_ends_is_stored_before_it_has_ended(tmp_path):
    cache = ExecutableCache(tmp_path / "programs", "a model")
    function = CachedFunction(cache, "f", lambda weights, x, *, spec: x + 1)
    cache.close()
    function.compiled({}, jnp.ones(2), spec=None)
    assert list((tmp_path / "programs").glob("f-*"))
