"""``torchax-serve launch``: what a program is started with, and the server that is started for it."""

import json
import os
import stat
import sys

import pytest
from typer.testing import CliRunner

from torchax_serve.cli import launch
from torchax_serve.cli.main import app

PROGRAM = """#!{python}
import json, os, sys, urllib.request
with open({report!r}, "w") as file:
    names = [name for name in os.environ if name.startswith(("ANTHROPIC_", "OPENCODE_", "TORCHAX_SERVE_CLIENT"))]
    json.dump({{"arguments": sys.argv[1:], "variables": {{name: os.environ[name] for name in names}}}}, file)
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


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]
