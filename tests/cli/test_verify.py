"""``verify``: passes where JAX and eager PyTorch agree, and points at the very layer that was broken."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
)
from typer.testing import CliRunner

import torchax_serve.parity.verify
from model_adapters import attention
from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from torchax_serve.cli.main import app
from torchax_serve.parity.verify import Difference, verify

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
PROMPT = [5, 17, 80, 3, 44, 9, 61]


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("verify") / "llama"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(path)
    return path


@pytest.fixture
def break_weight(monkeypatch):
    """Changes a weight of the JAX side behind the loading."""

    def install(name, factor):
        load = torchax_serve.parity.verify.load_model

        def load_broken(*args, **kwargs):
            loaded = load(*args, **kwargs)
            loaded.weights[name] = loaded.weights[name] * factor
            return loaded

        monkeypatch.setattr(torchax_serve.parity.verify, "load_model", load_broken)

    return install


def call(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_correct_model_passes(folder):
    result = verify(folder, prompt=PROMPT, new_tokens=6)
    assert result.passed
    assert [row.name for row in result.prompt] == [
        "embedding",
        "layer 0",
        "layer 1",
        "layer 2 and final norm",
        "logits",
    ]
    assert [row.name for row in result.cached_step] == [row.name for row in result.prompt]
    assert len(result.steps) == 6
    eager = AutoModelForCausalLM.from_pretrained(folder)
    expected = eager.generate(torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert result.tokens == result.eager_tokens == tuple(expected[0, len(PROMPT) :].tolist())


def test_a_broken_weight_is_found_at_its_layer(folder, break_weight):
    break_weight("model.layers.1.mlp.down_proj.weight", 1.01)
    done = call(folder, "--tokens", 0, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["first_beyond"] == "layer 1 (whole prompt)"
    assert [row["within"] for row in found["prompt"]] == [True, True, False, False, False]
    assert [row["within"] for row in found["cached_step"]] == [True, True, False, False, False]


def test_a_broken_output_layer_is_not_blamed_on_the_layers(folder, break_weight):
    break_weight("lm_head.weight", -1.0)
    done = call(folder, "--tokens", 4)
    assert done.exit_code == 1
    assert "first beyond the tolerance is logits (whole prompt)" in done.stdout
    assert "greedy tokens differ from new token 0 on" in done.stdout
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    assert "first beyond" in rows["logits"]
    assert "beyond" not in rows["layer 2 and final norm"]


def test_a_broken_decode_op_is_found_where_the_prompt_is_right(folder, monkeypatch):
    """The op that only a step behind a cache uses: the whole prompt must pass, the cached step part at layer 0."""
    whole = attention.decode_attention

    def broken(*args, **kwargs):
        out, pool = whole(*args, **kwargs)
        return out * 1.05, pool

    monkeypatch.setattr(attention, "decode_attention", broken)
    result = verify(folder, prompt=PROMPT, new_tokens=3)
    assert not result.passed
    assert all(row.within for row in result.prompt)
    assert result.first_beyond == "layer 0 (cached step)"
    assert result.steps[0].within
    assert not result.steps[1].within


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_judged_by_the_error_of_eager_16_bits(folder, dtype):
    result = verify(folder, prompt=PROMPT, new_tokens=4, dtype=dtype)
    assert (result.dtype, result.tolerance) == (dtype, None)
    assert result.passed
    eager = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        rounded = eager(ids, output_hidden_states=True)
        exact = eager.float()(ids, output_hidden_states=True)
    for index, row in enumerate(result.prompt[1:-1], start=1):
        a, b = (output.hidden_states[index][0].double().numpy() for output in (rounded, exact))
        expected = np.sqrt(np.mean(np.sum((a - b) ** 2, -1) / np.sum(b**2, -1)))
        assert row.eager_error == pytest.approx(max(expected, torch.finfo(rounded.logits.dtype).eps / 2))
        assert 0 < row.error <= 3 * row.eager_error


@pytest.fixture(scope="module")
def amplifying(tmp_path_factory):
    """A model whose rounding errors in 16 bits grow, as in trained models: one token has huge activations."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("verify") / "amplifying"
    model = LlamaForCausalLM(LlamaConfig(**CONFIG | {"num_hidden_layers": 6, "initializer_range": 0.6}))
    with torch.no_grad():
        model.model.embed_tokens.weight[PROMPT[0], 3] = 400.0
        model.model.layers[4].mlp.down_proj.weight[3] *= 40.0
    model.save_pretrained(path)
    return path


def test_model_that_amplifies_rounding_passes(amplifying):
    """The old bound, 0.06 on any element, is below the error of eager PyTorch itself in bfloat16."""
    eager = AutoModelForCausalLM.from_pretrained(amplifying, dtype=torch.bfloat16)
    with torch.no_grad():
        rounded = eager(torch.tensor([PROMPT])).logits
        exact = eager.float()(torch.tensor([PROMPT])).logits
    assert not Difference.between("logits", rounded, exact, 6e-2).within
    result = verify(amplifying, prompt=PROMPT, new_tokens=6, dtype="bfloat16")
    assert result.passed, result.first_beyond


def test_a_fault_in_bfloat16_is_found_at_its_layer(amplifying, break_weight):
    break_weight("model.layers.2.mlp.down_proj.weight", 1.2)
    done = call(amplifying, "--tokens", 3, "--dtype", "bfloat16")
    assert done.exit_code == 1
    assert "first beyond what rounding to bfloat16 explains is layer 2 (whole prompt)" in done.stdout


