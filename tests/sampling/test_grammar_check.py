"""The check of a grammar in a process of its own: its deadline counts the time of a processor, not of the clock."""

import threading
import time

import psutil

from torchax_serve.sampling.grammar import json_grammar, lark_grammar
from torchax_serve.sampling.grammar_check import grammar_error

GOOD = json_grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


def test_a_check_that_others_hold_up_goes_on():
    """Its process is stopped for longer than its deadline, as where other programs have all processors."""
    deadline_s, started = 1.0, []

    def hold():
        until = time.monotonic() + 30
        while time.monotonic() < until and not started:
            for child in psutil.Process().children():
                if "grammar_check" in " ".join(child.cmdline()):
                    child.suspend()
                    started.append(child)
            time.sleep(0.001)
        time.sleep(deadline_s + 2.5)
        started[0].resume()

    thread = threading.Thread(target=hold)
    thread.start()
    assert grammar_error(GOOD, deadline_s) is None
    thread.join()
    assert started


def test_a_check_that_takes_too_long_ends():
    began = time.monotonic()
    grammar = lark_grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000)
    assert grammar_error(grammar, 0.0) is not None
    assert time.monotonic() - began < 60
