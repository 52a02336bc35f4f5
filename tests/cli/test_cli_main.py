"""The first screen, help, version, ``models``, and how soon the program answers."""

import json
import re
import resource
import subprocess
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from model_adapters.errors import TorchaxServeError
from torchax_serve.cli.main import COMMANDS, app
from torchax_serve.cli.shared.errors import one_line, run_and_report
from torchax_serve.parity.known_failures import CAUSES
from torchax_serve.parity.tasks import TASKS, shipped

PROGRAM = "from torchax_serve.cli.main import main; main()"


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


def call(*arguments, **kwargs):
    return CliRunner().invoke(app, arguments, **kwargs)


def test_no_argument_says_what_to_do_next():
    result = call()
    assert result.exit_code == 0
    for command in ("torchax-serve run", "torchax-serve models", "--help"):
        assert command in result.stdout


def test_version():
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("torchax-serve 0.")


def test_every_command_and_every_option_is_explained():
    text = call("--help").stdout
    for name in COMMANDS:
        assert name in text
        result = call(name, "--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
        assert result.exit_code == 0
        rows = [line.strip("│ ") for line in result.stdout.splitlines() if "│" in line and "-" in line]
        for row in rows:
            if row.startswith("--"):
                explanation = row.split("  ")[-1].strip()
                assert len(explanation.split()) >= 2, f"{name} {row}"


def test_usage_errors_end_with_2():
    assert call("nosuch").exit_code == 2
    assert call("run", "--nosuch").exit_code == 2
    assert call("run", "--top-k", "many").exit_code == 2


def seconds_of_children():
    """Of the processor, in user and system: other tests run beside this one, and time passes for them too."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_answers_before_the_libraries_are_imported():
    """Fails when a module of the command line imports one of the slow libraries, and when it takes a second anyway."""
    check = f"import sys, atexit\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{PROGRAM}"
    times = []
    for _ in range(3):
        start = seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-c", check, "run", "--help"], capture_output=True, text=True, timeout=60
        )
        times.append(seconds_of_children() - start)
        assert done.returncode == 0
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "jax", "transformers", "prompt_toolkit", "numpy"}
    assert min(times) < 2  # 0.4 s as a rule


def test_models_lists_everything():
    text = call("models").stdout
    assert "gemma-3-1b-it" in text
    assert "google/gemma-3-1b-it" in text
    assert f"{len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} architectures" in text
    assert "Qwen3ForCausalLM" not in text
    everything = call("models", "--all").stdout
    assert "Qwen3ForCausalLM" in everything
    assert "speech_to_text" in everything
    for task in TASKS:
        assert re.search(rf"^  {task} .*: \d+ of \d+ pass", text, re.M), task


def test_ops_are_listed_with_their_implementations_by_platform():
    listed = json.loads(call("ops", "--json").stdout)
    found = {op["name"]: {each["name"]: each["platforms"] for each in op["implementations"]} for op in listed["ops"]}
    assert set(found) >= {"decode_attention", "paged_attention", "dense_attention", "linear", "grouped_matmul"}
    for name in ("decode_attention", "paged_attention"):
        assert found[name]["reference"] == ["cpu", "gpu", "tpu"]
        assert (found[name]["cpu-ffi"], found[name]["tpu-pallas"], found[name]["gpu-triton"]) == (
            ["cpu"],
            ["tpu"],
            ["gpu"],
        )
    table = call("ops").stdout
    assert all(implementation in table for op in found.values() for implementation in op)


def test_models_as_json():
    everything = json.loads(call("models", "--json").stdout)
    assert everything["short_names"]["gemma-3-1b-it"]["hub_id"] == "google/gemma-3-1b-it"
    assert everything["architectures"].keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def test_models_shows_how_one_type_was_checked():
    text = call("models", "llama").stdout
    assert "LlamaForCausalLM" in text
    assert "packed" in text
    tasks = json.loads(call("models", "llama", "--json").stdout)["tasks"]
    assert tasks["causal"]["status"] == tasks["classifier"]["status"] == "passed"
    assert tasks["causal"]["forward_difference"] <= 1e-4


def test_models_shows_every_task_of_a_type():
    text = call("models", "whisper").stdout
    assert "Speech to text (speech): WhisperForConditionalGeneration" in text
    for name in ("status", "executor", "forward_difference", "unbatched_equal", "padded_equal"):
        assert re.search(rf"^  {name} ", text, re.M), name
    assert json.loads(call("models", "whisper", "--json").stdout)["tasks"].keys() == {"causal", "speech"}
    assert "Sequence to sequence (seq2seq)" in call("models", "t5").stdout
    assert "Images and text (images)" in call("models", "llava").stdout
    assert "Encoders (encoder)" in call("models", "bert").stdout


def test_models_says_why_a_type_does_not_pass():
    results = shipped("images")[1]
    failed = next(name for name, result in results.items() if result.status != "passed")
    found = json.loads(call("models", failed, "--json").stdout)["tasks"]["images"]
    assert found["status"] == results[failed].status
    assert found["cause"] == CAUSES[failed]
    assert CAUSES[failed].split(":")[0] in call("models", failed).stdout


def test_models_shows_sharding_of_a_type():
    rows = json.loads(call("models", "llama", "--sharding", "--mesh", "model=4", "--json").stdout)
    down = next(row for row in rows if row["parameter"] == "model.layers.*.mlp.down_proj.weight")
    assert (down["shape"], down["spec"]) == ([4096, 11008], [None, "model"])
    assert (down["number"], down["bytes_per_device"]) == (32, 4096 * 11008 * 2 // 4)  # bfloat16
    assert "down_proj" in call("models", "llama", "--sharding").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sharding"], "expected a MODEL_TYPE, got none"),
        (["llama", "--mesh", "model=4"], "--mesh: expected together with --sharding"),
        (["lama", "--sharding"], "did you mean llama"),
        (["llama", "--sharding", "--mesh", "pipe=4"], "expected axes out of data, model, expert, got 'pipe'"),
    ],
)
def test_models_refuses_invalid_sharding_options(arguments, said):
    done = call("models", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_models_names_near_types():
    done = call("models", "lama")
    assert done.exit_code
    assert "llama" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TorchaxServeError("a\n  b"), "a b"),
        (ValueError(), "ValueError"),
        (ValueError("c"), "c"),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line


def test_statuses_of_commands(capfd):
    assert run_and_report(lambda: None, debug=False) == 0
    assert run_and_report(lambda: 1, debug=False) == 1
    assert capfd.readouterr() == ("", "")
