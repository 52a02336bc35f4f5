"""Check of a grammar in a process of its own, which is killed if it takes too long.

The file runs as a program by itself. It reads a JSON object from stdin (``path`` for imports, ``grammar``, ``seconds``,
``bytes``) and writes one with ``error``: a text, empty for a valid grammar.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 5.0
"""Most seconds of a processor that a check may take."""
STUCK_S = 300.0
"""Seconds of the clock after which a check is given up that does not use a processor."""
MAX_BYTES = 2 << 30
"""Most bytes of address space that a check may take."""


def grammar_error(grammar: str, deadline_s: float = DEADLINE_S) -> str | None:
    """Returns why a grammar of llguidance is not valid; None if it is.

    The deadline counts processor time of the check, which other processes may hold up for longer.
    """
    job = json.dumps({"path": sys.path, "grammar": grammar, "seconds": deadline_s, "bytes": MAX_BYTES})
    command = [sys.executable, "-I", str(Path(__file__))]
    try:
        # A group of its own: Ctrl-C at the terminal would end it as if the grammar were at fault.
        done = subprocess.run(
            command, input=job.encode(), capture_output=True, timeout=STUCK_S, check=False, process_group=0
        )
    except subprocess.TimeoutExpired:
        return f"it has not been compiled within {STUCK_S:g} s"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {deadline_s:g} s to compile"
    if done.returncode != 0:
        return f"it takes too much time or memory to compile (exit status {done.returncode})"
    error: str = json.loads(done.stdout)["error"]
    return error or None


def _main() -> None:
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (int(job["seconds"]) + 1, int(job["seconds"]) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (job["bytes"], job["bytes"]))
    sys.path[:] = job["path"]
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(job["grammar"])
    json.dump({"error": messages[0] if is_error else ""}, sys.stdout)


if __name__ == "__main__":
    _main()
