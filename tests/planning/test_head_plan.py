"""Plans of models that write no text: figures by hand, and what is refused."""

import json

import pytest
import task_models
import transformers as tf
from encoder_models import tokenizer
from typer.testing import CliRunner

from torchax_serve import UnsupportedModelError
from torchax_serve.cli.main import app
from torchax_serve.planning.abstract_model import empty_module
from torchax_serve.planning.head_plan import HeadRequest, files_of, plan_head

# Multiplications of a ViT of task_models for one image: patches, two layers of 17 tokens, labels.
OF_A_LAYER = 17 * (4 * 32 * 32 + 2 * 32 * 48) + 2 * 17 * 17 * 32
PRODUCTS = 16 * 192 * 32 + 2 * OF_A_LAYER + 32 * 3


def plan(path, **options):
    module, _ = empty_module(path, any_task=True)
    return plan_head(module, files_of(str(path)), HeadRequest(topology="cpu:1", **options))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("vit")
    return path, 4 * sum(each.numel() for each in task_models.vit(path).parameters())


def test_figures_of_a_model_of_images(vit):
    path, num_bytes = vit
    found = plan(path, max_num_seqs=5)
    assert (found.class_name, found.dtype, found.fits) == ("ViTForImageClassification", "float32", True)
    assert found.inputs == {"pixel_values": (4, 3, 32, 32)}  # rows are a power of two
    assert found.weights_bytes == found.weights_bytes_of_one_device == num_bytes
    assert found.step_flops == 2 * 4 * PRODUCTS
    assert found.program.argument_bytes == num_bytes + 4 * 4 * 3 * 32 * 32
    assert found.temporary_bytes >= found.program.temporary_bytes > 0 and found.bound_s is None
    quantized = plan(path, max_num_seqs=5, quantization="int8")
    assert quantized.weights_bytes < 0.6 * num_bytes and "int8" in quantized.quantization


def test_texts_and_images_of_other_sizes(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = tf.BertConfig(**sizes, vocab_size=40, max_position_embeddings=48)
    tf.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    assert plan(tmp_path / "bert", max_num_seqs=2).inputs["input_ids"] == (2, 48)
    assert plan(tmp_path / "bert", max_num_seqs=2, max_model_len=16).inputs["attention_mask"] == (2, 16)
    (tmp_path / "detr").mkdir()
    task_models.detr(tmp_path / "detr")
    found = plan(tmp_path / "detr", max_num_seqs=1, image_size=(100, 50))
    assert found.inputs["pixel_values"] == (1, 3, 32, 64)
    (tmp_path / "detr" / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="with the files of its processor, got DetrForObjectDetection"):
        plan(tmp_path / "detr")


def test_on_the_command_line(vit, tmp_path):
    path, num_bytes = vit
    tf.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64).save_pretrained(tmp_path)

    def call(model, *arguments):
        return CliRunner().invoke(app, ["plan", str(model), *arguments, "--topology", "cpu:1"])

    done = call(path, "--max-num-seqs", "2", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["weights_bytes"], found["inputs"]) == (num_bytes, {"pixel_values": [2, 3, 32, 32]})
    done = call(path)
    assert "fits: a forward of pixel_values [32, 3, 32, 32]" in done.stdout
    for model, arguments, message in (
        (path, ("--kv-cache-dtype", "int8"), "--kv-cache-dtype: expected with a language model alone"),
        (path, ("--prefill", "32"), "--prefill: expected with a language model alone"),
        (path, ("--max-model-len", "32"), "--max-model-len: expected with a model that reads texts, got another"),
        (path, ("--image-size", "32"), "--image-size: expected WIDTHxHEIGHT"),
        (tmp_path, ("--image-size", "32x32"), "--image-size: expected with a model of images alone, got another"),
    ):
        refused = call(model, *arguments)
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split()), refused.stderr
