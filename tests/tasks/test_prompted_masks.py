"""Masks of SAM's later releases beside their forwards in eager PyTorch, by a processor that stretches an image."""

import json

import numpy as np
import pytest
import task_models
import torch
import transformers as tf

from parity_sweep.tiny.heads import head_model
from torchax_serve import InvalidArgumentError, UnsupportedModelError, serve

POINTS, LABELS = [(20, 30), (5, 6)], [1, 0]


class StretchingProcessor:
    """What the processors of SAM 2 and SAM 3 do, which need torchvision: a square image, masks of the old size."""

    def __init__(self, size):
        self.size = size

    def __call__(self, image, return_tensors):
        pixels = np.asarray(image.resize((self.size, self.size)), np.float32) / 128 - 1
        return {
            "pixel_values": torch.from_numpy(pixels).permute(2, 0, 1)[None],
            "original_sizes": torch.tensor([[image.height, image.width]]),
        }

    def post_process_masks(self, masks, original_sizes):
        return [
            torch.nn.functional.interpolate(each, size, mode="bilinear") > 0
            for each, size in zip(masks, original_sizes.tolist(), strict=True)
        ]


@pytest.mark.parametrize(
    ("model_type", "model_class"), [("sam2", tf.Sam2Model), ("sam3_tracker", tf.Sam3TrackerModel)], ids=["2", "3"]
)
def test_sam_2_and_3(model_type, model_class, tmp_path):
    eager = head_model(model_type, "mask generation", model_class).eval()
    eager.save_pretrained(tmp_path)
    size, image = eager.config.prompt_encoder_config.image_size, task_models.images()[1]
    processor = StretchingProcessor(size)
    inputs = processor(image, "pt")
    scale = torch.tensor([size / image.width, size / image.height])
    with torch.no_grad():
        output = eager(
            inputs["pixel_values"],
            input_points=(torch.tensor(POINTS) * scale)[None, None],
            input_labels=torch.tensor(LABELS)[None, None],
        )
    masks = processor.post_process_masks(output.pred_masks, inputs["original_sizes"])[0][0].numpy()
    scores = output.iou_scores[0, 0].numpy()
    order = np.argsort(-scores, kind="stable")
    with serve(tmp_path) as served:
        with pytest.raises(InvalidArgumentError, match="has no image processor"):
            served.masks(image, points=POINTS)
        served._readers["image_processor"] = processor
        (found,) = served.masks(image, points=POINTS, labels=LABELS)
        assert served.masks(image, boxes=[5, 4, 30, 20])[0][0].mask.shape == (image.height, image.width)
        assert served._mask_decoder.num_encoded == 1
    np.testing.assert_allclose([each.score for each in found], scores[order], atol=1e-4)
    for each, index in zip(found, order, strict=True):
        assert (each.mask == masks[index]).mean() > 0.999


def test_sam_hq(tmp_path):
    eager = head_model("sam_hq", "mask generation", tf.SamHQModel).eval()
    size, image = eager.config.prompt_encoder_config.image_size, task_models.images()[1]
    reader = tf.SamImageProcessor(size={"longest_edge": size}, pad_size={"height": size, "width": size})
    for each in (eager, reader):
        each.save_pretrained(tmp_path)
    processor = tf.SamHQProcessor(reader)
    inputs = processor(image, input_points=[[list(map(list, POINTS))]], input_labels=[[LABELS]], return_tensors="pt")
    sizes = inputs.pop("original_sizes"), inputs.pop("reshaped_input_sizes")
    with torch.no_grad():
        output = eager(**inputs)
    masks = processor.post_process_masks(output.pred_masks, *sizes)[0][0].numpy()
    scores = output.iou_scores[0, 0].numpy()
    order = np.argsort(-scores, kind="stable")
    with serve(tmp_path) as served:
        (found,) = served.masks(image, points=POINTS, labels=LABELS)
    np.testing.assert_allclose([each.score for each in found], scores[order], atol=1e-4)
    for each, index in zip(found, order, strict=True):
        assert (each.mask == masks[index]).mean() > 0.999


def test_processor_without_its_package(tmp_path, monkeypatch):
    head_model("sam2", "mask generation", tf.Sam2Model).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Sam2ImageProcessor"}))

    def missing(*args, **kwargs):
        raise ImportError("Sam2ImageProcessor requires the Torchvision library")

    monkeypatch.setattr(tf.AutoImageProcessor, "from_pretrained", missing)
    with (
        serve(tmp_path) as served,
        pytest.raises(UnsupportedModelError, match="image processor, got Sam2ImageProcessor requires the Torchvision"),
    ):
        served.masks(task_models.images()[0], points=POINTS)
