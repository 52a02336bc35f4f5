"""Claude Code, Codex and opencode, started by ``torchax-serve launch``, edit a file in twenty turns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from agent_scripts import AGENTS, END, NUM_TURNS, note, script
from ports import free_port
from running_server import serving
from scripted_model import write_scripted_model

from torchax_serve import EngineOptions
from torchax_serve.server import metrics

MAX_LEN = 32768
"""Their prompts have 12,000 to 25,000 tokens of this tokenizer."""
MIN_CACHED = 0.9
TIMEOUT_S = 300
LAUNCH = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()", "launch"]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


def write_model(folder, **options):
    return write_scripted_model(folder, script(), max_len=MAX_LEN, is_system_first=True, **options)


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    """A server of the scripted model, and of one with a recurrent state."""
    path = write_model(tmp_path_factory.mktemp("model"), is_hybrid=request.param == "hybrid")
    with serving(path, engine=EngineOptions(max_model_len=MAX_LEN), served_model_names=("scripted",)) as (running, _):
        yield running


@pytest.fixture
def turns(monkeypatch):
    """Tokens of each answered prompt, and those of them that came from the cache."""
    found = []
    original = metrics.Metrics.step

    def step(self, answer, step):
        if step.finish_reason is not None:
            found.append((len(answer.prompt_ids), answer.num_cached_tokens))
        original(self, answer, step)

    monkeypatch.setattr(metrics.Metrics, "step", step)
    return found


@pytest.fixture
def work(tmp_path):
    """The folder that an agent works in, with the file it edits; its home is the folder above."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "note").write_text(note())
    return made


def launched(name, packages, work, url, step, *options, **variables):
    """Has an agent begin at a step, by ``torchax-serve launch``; no process of it is left. Returns what it wrote."""
    agent = AGENTS[name]
    text = f"Please begin at {agent.word} {step}"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("XDG_")},
        "JAX_PLATFORMS": "cpu",
        "HOME": str(work.parent),
        "PWD": str(work),
        "PATH": f"{packages / 'node_modules' / '.bin'}:{os.environ['PATH']}",
        **agent.variables,
        **variables,
    }
    # opencode puts quotes around an argument with spaces.
    words = text.split() if name == "opencode" else [text]
    command = [*LAUNCH, name, "--url", url, *options, "--", *agent.arguments, *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=work, env=environment, process_group=0, **pipes)
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0 and END in output, f"{output[-2000:]}\n{errors[-4000:]}"
    finally:
        is_left = ended_group(process.pid)
        process.communicate()
    assert not is_left, f"processes of {name} are left"
    return output


def ended_group(number):
    """Ends a group of processes; False if none is left."""
    try:
        os.killpg(number, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


CASES = [*(("attention", name) for name in AGENTS), ("hybrid", "codex")]


@pytest.mark.parametrize(("server", "name"), CASES, indirect=["server"])
def test_an_agent_edits_a_file_in_twenty_turns_from_the_cache(name, packages, server, turns, work):
    launched(name, packages, work, server.url, 1)
    assert (work / "note").read_text() == note().replace("old", "new")
    # A title may be asked for beside the turns, by a short prompt of its own.
    longest = max(num_tokens for num_tokens, _ in turns)
    shares = [num_cached / num_tokens for num_tokens, num_cached in turns if num_tokens > longest / 2]
    print(name, longest, [round(share, 3) for share in shares])
    assert len(shares) == NUM_TURNS
    assert min(shares[1:]) >= MIN_CACHED, shares


def test_launch_starts_a_server_for_an_agent_and_ends_it(packages, work, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    path = write_model(tmp_path / "scripted")
    launched(
        "codex", packages, work, url, NUM_TURNS - 1, "--model", str(path), XDG_CACHE_HOME=CACHE, TMPDIR=str(tmp_path)
    )
    assert (work / "note").read_text().splitlines()[-1] == f"line{NUM_TURNS - 1} new"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/readyz")
    (log,) = tmp_path.glob("torchax-serve-*/server.log")
    assert log.read_text().count('"route": "/v1/responses", "status": 200') == 2
