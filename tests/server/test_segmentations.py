"""Masks over HTTP: those of the model's own calls, by JSON and by a form, encoded once for many prompts."""

import base64
import io
import json

import httpx
import numpy as np
import pytest
import task_models
from PIL import Image

from torchax_serve.server.segmentations import run_lengths
from torchax_serve.tasks import prompted_masks

ROUTE = "/v1/images/segmentations"
POINTS, LABELS = [[20, 10], [40, 20]], [1, 0]
BOXES = [[5, 4, 30, 20], [30, 10, 60, 30]]


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def text(image):
    return base64.b64encode(png(image)).decode()


def post(server, **body):
    return httpx.post(f"{server.url}{ROUTE}", json={"model": "tiny", **body}, timeout=60)


def pixels_of(mask):
    """The mask of a PNG, or of run lengths as the paper of COCO's annotations describes them, one by one."""
    if isinstance(mask, str):
        with Image.open(io.BytesIO(base64.b64decode(mask))) as image:
            assert image.mode == "L" and set(np.unique(image)) <= {0, 255}
            return np.asarray(image) > 0
    counts, text = [], iter(mask["counts"].encode())
    for first in text:
        value, shift, group = 0, 0, first - 48
        while True:
            value |= (group & 31) << shift
            shift += 5
            if not group & 32:
                break
            group = next(text) - 48
        value -= (1 << shift) if group & 16 else 0
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    values = np.repeat(np.arange(len(counts)) % 2, counts)
    return values.reshape(mask["size"], order="F") > 0


def assert_same(data, expected):
    """Compares an answer with what `masks` returns: objects, scores, masks and their boxes."""
    flat = [(index, each) for index, masks in enumerate(expected) for each in masks]
    assert len(data) == len(flat)
    for row, (index, each) in zip(data, flat, strict=True):
        assert set(row) == {"object", "score", "box", "mask"} and row["object"] == index
        assert row["score"] == pytest.approx(each.score, abs=1e-5)
        assert (pixels_of(row["mask"]) == each.mask).mean() > 0.999
        rows, columns = np.nonzero(pixels_of(row["mask"]))
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if len(rows) else None
        assert row["box"] == edges


def test_prompts_of_an_image_that_is_sent_once(servers):
    server, model = servers("sam")
    image = task_models.images()[1]
    before = model._mask_decoder.num_encoded
    answer = post(server, image=f"data:image/png;base64,{text(image)}", points=POINTS, labels=LABELS).json()
    assert (answer["model"], answer["image_id"]) == ("tiny", model.image_id(image))
    assert_same(answer["data"], model.masks(image, points=POINTS, labels=LABELS))
    assert len(answer["data"]) == 3
    for body in ({"boxes": BOXES}, {"boxes": BOXES[:1], "points": POINTS}, {"points": POINTS[:1]}):
        again = post(server, image_id=answer["image_id"], mask_format="rle", **body).json()
        assert again["image_id"] == answer["image_id"]
        assert_same(again["data"], model.masks(image, **body))
    one = post(server, image=text(image), boxes=BOXES, multimask_output=False).json()
    assert_same(one["data"], model.masks(image, boxes=BOXES, multimask_output=False))
    assert len(one["data"]) == 2
    assert model._mask_decoder.num_encoded == before + 1
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["tasks"] == ["masks"]


