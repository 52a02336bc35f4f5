"""Compilation in other threads, on functions that stand for programs."""

import threading

import pytest

from model_adapters.errors import TorchaxServeError
from model_adapters.program.trace_context import trace_lock
from torchax_serve.compilation.background import (
    BackgroundCompiler,
    CompileTask,
    check_may_trace,
    compile_all,
    tracing,
)


def test_tasks_run_once_each_in_order_in_another_thread():
    compiler, ran, begin = BackgroundCompiler(), [], threading.Event()

    def task(key):
        return CompileTask(key, lambda: begin.wait(60) and ran.append((key, threading.current_thread().name)))

    for key in "abab":
        compiler.submit(task(key))
    begin.set()
    compiler.wait()
    compiler.submit(task("a"))
    compiler.submit(task("c"))
    compiler.wait()
    assert ran == [("a", "compile"), ("b", "compile"), ("c", "compile")]


def test_a_task_that_fails_leaves_the_others():
    compiler, ran = BackgroundCompiler(), []
    compiler.submit(CompileTask("fails", lambda: 1 / 0))
    compiler.submit(CompileTask("runs", lambda: ran.append(1)))
    compiler.wait()
    assert ran == [1]


def test_closing_drops_what_waits_and_finishes_what_runs():
    compiler, ran, begun, go_on = BackgroundCompiler(), [], threading.Event(), threading.Event()

    def run():
        begun.set()
        go_on.wait(60)
        ran.append("first")

    compiler.submit(CompileTask(1, run))
    compiler.submit(CompileTask(2, lambda: ran.append("second")))
    begun.wait(60)
    threading.Timer(0.1, go_on.set).start()
    compiler.close()
    compiler.submit(CompileTask(3, lambda: ran.append("third")))
    compiler.wait()
    assert ran == ["first"]


def test_what_waits_can_be_dropped_and_submitted_again():
    compiler, ran, begun, go_on = BackgroundCompiler(), [], threading.Event(), threading.Event()
    compiler.submit(CompileTask(1, lambda: begun.set() or (go_on.wait(60) and ran.append(1))))
    compiler.submit(CompileTask(2, lambda: ran.append(2)))
    begun.wait(60)
    compiler.drop()
    compiler.submit(CompileTask(1, lambda: ran.append("again")))
    compiler.submit(CompileTask(2, lambda: ran.append("later")))
    go_on.set()
    compiler.wait()
    assert ran == [1, "later"]


@pytest.mark.parametrize("end", [BackgroundCompiler.wait, BackgroundCompiler.close])
def test_a_model_that_becomes_idle_does_not_hold_up_who_waits_for_the_end(end):
    compiler, begun, go_on = BackgroundCompiler(), threading.Event(), threading.Event()
    compiler.submit(CompileTask(1, lambda: begun.set() or go_on.wait(60)))
    compiler.submit(CompileTask(2, check_may_trace))
    begun.wait(60)
    waiting = threading.Thread(target=end, args=[compiler], daemon=True)
    waiting.start()
    waiting.join(0.1)  # it has allowed tracing
    compiler.hold_tracing()
    go_on.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_model_that_becomes_idle_waits_for_its_own_trace_and_for_no_other():
    compiler, begun, go_on, held = BackgroundCompiler(), threading.Event(), threading.Event(), threading.Event()

    def trace():
        with trace_lock(), tracing():
            begun.set()
            go_on.wait(60)

    hold = threading.Thread(target=lambda: (compiler.hold_tracing(), held.set()), daemon=True)
    with trace_lock():  # another model is loaded or traced in this thread
        compiler.hold_tracing()
        hold.start()
        assert held.wait(20)
        compiler.allow_tracing()
    held.clear()
    compiler.submit(CompileTask(1, trace))
    assert begun.wait(20)
    threading.Thread(target=lambda: (compiler.hold_tracing(), held.set()), daemon=True).start()
    assert not held.wait(0.2)
    go_on.set()
    assert held.wait(20)
    compiler.close()


def test_all_are_compiled_and_counted():
    ran, counts = [], []
    compile_all([CompileTask(n, lambda n=n: ran.append(n)) for n in range(20)], counts.append)
    assert sorted(ran) == list(range(20))
    assert sum(counts) == 20


def test_the_error_of_a_program_is_raised():
    with pytest.raises(ZeroDivisionError):
        compile_all([CompileTask(0, lambda: None), CompileTask(1, lambda: 1 / 0)])


def test_cancelling_ends_it_before_all_are_done():
    ran, is_over = [], []

    def run():
        ran.append(1)
        is_over.append("Ctrl-C")

    with pytest.raises(TorchaxServeError, match="got Ctrl-C; what is compiled stays"):
        compile_all([CompileTask(n, run) for n in range(5000)], cancelled=lambda: is_over[0] if is_over else None)
    assert 0 < len(ran) < 5000
