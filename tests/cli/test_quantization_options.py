"""``--quantization`` and ``--explain`` of the commands that load a model."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve.cli.main import COMMANDS, app


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "command", [("run",), ("embed", EMBEDDED), ("verify",), ("bench",), ("serve",), ("quantize", EMBEDDED, "out")]
)
def test_explain_prints_each_kind_of_weight_and_ends(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = call(*command, "--quantization", "int4", "--explain")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split()[:4] == ["model.layers.*.mlp.down_proj.weight", "6", "x", "[192,"] for line in lines)
    assert all("int4, groups of 32, activations int8" in line for line in lines[:-1])
    assert lines[-1].startswith("weights: 9.2 MB as they are, 1.3 MB")
    assert not list(tmp_path.iterdir())


def test_explain_follows_rules_of_a_file(tmp_path):
    (tmp_path / "rules.toml").write_text('[[rules]]\nmodule_path = ".*mlp.*"\nweight_qtype = "int8"\n')
    done = call("run", "--quantization", tmp_path / "rules.toml", "--explain")
    does = {line.split()[0]: line.rpartition("]")[2].strip() for line in done.stdout.splitlines()[:-1]}
    assert does["model.layers.*.mlp.up_proj.weight"] == "int8, one scale a row"
    assert does["model.layers.*.self_attn.q_proj.weight"] == "stays float32"


def test_explain_of_a_checkpoint_that_is_quantized_says_what_loading_says(tmp_path):
    config = json.loads((EMBEDDED / "config.json").read_text())
    stated = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    refused = call("run", tmp_path, "--quantization", "int8", "--explain")
    assert refused.exit_code == 2 and "is quantized already (gptq)" in refused.stderr
    lines = call("run", tmp_path, "--quantization", "int8", "--explain", "--requantize").stdout.splitlines()
    assert "int8, groups of 32" in lines[0] and lines[-1].startswith("weights: 9.2 MB dense, ")


@pytest.mark.parametrize("name", ["run", "serve", "embed", "verify", "bench", "plan", "deploy", "quantize"])
def test_each_command_about_weights_has_it(name):
    options = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
    assert "--quantization" in options
    assert ("--requantize" in options) == (name != "plan")  # which reads no weights


def test_embeddings_of_quantized_weights_are_near_those_of_dense_ones():
    dense, eight = (
        np.array(json.loads(call("embed", EMBEDDED, "What is JAX?", "--pooling", "mean", *more).stdout)).reshape(-1)
        for more in ((), ("--quantization", "int8"))
    )
    assert not np.array_equal(dense, eight)
    assert dense @ eight > 0.99 * np.linalg.norm(dense) * np.linalg.norm(eight)


def test_deploy_gives_it_to_the_replicas(monkeypatch):
    seen = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: seen.append(name))
    made = []

    def options_of(**given):
        made.append(given)

    monkeypatch.setattr("torchax_serve.distributed.ray.options.DeployOptions", options_of)
    done = call("deploy", EMBEDDED, "--quantization", "int4")
    assert "expected the package ray, which is not installed" in done.stderr and "ray" in seen
    assert made[0]["quantization"] == "int4"


def test_a_checkpoint_that_is_quantized_is_rounded_again_if_that_is_asked_for_alone(tmp_path):
    assert call("quantize", EMBEDDED, tmp_path / "int8", "--quantization", "int8").exit_code == 0
    run = "run", tmp_path / "int8", "-p", "What is JAX?", "--max-new-tokens", "2", "--greedy", "--quantization", "int4"
    done = call(*run)
    assert done.exit_code == 2 and done.stderr.strip().count("\n") == 0
    assert "is quantized already (compressed-tensors)" in done.stderr and "--requantize" in done.stderr
    done = call(*run, "--requantize")
    assert done.exit_code == 0, done.stderr
    assert "quantized again, which were compressed-tensors in 8 bits: numbers off by" in done.stderr


def test_a_line_says_what_was_quantized():
    done = call("run", "-p", "What is JAX?", "--quantization", "int8", "--max-new-tokens", "4", "--temp", "0")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip()
    assert "43 weights int8 (groups of 32, activations int8); 8.50 bits a number" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--explain"), "--explain: expected --quantization with it, got none"),
        (("run", "-p", "a", "--quantization", "int5"), "--quantization: expected int8, int4, fp8"),
        (("serve", "--quantization", "int5"), "--quantization: expected int8, int4, fp8"),
        (("serve", "--quantization", "awq"), "got 'awq'; a quantized checkpoint is recognized by its files"),
        (("run", "-p", "a", "--quantization", "bf16,int8"), "--quantization: expected int8, int4, fp8"),
    ],
)
def test_wrong_options_are_one_line(arguments, said):
    done = call(*arguments)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.strip().count("\n") == 0, done.stderr
