"""``torchax-serve serve`` as a process of its own."""

import contextlib
import os
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from ports import free_port

START = "from torchax_serve.cli.main import main; import sys; sys.argv = ['torchax-serve', *sys.argv[1:]]; main()"

ACTIVATE = "import os; os.dup2({}, 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
"""What systemd does for a service with a socket."""


class Process:
    """``torchax-serve serve`` of the embedded model.

    Args:
        arguments: Of the command.
        listener: A listening socket that the server is given as by systemd; None: it makes its own.
        warm_up: Whether it compiles its programs before it is ready.
        prefix: Command that runs the server's, such as one that mounts a folder for it.
        environment: Variables.
    """

    def __init__(self, *arguments, listener=None, warm_up=False, prefix=(), **environment):
        self.port = free_port() if listener is None else listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        start = START if listener is None else ACTIVATE.format(listener.fileno()) + START
        command = [*prefix, sys.executable, "-c", start, "serve", "--port", str(self.port), *arguments]
        if not warm_up:
            command.append("--no-warm-up")
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            text=True,
            pass_fds=() if listener is None else (listener.fileno(),),
        )

    def wait_until_ready(self, within_s=600):
        until = time.monotonic() + within_s
        with httpx.Client(base_url=self.url) as http:
            while time.monotonic() < until:
                assert self.process.poll() is None, self.process.stderr.read()
                with contextlib.suppress(httpx.HTTPError):
                    if http.get("/readyz").status_code == 200:
                        return self
                time.sleep(0.2)
        raise AssertionError("it is not ready")

    def end(self):
        """Returns the exit status and stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def stop(self):
        """Ends it at once, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def settle(self):
        """Sends requests until all that the first ones load and compile is there."""
        sizes = [0]
        for _ in range(60):
            for count in (1, 4):
                body = {"model": "tiny", "prompt": ["Hi", "Once upon a time"] * count, "max_tokens": 8}
                assert httpx.post(f"{self.url}/v1/completions", json=body, timeout=300).status_code == 200
            httpx.get(f"{self.url}/metrics")
            sizes.append(self.memory_bytes())
            if len(sizes) > 3 and max(sizes[-4:]) - min(sizes[-4:]) < 1 << 20:
                return
            time.sleep(0.5)

    def processor_s(self):
        """Returns seconds of the processor that it has used, its children not counted."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def memory_bytes(self):
        return psutil.Process(self.process.pid).memory_info().rss


@pytest.fixture
def started():
    processes = []

    def start(*arguments, **options):
        processes.append(Process(*arguments, **options))
        return processes[-1]

    yield start
    for each in processes:
        each.stop()


@pytest.fixture(scope="session")
def process():
    found = Process("--served-model-name", "tiny", "--no-access-log", "--max-body-mib", "16")
    try:
        found.wait_until_ready()
        found.settle()
        yield found
    finally:
        found.stop()


__all__ = ["START", "Process", "process", "started"]
