"""``torchax-serve train`` with its picture of losses, and ``run --adapter`` on what it wrote."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from training_models import rows, tiny_folder, write_data
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from torchax_serve.cli import train
from torchax_serve.cli.main import app

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()
PROMPT = "What is 3 plus 4?"
# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture(autouse=True)
def libraries_are_as_they_were(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


def command(*arguments):
    return RUNNER.invoke(app, [str(argument) for argument in arguments])


def test_an_adapter_is_trained_drawn_and_run(folder, data, tmp_path):
    out, picture = tmp_path / "adapter", tmp_path / "losses.svg"
    sizes = ["--steps", 3, "--batch-size", 2, "--seq-len", 64, "--lr", 0.05]
    done = command(
        "train", folder, "--data", data, "--out", out, "--lora", "r=4,targets=q_proj+v_proj", "--plot", picture, *sizes
    )
    assert done.exit_code == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    assert done.stdout == f"{out}: adapter after 3 steps, loss {losses[-1]:.4f}\n"
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("step")] == ["1/3", "2/3", "3/3"]
    assert b"<svg" in picture.read_bytes()

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        found = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    wanted = tokenizer.decode(found, skip_special_tokens=True)
    answer = command("run", folder, PROMPT, "--adapter", out, "--max-tokens", 8, "--temperature", 0)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.strip() == wanted.strip()
    plain = command("run", folder, PROMPT, "--max-tokens", 8, "--temperature", 0)
    assert plain.stdout != answer.stdout


@pytest.mark.thorough
def test_a_killed_run_goes_on_and_stops_at_an_interrupt(folder, data, tmp_path, monkeypatch):
    """It is killed in a process of its own, and goes on in this one."""
    out = tmp_path / "out"
    arguments = ["train", folder, "--data", data, "--out", out, "--lora", "r=2,targets=q_proj", "--steps", 100000]
    arguments = [str(each) for each in (*arguments, "--batch-size", 2, "--seq-len", 64, "--save-every", 2)]
    program = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step 5/"):
                process.send_signal(signal.SIGKILL)
                break
        else:
            raise AssertionError("".join(lines))
    before = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    last = max(int(each.name) for each in (out / "checkpoints").iterdir() if each.name.isdigit())
    assert last >= 4

    def interrupted(report):
        reports.append(report)
        signal.raise_signal(signal.SIGINT)

    reports = []
    monkeypatch.setattr(train, "_report", interrupted)
    done = command(*arguments)
    assert done.exit_code == 130
    assert "the same command goes on" in done.stderr
    (report,) = reports
    assert report.step == last + 1
    after = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    assert len(after) == last + 1 and after[:4] == before[:4]
    assert not (out / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "nowhere/losses.png"], "there is no folder"),
        (["--plot", "losses.xyz"], "losses.xyz"),
        (["--lora", "r=0"], "--lora: r: expected a whole number >= 1, got 0"),
        (["--mesh", "fsdp"], "--mesh: expected AXIS=NUMBER such as fsdp=4, got 'fsdp'"),
        (["--schedule", "step"], "--schedule: expected constant, linear or cosine, got 'step'"),
        (["--trust-remote-code"], "--trust-remote-code: expected a model of transformers' own"),
    ],
)
def test_wrong_options_are_one_line(folder, data, tmp_path, options, message):
    done = command("train", folder, "--data", data, "--out", tmp_path / "out", *options)
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_data_and_adapters_that_there_are_not(folder, tmp_path):
    done = command("train", folder, "--data", tmp_path / "none.jsonl", "--out", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--data: expected a JSONL file, got" in done.stderr
    done = command("run", folder, PROMPT, "--adapter", tmp_path / "none")
    assert done.exit_code == 2
    assert "adapter: expected a folder with adapter_config.json" in done.stderr


def test_rows_that_are_wrong_are_one_line(folder, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(rows()[0]) + "\n" + json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    done = command("train", folder, "--data", data, "--out", tmp_path / "out", "--lora", "r=2", "--seq-len", 64)
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "row 2: expected a message of role assistant, got none; add the answer to learn" in line
