"""What changes the process happens once, whichever threads ask for it first."""

import ast
import threading
from pathlib import Path

from model_adapters.once import once

ROOT = Path(__file__).parents[2]
FOLDERS = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")


def test_threads_that_call_at_once_wait_for_the_first_call():
    ran, ended, begin = [], [], threading.Barrier(8)

    @once
    def change(name):
        ran.append(name)
        threading.Event().wait(0.05)
        ended.append(name)
        return object()

    def call(number):
        begin.wait(20)
        results[number] = change("ab"[number % 2]), len(ended) > 0

    results = {}
    threads = [threading.Thread(target=call, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(ran) == ["a", "b"]
    assert len({id(result) for result, _ in results.values()}) == 2
    assert all(is_after for _, is_after in results.values())


def test_a_function_may_call_itself_through_another():
    @once
    def inner(depth):
        return depth if depth == 0 else inner(depth - 1)

    assert inner(3) == 0


def test_no_function_that_only_changes_things_is_merely_cached():
    """``functools.cache`` runs a function in each thread that calls before the first call ends."""
    found = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            is_cached = any(ast.unparse(each) == "functools.cache" for each in node.decorator_list)
            returns_nothing = node.returns is not None and ast.unparse(node.returns) == "None"
            if is_cached and returns_nothing:
                found.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert sorted(found) == [  # lines of the log
        "model_adapters/ops/cpu/prebuilt.py: _note",
        "model_adapters/tested_releases.py: log_newer_releases",
    ]
