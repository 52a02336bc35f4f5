"""What the commands say of meshes, topologies and hosts that cannot be: one line on stderr, and exit status 2."""

import importlib.util
import re
import socket
import threading

import jax
import pytest
from ports import free_port
from typer.testing import CliRunner

from model_adapters.errors import HostsError
from torchax_serve import Hosts
from torchax_serve.cli.main import app
from torchax_serve.cli.shared import load_model
from torchax_serve.distributed.hosts.rendezvous import rendezvous


@pytest.fixture
def refused(monkeypatch):
    """Runs a command that has to be refused; its one line."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(load_model, "_keep_stdout_for_answers", lambda: None)  # stdout is the runner's here
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: None)

    def run(*arguments):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2, (done.stdout, done.stderr)
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tensor-parallel 999", r"--tensor-parallel: expected at most the \d+ devices there are, got 999; lower"),
        ("--mesh data=3,model=333", r"mesh: expected at most the \d+ devices .* data 3 x model 333 x expert 1 = 999"),
        ("--mesh pipe=2", r"mesh: expected axes out of data, model, expert, got 'pipe'"),
        ("--mesh model=two", r"mesh: expected model=<a positive number>, got 'model=two'"),
        ("--mesh model=1 --tensor-parallel 1", r"--mesh and --tensor-parallel: expected one of them, got both"),
        ("--num-hosts 2 --host-id 0", r"expected --coordinator beside the other options of hosts"),
        ("--coordinator a:1 --num-hosts 2 --host-id 2", r"--host-id: expected a whole number from 0 to 1, got 2"),
    ],
)
def test_invalid_meshes(refused, arguments, said):
    assert re.search(said, refused("run", "-p", "Hello", *arguments.split()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--topology cpu:1 --mesh model=2", r"multiply out to the 1 devices, got .*model 2.* = 2, more than there are"),
        ("--topology cpu:1 --mesh stage=1", r"mesh: expected axes out of data, model, expert, got 'stage'"),
        ("--topology v9:2x2", r"topology: expected one of v4:2x2x1, .*v5e:.*v5p:.*v6e:.*tpu7x:.*h100:.*got 'v9:2x2'"),
        ("--topology v6e:2x4", r"expected libtpu.*not installed; pip install 'torchax-serve\[plan\]'"),
        ("--topology h200:8", r"expected JAX's plug-in for CUDA.*not installed; pip install 'torchax-serve\[cuda\]'"),
    ],
)
def test_invalid_plans(refused, arguments, said, monkeypatch):
    found = importlib.util.find_spec
    absent = ("libtpu", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    assert re.search(said, refused("plan", *arguments.split()))


def hosts_of(port, host_id, *more):
    return ["--coordinator", f"127.0.0.1:{port}", "--num-hosts", "2", "--host-id", str(host_id), *more]


def test_a_second_leader(refused):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        line = refused("run", "-p", "Hello", *hosts_of(port, 0))
    assert "got a port that is taken; another host 0 is running there" in line


@pytest.mark.parametrize(
    ("host_id", "said"), [(0, "within 0.5 s, host 1 did not come"), (1, "expected host 0 at 127.0.0.1:")]
)
def test_a_host_that_never_joins(refused, host_id, said):
    assert said in refused("run", "-p", "Hello", *hosts_of(free_port(), host_id, "--join-timeout", "0.5"))


@pytest.mark.parametrize(("name", "value"), [("transformers", "5.0.0"), ("dtype", "float16")])
def test_a_follower_with_another_version_or_configuration(refused, name, value):
    port = free_port()
    told = []

    def follow():
        hosts = Hosts(coordinator=f"127.0.0.1:{port}", num_hosts=2, host_id=1, join_timeout_s=60)
        try:
            rendezvous(hosts, {"model": "the embedded one", "dtype": "auto", name: value})
        except HostsError as error:
            told.append(str(error))

    follower = threading.Thread(target=follow)
    follower.start()
    line = refused("run", "-p", "Hello", *hosts_of(port, 0, "--join-timeout", "60"))
    follower.join()
    assert f"got host 1 with {name} {value}, host 0 has " in line
    assert f"this host has {name} {value}, host 0 has " in told[0]
