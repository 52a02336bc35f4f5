"""Training beside PyTorch and peft: the same losses, files that both read, runs that go on to the last bit."""

import json
from collections import namedtuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from training_models import batches_of, rows, tiny_folder, torch_steps, write_data
from transformers import AutoModelForCausalLM

from model_adapters.errors import CheckpointError, InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from torchax_serve import serve
from torchax_serve.training import TrainingOptions, checkpoints, train
from torchax_serve.training.lora import adapter_of, parse_lora

LORA = "r=4,alpha=8,targets=q_proj+v_proj"
SIZES = {"batch_size": 2, "seq_len": 64, "max_grad_norm": None}
# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def fresh(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_an_adapter_has_the_losses_of_peft_and_is_read_by_it_and_by_serve(folder, tmp_path):
    options = TrainingOptions(num_steps=5, learning_rate=2e-2, **SIZES)
    reports = []
    result = train(folder, rows(), out=tmp_path, options=options, lora=LORA, report=reports.append)
    wrapped = adapter_of(fresh(folder), LORA, options.seed).eval()
    wanted = torch_steps(wrapped, batches_of(result.model, options), options.learning_rate)
    np.testing.assert_allclose(result.losses, wanted, rtol=1e-4)
    assert result.losses[-1] < result.losses[0] - 0.1
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    assert any((batch.segments == 2).any() for batch in batches_of(result.model, options)), "examples share rows"
    log = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in log] == result.losses

    read = PeftModel.from_pretrained(fresh(folder), tmp_path).eval()
    theirs = {name: tensor for name, tensor in wrapped.named_parameters() if tensor.requires_grad}
    for name, tensor in read.named_parameters():
        if name in theirs:
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    prompt = result.model.tokenizer("What is 3 plus 4?", return_tensors="pt").input_ids
    with torch.no_grad():
        eager, plain = read(prompt).logits, fresh(folder)(prompt).logits
    assert (eager - plain).abs().max() > 0.1, "the adapter changes the logits"
    with serve(folder, adapter=tmp_path) as served:
        torch.testing.assert_close(served(prompt).logits, eager, rtol=1e-4, atol=1e-4)
        tokens = served.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(tokens, read.generate(prompt, max_new_tokens=12, do_sample=False))


def test_all_weights_in_one_batch_in_parts_and_with_a_stop_between(folder, tmp_path):
    options = TrainingOptions(num_steps=4, learning_rate=1e-2, save_every=100, **SIZES)
    straight = train(folder, write_data(tmp_path / "chats.jsonl"), out=tmp_path / "a", options=options)
    wanted = torch_steps(fresh(folder).train(False), batches_of(straight.model, options), options.learning_rate)
    np.testing.assert_allclose(straight.losses, wanted, rtol=1e-4)

    steps = iter([False, False, True])
    first = train(folder, rows(), out=tmp_path / "b", options=options, stop=lambda: next(steps))
    assert (first.is_complete, len(first.losses)) == (False, 2)
    assert not (tmp_path / "b" / "model.safetensors").exists()
    second = train(folder, rows(), out=tmp_path / "b", options=options)
    assert second.losses == straight.losses
    for name, tensor in fresh(tmp_path / "b").state_dict().items():
        assert torch.equal(tensor, fresh(tmp_path / "a").state_dict()[name]), name

    other = TrainingOptions(num_steps=4, learning_rate=1e-3, **SIZES)
    with pytest.raises(InvalidArgumentError, match=r"learning_rate: expected 0\.01 as in the checkpoint"):
        train(folder, rows(), out=tmp_path / "b", options=other)
    parts = TrainingOptions(num_steps=2, learning_rate=1e-2, num_micro_batches=2, **SIZES)
    np.testing.assert_allclose(
        train(folder, rows(), out=tmp_path / "c", options=parts).losses, straight.losses[:2], rtol=1e-5
    )
    (damaged,) = (tmp_path / "b" / "checkpoints").glob("4/state/_METADATA")
    damaged.write_text("x")
    with pytest.raises(CheckpointError, match="expected a readable checkpoint"):
        train(folder, rows(), out=tmp_path / "b", options=options)


