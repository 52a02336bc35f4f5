"""Two processes of four CPU devices each, as two hosts of one model: tokens, and how a run ends that goes wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

CHECKS = Path(__file__).with_name("host_checks.py")
ROOT = CHECKS.parents[2]
MOST_S = 30  # from the loss of a host to the end of the run


class Host:
    """A process that is one of the hosts."""

    def __init__(self, action, host_id, port, **environment):
        self.process = subprocess.Popen(
            [sys.executable, str(CHECKS), action, str(host_id), f"127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/engine"))),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "4",
                "TRANSFORMERS_VERBOSITY": "error",
                **environment,
            },
        )

    def wait_until_running(self):
        """Returns what it has printed before."""
        lines = []
        for line in self.process.stdout:
            if line.startswith("running"):
                return "".join(lines)
            lines.append(line)
        raise AssertionError(self.process.stderr.read())

    def end(self, timeout=300):
        """Exit status, stdout and the last line of an error."""
        out, err = self.process.communicate(timeout=timeout)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        return self.process.returncode, out, errors[-1] if errors else err


@pytest.fixture
def start():
    started = []

    def run(action, port, **environment_of_follower):
        hosts = [Host(action, 0, port), Host(action, 1, port, **environment_of_follower)]
        started.extend(hosts)
        return hosts

    yield run
    for host in started:
        host.process.kill()
        host.process.communicate()


def test_hosts_have_the_tokens_of_one_device_until_one_dies_which_ends_the_run(start):
    leader, follower = start("tokens_and_load", free_port())
    out = leader.wait_until_running()
    assert "same tokens on cpu x 8" in out
    assert re.search(r"refused: expected a cache on this host, got one on several", out)
    assert (
        "refused: speculative_config: method: expected 'ngram' for a model on several hosts, got 'draft_model'" in out
    )
    died = time.monotonic()
    follower.process.kill()
    status, _, error = leader.end()
    assert (status, time.monotonic() - died < MOST_S) == (2, True)
    assert re.match(r"error: host 1 is gone \(.*\); the run has ended; start all hosts again$", error)


SPARSE = [pytest.param(each, marks=pytest.mark.thorough) for each in ("deepseek_v32", "deepseek_v4", "qwen4_exp_text")]


@pytest.mark.parametrize("action", ["recurrent", "per_sequence", *SPARSE])
def test_requests_of_other_models_are_batched(start, action):
    leader, follower = start(action, free_port())
    status, out, error = leader.end()
    assert status == 0, error
    assert ("per-sequence, not packed" in out) == (action == "per_sequence")
    status, out, error = follower.end()
    assert (status, "the leader has closed" in out) == (0, True), error


@pytest.mark.thorough
def test_a_host_that_falls_silent_ends_the_run(start):
    leader, follower = start("load", free_port())
    leader.wait_until_running()
    silent = time.monotonic()
    follower.process.send_signal(signal.SIGSTOP)  # as where the link is cut: nothing comes, and nothing is closed
    status, _, error = leader.end()
    assert (status, time.monotonic() - silent < MOST_S) == (2, True), error
    assert "host 1 has not been heard of for 12 s; the run has ended" in error


@pytest.mark.thorough
def test_followers_end_with_their_leader(start):
    leader, follower = start("load", free_port())
    leader.wait_until_running()
    died = time.monotonic()
    leader.process.kill()
    status, _, error = follower.end()
    # JAX watches over the leader too, and may be the first to end the process.
    assert status in (2, -signal.SIGABRT)
    assert time.monotonic() - died < MOST_S
    assert "host 0 at" in error or "JAX distributed service" in error


@pytest.mark.thorough
def test_other_weights_are_noticed(start):
    leader, follower = start("tokens", free_port(), SEED="1")
    for host in (leader, follower):
        status, _, error = host.end()
        assert status == 1
        assert "host 1 has loaded another model than host 0: the values of the weights differ" in error
