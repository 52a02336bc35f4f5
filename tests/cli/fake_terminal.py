"""The command line at a pseudo terminal, with a model whose answers can be foreseen in place of every other."""

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_model.py"))]
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
CTRL_C, CTRL_D, CTRL_Z, ALT_ENTER, UP, TAB = "\x03", "\x04", "\x1a", "\x1b\r", "\x1b[A", "\t"


def environment(**changes):
    # Without answers to cursor position requests prompt_toolkit would wait for them.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    # A folder nobody can make: the history of whoever runs the tests stays as it is.
    state = {"XDG_STATE_HOME": "/dev/null/state"}
    return {**inherited, "PYTHONPATH": path, "PROMPT_TOOLKIT_NO_CPR": "1", **state, **changes}


class Terminal:
    """A program at a pseudo terminal: what is typed, and what is seen."""

    def __init__(self, *arguments, **variables):
        self.fd, end = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env=environment(OWN_TERMINAL="1", **variables),
        )
        os.close(end)
        self.seen = ""
        self._start = 0

    def type(self, text):
        self._start = len(self.seen)
        os.write(self.fd, text.encode())

    def wait_for(self, *texts):
        """Waits until `texts` have been seen, in this order, since the last `type`; returns what was."""
        deadline = time.monotonic() + TIMEOUT_S
        position = self._start
        for text in texts:
            while (found := self.seen.find(text, position)) < 0:
                self._read(deadline, text)
            position = found + len(text)
        return self.seen[self._start :]

    def _read(self, deadline, awaited):
        ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"waited for {awaited!r}, saw {self.seen[self._start :]!r}"
        self.seen += os.read(self.fd, 65536).decode(errors="replace")

    def status(self):
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while True:
                self._read(time.monotonic() + TIMEOUT_S, "the end")
        return self.process.wait(TIMEOUT_S)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.fd)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start(*arguments, **kwargs):
    """The program without a terminal."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PROGRAM, *arguments], env=environment(), text=True, **{**pipes, **kwargs})
