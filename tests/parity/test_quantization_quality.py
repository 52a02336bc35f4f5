"""What quantization costs: figures against those of eager PyTorch with the same weights, and the command."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import load_model
from torchax_serve.cli.main import app
from torchax_serve.parity.quantization import WINDOW, _token_ids, measure_quality
from torchax_serve.runtime.eager import EagerReference

RULES = {"weight_qtype": "int4", "tile_size": 32}  # activations are not rounded, so that PyTorch can compute the same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=80), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    made = tmp_path_factory.mktemp("plain")
    model.save_pretrained(made)
    return made


def test_figures_are_those_of_pytorch(folder):
    found = measure_quality(folder, quantization=RULES)
    quantized = load_model(folder, quantization=RULES)
    ids = _token_ids(quantized, None)
    models = AutoModelForCausalLM.from_pretrained(folder), EagerReference(quantized).module
    with torch.no_grad():
        windows = ids.reshape(-1, WINDOW)
        dense, ours = (torch.log_softmax(model(windows).logits[:, :-1].double(), -1) for model in models)
    targets = windows[:, 1:, None]
    assert found.num_tokens == targets.numel()
    assert found.dense_perplexity == pytest.approx(dense.gather(2, targets).mean().neg().exp().item(), rel=1e-4)
    assert found.perplexity == pytest.approx(ours.gather(2, targets).mean().neg().exp().item(), rel=1e-4)
    kl = (dense.exp() * (dense - ours)).sum(-1).flatten()
    assert found.mean_kl == pytest.approx(kl.mean().item(), rel=1e-3) and found.mean_kl > 0.01
    assert found.kl_99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-2)
    same = (dense.argmax(-1) == ours.argmax(-1)).double().mean().item()
    assert found.same_top == pytest.approx(same, abs=0.005)
    assert found.num_bytes < found.dense_bytes


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_the_command_fails_above_the_largest_divergence(folder):
    done = run(folder, "--quantization", "int8", "--max-kl", "0.05", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"] and 0 < found["mean_kl"] < 0.05
    done = run(folder, "--quantization", "int8", "--max-kl", found["mean_kl"] / 2)
    assert done.exit_code == 1
    assert "failed: mean KL" in done.stdout and "same top token" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-kl", "1"), "--quantization: expected a preset, a file or rules, got none"),
        (("--quantization", "int8", "--tokens", "4"), "--tokens: expected without --quantization"),
        (("--quantization", "none"), "--quantization: expected a preset, a file or rules, got none"),
        (("--quantization", "int8", "--max-kl", "-1"), "--max-kl: expected a number from 0 up, got -1"),
        (("--quantization", "int8", "--text", "absent.txt"), "has no tokenizer for a text"),
    ],
)
def test_wrong_options_are_one_line(folder, arguments, said):
    done = run(folder, *arguments)
    assert done.exit_code == 2 and said in done.stderr, done.stderr


def test_a_text_must_be_readable_and_long_enough(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"text: expected a file of UTF-8 text, got .*No such file"):
        measure_quality(quantization="int8", text=tmp_path / "absent.txt")
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(InvalidArgumentError, match="text: expected at least 2 tokens"):
        measure_quality(quantization="int8", text=tmp_path / "short.txt")