def test_a_tolerance_that_is_given_judges_16_bits_too(folder):
    result = verify(folder, prompt=PROMPT, new_tokens=1, dtype="bfloat16", tolerance=1e-6)
    assert result.tolerance == 1e-6
    assert not result.passed
    assert result.prompt[1].error is None


def test_random_weights_and_a_model_object(folder):
    result = verify(folder / "config.json", prompt=PROMPT, new_tokens=0, random_weights=True)
    assert result.passed
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert verify(model, prompt=PROMPT, new_tokens=0).passed
    assert type(model) is LlamaForCausalLM
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_encoder_is_compared_without_tokens(tmp_path):
    config = BertConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    BertModel(config).save_pretrained(tmp_path)
    result = verify(tmp_path, prompt=PROMPT)
    assert result.passed
    assert "last hidden state" in [row.name for row in result.prompt]
    assert result.tokens == ()


def test_table_of_a_correct_model(folder):
    done = call(folder, "--tokens", 2)
    assert done.exit_code == 0
    assert "passed: every difference within the tolerance, all 2 greedy tokens the same" in done.stdout
    for word in ("embedding", "layer 1", "cached step", "relative", "float32"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [96]}, "expected 0 to 95"),
        ({"prompt": "words"}, "no tokenizer"),
        ({"new_tokens": -1}, "new_tokens is -1"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
    ],
)
def test_bad_arguments(folder, options, error):
    with pytest.raises(InvalidArgumentError, match=error):
        verify(folder, **options)


def test_encoder_decoder_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16}))
    with pytest.raises(UnsupportedModelError, match="an encoder and a decoder"):
        verify(file, random_weights=True)


def test_errors_of_the_command(tmp_path, folder):
    done = call(tmp_path / "nothing")
    assert done.exit_code == 2
    assert call(folder, "--random-weights", folder).exit_code == 2


def test_differences_are_measured_as_documented():
    theirs = torch.tensor([3.0, -4.0, 0.0, 0.0])  # rms 2.5
    ours = theirs + torch.tensor([0.0, 0.0, 0.5, 0.0])
    found = Difference.between("x", ours, theirs, tolerance=0.2)
    assert found.largest == 0.5
    assert found.relative == pytest.approx(0.5 / 2.5)
    assert found.within
    assert not Difference.between("x", ours, theirs, tolerance=0.19).within
    infinite = torch.tensor([-np.inf, 1.0])
    assert Difference.between("x", infinite, infinite, 0.0).within
    for bad in (torch.tensor([0.0, 1.0]), torch.tensor([-np.inf, np.nan]), torch.zeros(3)):
        found = Difference.between("x", bad, infinite, 1.0)
        assert not found.within
        assert found.largest == np.inf
    assert jnp.isinf(found.relative)


def test_errors_in_16_bits_are_measured_as_documented():
    exact = torch.tensor([[3.0, 4.0], [0.0, 100.0]])
    ours = (exact + torch.tensor([[0.5, 0.0], [0.0, 1.0]])).to(torch.bfloat16)
    found = Difference.from_float32("x", ours, exact, 0.03)
    assert found.error == pytest.approx(np.sqrt((0.1**2 + 0.01**2) / 2))
    assert found.within
    assert not Difference.from_float32("x", ours, exact, 0.02).within
    assert Difference.from_float32("x", exact.to(torch.bfloat16), exact, 0.0).eager_error == 2**-8
    # Where eager PyTorch overflows, overflowing is no fault; numbers that are far off still are.
    assert Difference.from_float32("x", torch.full_like(ours, np.inf), exact, np.inf).within
    assert Difference.from_float32("x", ours, exact, np.inf).within
    assert not Difference.from_float32("x", 2 * ours, exact, np.inf).within
    assert not Difference.from_float32("x", torch.full_like(ours, np.nan), exact, 0.01).within


def tiny_vit(folder):
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(folder)


def test_model_of_images_reads_noise(tmp_path, break_weight):
    tiny_vit(tmp_path)
    result = verify(tmp_path)
    assert result.passed
    assert [each.name for each in result.prompt] == ["embedding", "layer 0", "layer 1 and final norm", "logits"]
    assert (result.prompt_ids, result.cached_step, result.tokens) == ((), (), ())
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    break_weight("vit.layers.1.mlp.fc1.weight", 1.1)
    broken = verify(tmp_path)
    assert not broken.passed
    assert broken.first_beyond == "layer 1 and final norm (whole prompt)"


def test_model_of_sound_reads_noise(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convolutions, num_conv_pos_embedding_groups=2, vocab_size=12))
    model.save_pretrained(tmp_path)
    assert verify(tmp_path).passed
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    assert verify(tmp_path).passed
    result = CliRunner().invoke(app, ["verify", str(tmp_path), "--prompt", "text"])
    assert result.exit_code == 2
    assert (
        "--prompt: expected none for Wav2Vec2ForCTC, which reads input_values, got one; leave it out" in result.output
    )


def test_broken_files_of_a_processor_are_named(tmp_path):
    tiny_vit(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoImageProcessor"}')
    with pytest.raises(CheckpointError, match=r"the files in .* do not make an image processor \(.*get them again"):
        verify(tmp_path)
