"""How much of this project a chat passes, counted by `benchmarks/request_walk.py`: the numbers may only fall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "benchmarks" / "request_walk.py"
# The second chat with the bundled model: files, functions and types that it passes. Lower them with what falls.
LIMITS = {
    ("first", "chat"): (52, 406, 24),
    ("first", "HTTP"): (87, 586, 34),
    ("second", "chat"): (48, 397, 22),
    ("second", "HTTP"): (83, 570, 32),
}
# Threads that run or not at the time make some difference; a limit that is higher than that is not one.
SLACK = (6, 30, 4)


@pytest.fixture(scope="module")
def starts():
    done = subprocess.run([sys.executable, WALK, "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=500)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("start", "call"), list(LIMITS))
def test_a_chat_passes_no_more_than_before(starts, start, call):
    assert starts[start]["model"] == "ServedModel"
    assert starts[start]["is_stored"] == (start == "second")
    walk = starts[start]["walks"][call]
    found = walk["files"], walk["functions"], walk["types"]
    limits = LIMITS[start, call]
    assert all(number <= limit for number, limit in zip(found, limits, strict=True)), (found, walk["all_functions"])
    assert all(limit - number <= slack for number, limit, slack in zip(found, limits, SLACK, strict=True)), found
