"""Transformers' own pipelines with a model that `to_jax` has been given, beside the same in eager PyTorch.

Tasks of `SUPPORTED_TASKS` that stand in no case are in `ELSEWHERE`, with the test that has them.
"""

import copy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import task_models
import torch
import transformers as tf
from encoder_models import tokenizer
from PIL import Image
from thorough import thorough
from transformers.pipelines import SUPPORTED_TASKS, video_classification
from weights import draw_matrices

from parity_sweep.tiny.heads import head_model
from torchax_serve import to_jax

sys.path.insert(0, str(Path(__file__).parents[1] / "multimodal"))

import llava_folder

pytestmark = [pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT = {**SIZES, "vocab_size": len(tokenizer()), "max_position_embeddings": 64}
TEXT = "the small red dog ran home"
LABELS = {0: "entailment", 1: "neutral", 2: "contradiction"}


def drawn(model):
    """A model in evaluation whose matrices are large enough to tell answers apart."""
    torch.manual_seed(0)
    draw_matrices(model.eval(), std=0.2)
    return model


def in_folder(name):
    """A model of `task_models` with what reads its inputs."""

    def make(folder):
        model = getattr(task_models, name)(folder)
        reader = tf.AutoFeatureExtractor if "wav" in name else tf.AutoImageProcessor
        part = "feature_extractor" if "wav" in name else "image_processor"
        found = {part: reader.from_pretrained(folder)}
        if name in ("clip", "owlvit", "wav2vec_ctc"):
            found["tokenizer"] = tf.AutoTokenizer.from_pretrained(folder)
        return model, found

    return make


def of_texts(model_class, **options):
    def make(folder):
        return drawn(model_class(tf.BertConfig(**BERT, **options))), {"tokenizer": tokenizer()}

    return make


def document(folder):
    config = tf.LayoutLMConfig(**BERT, max_2d_position_embeddings=1024)
    return drawn(tf.LayoutLMForQuestionAnswering(config)), {"tokenizer": tokenizer()}


def table(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EMPTY]", "what", "is", "the", "age", "name", "of"]
    words += ["ann", "bob", *map(str, range(10))]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = tf.TapasConfig(
        **{**SIZES, "vocab_size": len(words)}, max_position_embeddings=64, num_aggregation_labels=4,
        aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"}, reset_position_index_per_cell=True,
    )  # fmt: skip
    reader = tf.TapasTokenizer(str(folder / "vocab.txt"))
    return drawn(tf.TapasForQuestionAnswering(config)), {"tokenizer": reader}


def sounds_and_texts(folder):
    audio = {
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
        "num_hidden_layers": 2, "spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4],
        "window_size": 4,
    }  # fmt: skip
    config = tf.ClapConfig(
        text_config={**BERT, "max_position_embeddings": 80, "pad_token_id": 0}, audio_config=audio, projection_dim=16
    )
    reader = tf.ClapFeatureExtractor(
        feature_size=16, sampling_rate=16_000, hop_length=160, fft_window_size=512, max_length_s=1, frequency_max=8000,
        truncation="rand_trunc", padding="repeatpad",
    )  # fmt: skip
    of_texts = tokenizer()
    of_texts.model_input_names = ["input_ids", "attention_mask"]
    return drawn(tf.ClapModel(config)), {"feature_extractor": reader, "tokenizer": of_texts}


def video(folder):
    model = head_model("videomae", "video classification", tf.VideoMAEForVideoClassification).eval()
    size = model.config.image_size
    reader = tf.VideoMAEImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, do_resize=True
    )
    return model, {"image_processor": reader}


def keypoints(folder):
    model = head_model("lightglue", "keypoint matching", tf.LightGlueForKeypointMatching).eval()
    return model, {"image_processor": tf.LightGlueImageProcessor(size={"height": 48, "width": 64})}


def llava(folder):
    return llava_folder.make(folder), {"processor": tf.AutoProcessor.from_pretrained(folder)}


def words(image):
    return [(word, [60 * i, 10, 60 * i + 50, 40]) for i, word in enumerate(TEXT.split(), 1)]


def tone():
    return {"raw": task_models.sounds()[0], "sampling_rate": 16_000}


def talk(images):
    parts = [{"type": "image", "image": images[0]}, {"type": "text", "text": "What is this ?"}]
    return [{"role": "user", "content": parts}]


