"""The launch recipes: each starts a command that the program's own parser takes, with hosts that can be."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from model_adapters.loading.short_names import short_name
from torchax_serve.cli.main import app
from torchax_serve.cli.shared.load_options import DeviceOptions

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "multihost"
ENVIRONMENT = ("TORCHAX_SERVE_COORDINATOR", "TORCHAX_SERVE_NUM_HOSTS", "TORCHAX_SERVE_HOST_ID")


def hosts_of(command, environment=()):
    """What a command line says about hosts."""
    program, subcommand, *arguments = command
    assert program == "torchax-serve"
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in dict(environment).items():
            patch.setenv(name, value)
        params = typer.main.get_command(app).commands[subcommand].make_context(subcommand, list(arguments)).params
    assert short_name(params["model"]) is not None
    names = ("coordinator", "num_hosts", "host_id", "join_timeout")
    return DeviceOptions(**{name: params[name] for name in names}).hosts()


@pytest.mark.parametrize("name", ["leaderworkerset.yaml", "gke_job.yaml"])
def test_pods_have_host_ids(name):
    documents = list(yaml.safe_load_all((RECIPES / name).read_text()))
    spec = documents[-1]["spec"]
    template = spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]
    (container,) = template["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert set(environment) == set(ENVIRONMENT)
    said = {"$(LWS_LEADER_ADDRESS)": "qwen3-32b-0.qwen3-32b", "$(LWS_GROUP_SIZE)": "2"}
    for key, value in environment.items():
        for variable, text in said.items():
            value = value and value.replace(variable, text)
        environment[key] = "1" if value is None else value
    hosts = hosts_of(container["command"], environment)
    assert [port["containerPort"] for port in container["ports"]] == [hosts.address[1], hosts.address[1] + 1]
    assert hosts.num_hosts == spec.get("completions") or hosts.num_hosts == spec["leaderWorkerTemplate"]["size"]


def called(script, tmp_path, stands_for, arguments=(), **environment):
    """The command lines that a script's programs were given; the programs are replaced."""
    calls = tmp_path / "calls"
    for name, body in stands_for.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["bash", RECIPES / script, *arguments], env=environment, check=True, timeout=60)
    return calls.read_text().splitlines()


def test_slurm_starts_one_process_a_node(tmp_path):
    say = 'echo "$TORCHAX_SERVE_COORDINATOR $TORCHAX_SERVE_NUM_HOSTS $TORCHAX_SERVE_HOST_ID $*" >> "$CALLS"'
    stands_for = {
        "scontrol": "seq -f node%g 7 50000",  # more than a pipe holds
        "srun": 'SLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"',
        "torchax-serve": say,
    }
    lines = called("slurm.sh", tmp_path, stands_for, SLURM_JOB_NODELIST="node[7-50000]", SLURM_NNODES="2")
    assert [line.split()[:4] for line in lines] == [["node7:8476", "2", str(n), "run"] for n in (0, 1)]


def test_ssh_starts_followers_and_then_the_leader(tmp_path):
    lines = called("ssh.sh", tmp_path, {"ssh": 'echo "$*" >> "$CALLS"'}, ["a", "b", "c"])
    found = {}
    for line in lines:
        options, program, arguments = line.partition("torchax-serve")
        found[options.split()[-1]] = hosts_of(shlex.split(program + arguments))
    assert {host: hosts.host_id for host, hosts in found.items()} == {"a": 0, "b": 1, "c": 2}
    assert {hosts.coordinator for hosts in found.values()} == {"a:8476"}


def test_an_option_without_the_others():
    with pytest.raises(ValueError, match="expected --coordinator beside the other options of hosts"):
        DeviceOptions(num_hosts=2, host_id=0).hosts()
