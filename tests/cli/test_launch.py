"""``torchax-serve launch``: what a program is started with, and the server that is started for it."""

import http.server
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from torchax_serve.cli import launch
from torchax_serve.cli.main import app

PROGRAM = """#!{python}
import json, os, sys, urllib.request
with open({report!r}, "w") as file:
    names = [name for name in os.environ if name.startswith(("ANTHROPIC_", "OPENCODE_", "TORCHAX_SERVE_CLIENT"))]
    json.dump({{"arguments": sys.argv[1:], "variables": {{name: os.environ[name] for name in names}}}}, file)
if "wait" in sys.argv:
    import time
    time.sleep(300)
if "ask" in sys.argv:
    body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 4,
        "messages": [{{"role": "user", "content": "Hi"}}]}}
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(),
        {{"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}})
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.loads(answer.read())["content"]
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs of the agents' names, which write down how they were started; returns what they have written."""
    report = tmp_path / "report.json"
    for name in launch.PROGRAMS:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(PROGRAM.format(python=sys.executable, report=str(report)))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return lambda: json.loads(report.read_text())


def run(*arguments):
    return CliRunner().invoke(app, ["launch", *arguments])


def test_each_program_is_told_the_server_and_the_model(programs, monkeypatch):
    monkeypatch.setattr(launch, "is_there", lambda url: True)
    entries = [
        {"id": "words", "tasks": ["embed"], "max_model_len": 512},
        {"id": "tiny", "tasks": ["chat"], "max_model_len": 32768},
        {"id": "other", "tasks": None, "max_model_len": None},
    ]
    monkeypatch.setattr(launch, "asked", lambda url, path, key, field: {"data": entries})
    result = run("claude", "--url", "http://127.0.0.1:8123", "--api-key", "a-key-0123", "--", "-p", "Hi")
    assert result.exit_code == 7, result.output
    found = programs()
    assert found["arguments"] == ["-p", "Hi"]
    assert found["variables"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8123"
    assert found["variables"]["ANTHROPIC_API_KEY"] == "a-key-0123"
    assert found["variables"]["ANTHROPIC_MODEL"] == found["variables"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "tiny"
    run("codex", "--model", "other", "--", "exec", "Hi")
    found = programs()
    assert 'model_providers.local.base_url="http://127.0.0.1:8000/v1"' in found["arguments"]
    assert 'model="other"' in found["arguments"] and found["arguments"][-2:] == ["exec", "Hi"]
    assert found["variables"]["TORCHAX_SERVE_CLIENT_KEY"] == "none"
    assert not any("model_context_window" in each for each in found["arguments"])  # nobody knows it before it is loaded
    run("codex")
    assert "model_context_window=32768" in programs()["arguments"]
    run("opencode")
    config = json.loads(programs()["variables"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "local/tiny"
    assert config["provider"]["local"]["options"]["baseURL"] == "http://127.0.0.1:8000/v1"
    assert config["provider"]["local"]["models"] == {"tiny": {"limit": {"context": 32768, "output": 8192}}}
    run("opencode", "--model", "other")
    assert json.loads(programs()["variables"]["OPENCODE_CONFIG_CONTENT"])["provider"]["local"]["models"] == {
        "other": {}
    }
    result = run("claude", "--model", "words")
    assert result.exit_code != 0 and "--model: expected words on" in result.output and "tiny, other" in result.output


def test_a_server_is_started_and_ended_with_the_program(programs, unused_port):
    url = f"http://127.0.0.1:{unused_port}"
    result = run("claude", "--url", url, "--", "ask")
    assert result.exit_code == 7, result.output
    assert programs()["variables"]["ANTHROPIC_MODEL"] == "embedded"
    assert not launch.is_there(url)


def test_what_is_missing_is_told(monkeypatch, programs):
    result = run("emacs")
    assert result.exit_code != 0 and "PROGRAM: expected one of claude, codex, opencode, got 'emacs'" in result.output
    result = run("claude", "--url", "ftp://x")
    assert result.exit_code != 0 and "--url: expected" in result.output
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("codex")
    assert result.exit_code != 0 and "npm install -g @openai/codex" in result.output


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://", "x", ""]
)
def test_an_address_that_is_none_is_told(programs, url):
    result = run("claude", "--url", url)
    assert result.exit_code == 2, result.output
    assert "--url: expected http://HOST:PORT" in result.output


class OtherServer(http.server.BaseHTTPRequestHandler):
    """A server of OpenAI's interface that knows names alone, and one key."""

    def do_GET(self):
        is_known = self.headers["Authorization"] == "Bearer right"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": [{"id": "other", "object": "model"}]}).encode())

    def log_message(self, *_):
        pass


def test_another_server_and_its_key(programs):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = run("claude", "--url", url)
        assert result.exit_code == 2 and "got status 401; give --api-key" in result.output, result.output
        result = run("claude", "--url", url, "--api-key", "right")
        assert result.exit_code == 7 and programs()["variables"]["ANTHROPIC_MODEL"] == "other", result.output
        server.shutdown()


def test_a_port_that_another_program_has_is_told(programs, monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.server_client.TIMEOUT_S", 0.2)
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        result = run("claude", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert result.exit_code != 0 and "the server ended with status" in result.output, result.output
    assert "in use" in result.output or "taken" in result.output, result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_the_program_too(programs, tmp_path, unused_port, number):
    url = f"http://127.0.0.1:{unused_port}"
    command = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()"]
    process = subprocess.Popen([*command, "launch", "claude", "--url", url, "--", "wait"])
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "report.json").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert not launch.is_there(url)


@pytest.fixture
def unused_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]
