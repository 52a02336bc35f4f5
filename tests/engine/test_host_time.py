"""`benchmarks/host_overhead.py`: what it takes an accelerator's step to be, and what it measures of ours beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from simulated_accelerator import Accelerator, Costs

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "host_overhead.py"

SHAPE = json.loads((SCRIPT.parent / "shapes" / "llama-8b.json").read_text())


def test_a_step_reads_what_the_model_has():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SHAPE))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    table = model.get_input_embeddings().weight.numel()
    costs = Costs.of(SHAPE)
    assert costs.weight_bytes == 2 * (matrices - table)
    assert costs.token_flops == 2 * (matrices - table)
    assert costs.token_bytes == 32 * 2 * 8 * 128 * 2, "layers, keys and values, heads, width, bytes"
    assert costs.step_s(Accelerator(), 1, 0) == pytest.approx(costs.weight_bytes / 4.8e12)
    assert costs.step_s(Accelerator(reached=0.5), 1, 0) == pytest.approx(costs.weight_bytes / 2.4e12)
    assert costs.step_s(Accelerator(), 4096, 0) == pytest.approx(4096 * costs.token_flops / 989e12)


def test_the_host_is_measured_beside_the_steps_it_sends(tmp_path):
    options = ["--batch", "2", "--context", "64", "--new-tokens", "240", "--output", tmp_path / "numbers.json"]
    options += ["--trace", tmp_path / "trace.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "numbers.json").read_text())
    decode, mixed = report["rows"]
    assert [decode["kind"], mixed["kind"]] == ["decode", "mixed"]
    assert 4 <= decode["steps_a_round"] <= 16, "several steps go to the device at once"
    assert mixed["steps_a_round"] == 1
    least_us = 1e6 * Costs.of(SHAPE).step_s(Accelerator(), 2, 0)
    for row in report["rows"]:
        assert least_us < row["step_us"] < 1.1 * least_us, "a few tokens of context add little"
        assert row["share"] == pytest.approx(row["host_us_a_step"] / row["step_us"])
        parts = row["parts_us_a_round"]
        assert parts["call"] < parts["execute"] < row["host_us_a_round"]
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["name"] for each in spans}
    assert names == {"schedule", "execute", "call", "note", "wait", "read", "commit", "deliver", "step"}
    assert all(each["dur"] >= 0 for each in spans)
