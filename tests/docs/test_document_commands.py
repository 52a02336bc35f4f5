"""Every command of the documents runs, by bash and the console script or in this process; few are checked by parts.

Those of the README always run, the others by `pytest --thorough`.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import typer
from documents import ROOT, commands
from ports import free_port
from thorough import except_for
from typer.testing import CliRunner

from model_adapters.loading.short_names import short_name
from torchax_serve.cli.main import app

SET_UP = "python3 -m venv .venv && .venv/bin/pip install "
# Needs the hub: the command line is parsed by the program's own parser, and the name must stand in the table of names.
FROM_THE_HUB = {
    "torchax-serve run qwen3-0.6b",
    "torchax-serve verify qwen3-0.6b",
    "torchax-serve quantize qwen3-0.6b ./qwen3-0.6b-int4 --quantization int4",
    "torchax-serve train qwen3-0.6b --data chats.jsonl --lora r=16,alpha=32,targets=q_proj+v_proj --out ./adapter",
    "torchax-serve serve qwen3-0.6b --port 8000",
    "torchax-serve serve qwen3-0.6b --adapter sql=./sql --adapter fr=./fr --max-loras 4",
    'torchax-serve run qwen3-0.6b "How many users are there?" --adapter sql=./sql',
    'torchax-serve run gemma-3-4b-it "What is in this picture?" --image cat.png',
    "torchax-serve run llama-3.2-1b-instruct --token hf_...",
    "torchax-serve run qwen3-0.6b --offline",
    "torchax-serve pull qwen3-0.6b",
    """torchax-serve serve qwen3-0.6b --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""",
    """torchax-serve serve llama-3.2-1b-instruct --speculative-config '{"method": "eagle3", "model": "./eagle3"}'""",
    """torchax-serve serve qwen3-0.6b --kv-events-config '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558"}'""",
    "torchax-serve rm qwen3-0.6b --yes",
    "torchax-serve plan qwen3-32b --topology v6e:2x4",
    "torchax-serve plan llama-3.1-70b-instruct --topology h200:4 --max-model-len 4096 --max-num-seqs 64",
    "torchax-serve plan qwen3-32b --for 64x8192",
    ".venv/bin/torchax-serve bench smollm2-135m-instruct --against hf",
}
# Needs diffusers, which is an extra: the command line is parsed here, and tests/diffusion runs its like.
WITH_DIFFUSERS = {
    'torchax-serve draw ./sd-turbo "a red fox in the snow" --steps 2 --seed 7 --output fox.png',
    "torchax-serve plan benchmarks/shapes/flux-1-dev.json --topology v6e:2x2",
}
# At a terminal these talk to a person; here they read from a pipe.
TYPED = {"torchax-serve run": "Hello!\n"}
# Ask nothing of bash and no devices of their own: the process that has imported torch and jax runs them as well.
IN_PROCESS = re.compile(
    r"torchax-serve (?:(?:models|ops|embed|doctor|cache|verify|bench|profile)\b|plan --sharding )[^|&;<>$]*"
)
# Runs these tests itself; tests/docs/test_ci_run.py is about it.
RUNS_THE_TESTS = {".ci/run"}

# Command lines of the README whose output stands behind them.
SHOWN = dict(re.findall(r"```bash\n([^\n]*)\n```\n\n```text\n([^`]*)```", (ROOT / "README.md").read_text()))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = commands()
SET_UPS = [command for _, command in COMMANDS if command.startswith(SET_UP)]
# Each once, however many documents have it.
RUN = [
    command
    for command in dict.fromkeys(command for _, command in COMMANDS)
    if not command.startswith(SET_UP) and command not in FROM_THE_HUB | RUNS_THE_TESTS | WITH_DIFFUSERS
]
OF_README = {command for document, command in COMMANDS if document == "README.md"}


def parameters(run):
    """Returns the commands `run`, of which those of the README run always."""
    return except_for([command for command in run if command in OF_README], run)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs a command line by bash, with ``torchax-serve`` and ``python`` of this environment on the path."""
    programs = tmp_path_factory.mktemp("programs")
    module, _, function = PYPROJECT["project"]["scripts"]["torchax-serve"].partition(":")
    script = f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n"
    (programs / "torchax-serve").write_text(script)
    (programs / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    for each in programs.iterdir():
        each.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("XLA_FLAGS", None)  # compiled as it is for users

    def run(command, stdin=""):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_every_command_is_run_or_checked():
    listed = {command for _, command in COMMANDS}
    assert set(TYPED) | FROM_THE_HUB | RUNS_THE_TESTS | WITH_DIFFUSERS <= listed, (
        "an exception for a command that nobody writes"
    )
    assert len(SET_UPS) == 4
    assert set(SHOWN) <= set(SET_UPS), "output is shown of a command that no test compares it with"
    assert SHOWN
    assert len(RUN) >= 3


@pytest.mark.parametrize("command", parameters([command for command in RUN if IN_PROCESS.fullmatch(command)]))
def test_command_runs_in_process(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    if command.startswith("torchax-serve cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing of the user's is removed
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.stderr
    assert done.output.strip()  # where nothing was downloaded, `models --downloaded` says so on stderr


@pytest.mark.parametrize("command", parameters([command for command in RUN if not IN_PROCESS.fullmatch(command)]))
def test_command_runs(shell, command):
    done = shell(command.replace(":8476", f":{free_port()}"), TYPED.get(command, ""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", sorted(FROM_THE_HUB))
def test_command_for_the_hub_parses_and_names_a_known_model(command):
    program, subcommand, *arguments = shlex.split(command.removeprefix(".venv/bin/"))
    assert program == "torchax-serve"
    subcommands = typer.main.get_command(app).commands
    context = subcommands[subcommand].make_context(subcommand, list(arguments))
    models = context.params["models"] if subcommand == "serve" else [context.params["model"]]
    assert all(short_name(each) is not None for each in models)


@pytest.mark.parametrize("command", sorted(WITH_DIFFUSERS))
def test_command_with_diffusers_parses(command):
    _, subcommand, *arguments = shlex.split(command)
    context = typer.main.get_command(app).commands[subcommand].make_context(subcommand, list(arguments))
    assert context.params["model"]


@pytest.mark.parametrize("command", SET_UPS)
def test_set_up_installs_this_project_and_what_follows_runs(shell, command):
    install, _, rest = command.removeprefix(SET_UP).partition(" && ")
    *options, target = shlex.split(install)
    assert options in ([], ["-e"])
    extra = target.removeprefix(".").strip("[]")
    assert target in (".", f".[{extra}]")
    assert not extra or extra in PYPROJECT["project"]["optional-dependencies"]
    if rest == ".venv/bin/pytest":
        assert any(each.startswith("pytest>") for each in PYPROJECT["project"]["optional-dependencies"]["dev"])
    elif rest:
        done = shell(rest.removeprefix(".venv/bin/"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        if command in SHOWN:
            answer, _, statistics = SHOWN[command].partition("\n")
            assert done.stdout == f"{answer}\n"
            measured = done.stderr.splitlines()[-1]
            assert re.sub(r"[\d.]+", "N", measured) == re.sub(r"[\d.]+", "N", statistics.strip())