def test_form_as_of_vllm_omni(servers):
    server, model = servers("sam")
    image = task_models.images()[0]
    fields = {"boxes": json.dumps(BOXES[:1]), "mask_format": "rle", "multimask_output": "false"}
    files = {"image": ("cat.png", png(image), "image/png")}
    answer = httpx.post(f"{server.url}{ROUTE}", data=fields, files=files, timeout=60)
    assert_same(answer.json()["data"], model.masks(image, boxes=BOXES[:1], multimask_output=False))
    for sent, named, param in (
        (fields | {"boxes": "[[1, 2"}, "image", "boxes"),
        (fields | {"boxes": "[[1, 2, 3]]"}, "image", "boxes"),
        (fields | {"threshold": "0.5"}, "image", "threshold"),
        (fields, "file", "image"),
        (fields | {"prompt": "a cat"}, "image", "prompt"),
    ):
        refused = httpx.post(f"{server.url}{ROUTE}", data=sent, files={named: files["image"]}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert httpx.post(f"{server.url}{ROUTE}", data=fields, timeout=60).status_code == 415  # no form with a file


def test_parts_by_the_labels_of_a_model(servers):
    server, model = servers("segformer")
    image = task_models.images()[0]
    expected = model.segment(image)
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text(image)}"}}
    answer = post(server, image=part).json()
    assert "image_id" not in answer
    assert [(row["label"], row["score"]) for row in answer["data"]] == [(each.label, each.score) for each in expected]
    for row, each in zip(answer["data"], expected, strict=True):
        assert (pixels_of(row["mask"]) == each.mask).mean() > 0.999
    for body, param in (
        ({"points": POINTS}, "points"),
        ({"image_id": "a"}, "image_id"),
        ({"threshold": 2.0}, "threshold"),
        ({"subtask": "panoptic"}, "subtask"),
    ):
        refused = post(server, image=part, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_bad_requests_name_their_field(servers):
    server, _ = servers("sam")
    image = text(task_models.images()[0])
    for body, param, message in (
        ({"points": POINTS}, "image", "image: expected one of image and image_id, got none"),
        ({"image": image, "image_id": "a", "points": POINTS}, "image", "got image and image_id"),
        ({"image_id": "a", "points": POINTS}, "image_id", "image_id: expected that of one of the last 8 images, got"),
        ({"image": image}, "points", "points: expected points or boxes for"),
        ({"image": image[:200], "points": POINTS}, "image", "image: expected an image as"),
        ({"image": "a cat", "points": POINTS}, "image", "image: expected base64"),
        ({"image": "http://127.0.0.1/cat.png", "points": POINTS}, "image", "remote files are not fetched"),
        ({"image": image, "points": [[1, 2, 3]]}, "points", "points: expected a list of (x, y) in pixels"),
        ({"image": image, "points": POINTS, "labels": [1]}, "labels", "labels: expected 1 (inside) or 0 (outside)"),
        ({"image": image, "points": POINTS, "boxes": BOXES}, "boxes", "boxes: expected one box with points"),
        ({"image": image, "points": [[1, 2]] * 65}, "points", "points: expected at most 64, got 65"),
        ({"image": image, "boxes": BOXES, "mask_format": "polygon"}, "mask_format", "expected 'png' or 'rle'"),
        (
            {"image": image, "boxes": BOXES, "subtask": "semantic"},
            "subtask",
            "which finds masks at points and in boxes",
        ),
        ({"image": image, "boxes": BOXES, "prompt": "a cat"}, "prompt", "prompt: expected none"),
        ({"image": image, "boxes": BOXES, "box_labels": [1, 0]}, "box_labels", "box_labels: expected none"),
        ({"image": image, "boxes": BOXES, "bboxes": BOXES}, "bboxes", "did you mean boxes?"),
    ):
        answer = post(server, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
    answer = post(servers("segformer")[0], image=image, model="other")
    assert answer.status_code == 404
    schema = httpx.get(f"{server.url}/openapi.json").json()
    assert set(schema["paths"][ROUTE]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    fields = schema["components"]["schemas"]["SegmentationRequest"]["properties"]
    assert {"image", "image_id", "points", "labels", "boxes", "mask_format"} <= set(fields) and "prompt" not in fields


def test_masks_of_more_boxes_than_there_is_memory_for(servers, monkeypatch):
    server, _ = servers("sam")
    monkeypatch.setattr(prompted_masks, "MAX_VALUES", 3 * 40 * 48 + 1)
    answer = post(server, image=text(task_models.images()[0]), boxes=BOXES)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "boxes")
    assert "expected at most 1 for an image of 40 x 48 pixels, got 2" in answer.json()["error"]["message"]


def test_run_lengths_are_those_of_pycocotools():
    y, x = np.mgrid[:40, :50]
    for mask, counts in (  # written by pycocotools 2.0.11
        (np.zeros((2, 3), bool), "6"),
        (np.ones((2, 3), bool), "06"),
        (np.eye(4, dtype=bool), "01400000"),
        ((y - 17) ** 2 + (x - 21) ** 2 < 150, "g;5P16K4M2N2N2O0O2O000O2O00000001N10001N101N2N2N3L5Jdc0"),
    ):
        assert run_lengths(mask) == {"size": list(mask.shape), "counts": counts}
        assert (pixels_of(run_lengths(mask)) == mask).all()
