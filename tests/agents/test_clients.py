"""Clients of other projects against the scripted model, each in a process with packages of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_script import SCRIPT
from scripted_server import scripted_server

from torchax_serve import EngineOptions

CLIENTS = Path(__file__).with_name("clients")
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    options = EngineOptions(max_model_len=2048, max_num_seqs=4)
    with scripted_server(folder, script=SCRIPT, engine=options) as running:
        yield running


def run(packages, *command, **variables):
    environment = {**os.environ, "PYTHONPATH": str(packages / "python"), **variables}
    environment["NODE_PATH"] = str(packages / "node_modules")
    done = subprocess.run(command, env=environment, cwd=CLIENTS, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("client", ["litellm", "openai-agents", "open-responses"])
def test_clients_of_python(client, packages, server):
    assert run(packages, sys.executable, "python_clients.py", server.url, client).endswith("ok\n")


def test_the_client_of_ollama_for_node(packages, server):
    assert run(packages, "node", "ollama_client.mjs", server.url).endswith("ok\n")