CASES = {
    "audio-classification": (in_folder("wav2vec"), lambda pipe, images: pipe(tone())),
    "automatic-speech-recognition": (in_folder("wav2vec_ctc"), lambda pipe, images: pipe(tone())),
    "feature-extraction": (of_texts(tf.BertModel), lambda pipe, images: pipe(TEXT)),
    "fill-mask": (of_texts(tf.BertForMaskedLM), lambda pipe, images: pipe("the [MASK] dog ran")),
    "zero-shot-classification": (
        of_texts(tf.BertForSequenceClassification, id2label=LABELS, label2id={v: k for k, v in LABELS.items()}),
        lambda pipe, images: pipe(TEXT, ["a cat", "rain", "home"]),
    ),
    "document-question-answering": (
        document,
        lambda pipe, images: pipe({"question": "the dog", "word_boxes": words(images[0])}, top_k=3),
    ),
    "table-question-answering": (
        table,
        lambda pipe, images: pipe({"name": ["ann", "bob"], "age": ["3", "5"]}, "what is the age of bob"),
    ),
    "zero-shot-audio-classification": (
        sounds_and_texts,
        lambda pipe, images: pipe(tone()["raw"], candidate_labels=["a dog", "rain", "the cat"]),
    ),
    "image-classification": (in_folder("vit"), lambda pipe, images: pipe(images)),
    "image-feature-extraction": (in_folder("vit"), lambda pipe, images: pipe(images[0])),
    "object-detection": (in_folder("detr"), lambda pipe, images: pipe(images[0], threshold=0.2)),
    "image-segmentation": (in_folder("segformer"), lambda pipe, images: pipe(images[0])),
    "depth-estimation": (in_folder("glpn"), lambda pipe, images: pipe(images[0])),
    "zero-shot-image-classification": (
        in_folder("clip"),
        lambda pipe, images: pipe(images[0], candidate_labels=["a cat", "the red dog"]),
    ),
    "zero-shot-object-detection": (
        in_folder("owlvit"),
        lambda pipe, images: pipe(images[0], candidate_labels=["a cat", "mat"], threshold=0.3),
    ),
    "video-classification": (video, lambda pipe, images: pipe("frames.mp4", num_frames=4)),
    "keypoint-matching": (keypoints, lambda pipe, images: pipe(images[:2], threshold=0.0)),
    "image-text-to-text": (llava, lambda pipe, images: pipe(text=talk(images), max_new_tokens=6, do_sample=False)),
}
OFTEN = ("document-question-answering", "zero-shot-audio-classification", "image-text-to-text")
ELSEWHERE = {
    "text-generation": "tests/core/test_drop_in.py",
    "text-classification": "tests/pooling/test_labels.py",
    "token-classification": "tests/pooling/test_labels.py",
    "text-to-audio": "tests/tasks/test_audio_model.py",  # the length of its sound is found on the host
    "mask-generation": "tests/tasks/test_prompted_masks.py",  # the pipeline's boxes need torchvision
    "any-to-any": "tests/multimodal/test_images.py",  # the pipeline itself needs torchvision
    "decision": "benchmarks/parity_sweep",  # models without a checkpoint of their own here
}


@pytest.fixture
def frames(monkeypatch):
    """Pictures in place of those that PyAV would decode."""
    found = [np.asarray(image.resize((64, 48))) for image in task_models.images() * 2][:4]
    for name, value in (
        ("requires_backends", lambda *args: None),
        ("av", types.SimpleNamespace(open=lambda path: path)),
        ("np", np),
        ("read_video_pyav", lambda container, indices: [found[index] for index in indices]),
    ):
        monkeypatch.setattr(video_classification, name, value, raising=False)


def assert_same(found, expected, path=""):
    """Compares results of any structure: numbers within 1e-4, all else the same."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(expected, Image.Image):
        assert (np.abs(np.asarray(found, np.int32) - np.asarray(expected, np.int32)) <= 1).mean() > 0.999, path
    elif isinstance(expected, torch.Tensor | np.ndarray):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-4, rtol=1e-4, err_msg=path)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4), path
    else:
        assert found == expected, path


def test_every_task_has_a_case():
    assert set(CASES) | set(ELSEWHERE) == set(SUPPORTED_TASKS)
    root = Path(__file__).parents[2]
    assert all((root / path).exists() for path in ELSEWHERE.values())


@pytest.mark.parametrize("task", [task if task in OFTEN else thorough(task) for task in CASES])
@pytest.mark.usefixtures("frames")
def test_pipeline_of_a_model_on_jax(task, tmp_path):
    make, ask = CASES[task]
    model, parts = make(tmp_path)
    other, images = copy.deepcopy(model), task_models.images()
    expected = ask(tf.pipeline(task, model=model, device="cpu", **parts), images)
    found = ask(tf.pipeline(task, model=to_jax(other), device="cpu", **parts), images)
    assert_same(found, expected)