def test_bfloat16_weights_have_float32_masters(tmp_path):
    folder = tiny_folder(tmp_path / "model", torch.bfloat16)
    options = TrainingOptions(num_steps=6, learning_rate=2e-4, batch_size=2, seq_len=64)
    result = train(folder, rows(), out=tmp_path / "out", options=options)
    masters = result.model.trained
    assert {str(array.dtype) for array in masters.values()} == {"float32"}
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert np.isfinite(result.losses).all()
    assert result.losses[-1] < result.losses[0]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(folder, tmp_path):
    options = TrainingOptions(num_steps=5, learning_rate=1e38, **SIZES)
    with pytest.raises(TorchaxServeError, match="expected a finite loss and gradient, got nan; the state of step"):
        train(folder, rows(), out=tmp_path, options=options, lora=LORA)
    (checkpoint,) = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]
    log = (tmp_path / "losses.jsonl").read_text().splitlines()
    assert int(checkpoint.name) == len(log) >= 1
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_a_disk_that_becomes_full_keeps_the_last_checkpoint(folder, tmp_path, monkeypatch):
    options = TrainingOptions(num_steps=4, save_every=1, **SIZES)
    usage = namedtuple("usage", "total used free")(10, 9, 1)

    def report(step):
        if step.step == 2:
            monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage)

    said = r"checkpoints: expected .* of free disk for the checkpoint of step 2, got 0\.0 kB; free some, and start"
    with pytest.raises(CheckpointError, match=said):
        train(folder, rows(), out=tmp_path, options=options, report=report, lora=LORA)
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["1"]
    monkeypatch.undo()
    assert train(folder, rows(), out=tmp_path, options=options, lora=LORA).is_complete


def test_a_checkpoint_that_cannot_be_written_is_one_line(folder, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("OUT_OF_RANGE:\n" + "a long path " * 50 + ": Input/output error")

    monkeypatch.setattr(checkpoints.import_orbax().CheckpointManager, "save", fails)
    with pytest.raises(CheckpointError) as caught:
        train(folder, rows(), out=tmp_path, options=TrainingOptions(num_steps=1, **SIZES), lora=LORA)
    said = str(caught.value)
    assert "the checkpoint of step 1, and it cannot be written" in said and "Input/output error" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("r=4,targets=w_proj", "lora: expected targets among .*q_proj.*, got"),
        ("rank=4", "lora: expected KEY=VALUE with a key out of r, alpha"),
        ("r=four", "lora: r: expected a number, got 'four'"),
        ("r=4,dropout=0.1", "lora_dropout: expected 0, got 0.1"),
        (LoraConfig(lora_dropout=0.2, target_modules=["q_proj"]), "lora_dropout: expected 0, got 0.2"),
        (4, "lora: expected a text or a LoraConfig of peft, got int"),
    ],
)
def test_bad_adapters(folder, tmp_path, lora, message):
    with pytest.raises(InvalidArgumentError, match=message):
        train(folder, rows(), out=tmp_path, options=TrainingOptions(num_steps=1, **SIZES), lora=lora)


def test_bad_options_and_models(folder, tmp_path):
    with pytest.raises(InvalidArgumentError, match="seq_len: expected at most 256, the positions of"):
        train(folder, rows(), out=tmp_path, options=TrainingOptions(num_steps=1, seq_len=512))
    with pytest.raises(InvalidArgumentError, match="mesh: expected at most the 1 devices there are"):
        options = TrainingOptions(num_steps=1, mesh={"fsdp": 4}, batch_size=4, seq_len=64)
        train(folder, rows(), out=tmp_path, options=options)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="out: expected a folder, got the file"):
        train(folder, rows(), out=tmp_path / "file", options=TrainingOptions(num_steps=1))
    with pytest.raises(InvalidArgumentError, match="out: expected another folder than the model's"):
        train(folder, rows(), out=folder, options=TrainingOptions(num_steps=1))
    frozen = fresh(folder).requires_grad_(False)
    with pytest.raises(InvalidArgumentError, match="expected a parameter with requires_grad, got none"):
        train(frozen, rows(), out=tmp_path, options=TrainingOptions(num_steps=1, seq_len=64))
    with pytest.raises(UnsupportedModelError, match="expected a causal language model of transformers, got LlamaModel"):
        train(fresh(folder).model, rows(), out=tmp_path, options=TrainingOptions(num_steps=1, seq_len=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps: expected a whole number >= 1, got 0"),
        ({"batch_size": 3, "num_micro_batches": 2}, r"expected a divisor of batch_size \(3\), got 2"),
        ({"mesh": {"tensor": 2}}, "mesh: expected axes out of data, fsdp, model, got 'tensor'"),
        ({"mesh": {"fsdp": 3}}, "batch_size: expected rows of a micro-batch"),
        ({"learning_rate": 0}, "learning_rate: expected a number above 0"),
        ({"schedule": "step"}, "schedule: expected one of constant, linear, cosine"),
        ({"dtype": "float16"}, "dtype: expected one of auto, float32, bfloat16"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TrainingOptions(**{"num_steps": 1, **options})


def test_texts_of_adapters():
    assert parse_lora("r=16, alpha=32, targets=q_proj+v_proj") == {
        "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "use_rslora": False, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert parse_lora("targets=all-linear")["target_modules"] == "all-linear"
