"""Labels, boxes, masks, depths and embeddings of images beside transformers' own pipelines."""

import asyncio

import jax
import numpy as np
import pytest
import task_models
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, SamProcessor, pipeline

from torchax_serve import DeadlineError, EngineOptions, InvalidArgumentError, UnsupportedModelError, VisionModel, serve
from torchax_serve.tasks.batches import run_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]
CANDIDATES = ["a cat", "the red dog", "mat"]


def pipeline_of(task, path, model, *, texts=False):
    tokenizer = AutoTokenizer.from_pretrained(path) if texts else None
    return pipeline(task, model=model, image_processor=AutoImageProcessor.from_pretrained(path), tokenizer=tokenizer)


def assert_same_labels(found, expected):
    assert [each.label for each in found] == [each["label"] for each in expected]
    np.testing.assert_allclose([e.score for e in found], [e["score"] for e in expected], atol=1e-4)


def assert_same_boxes(found, expected):
    assert_same_labels(found, expected)
    assert [vars(each.box) for each in found] == [each["box"] for each in expected]


def test_bundle_of_a_head(folders, tmp_path):
    path, eager = folders("vit")
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = eager(pixels).logits.numpy()
    with serve(path) as served:
        plan = served.plan()
        num_weights = sum(each.numel() for each in eager.parameters())
        assert (plan.weight_bytes, plan.argument_bytes) == (4 * num_weights, 4 * 3 * 32 * 32)
        products = 16 * 192 * 32 + 2 * 17 * (4 * 32 * 32 + 2 * 32 * 48 + 2 * 17 * 32)  # of patches, and of two layers
        assert 2 * products < plan.flops < 3 * products  # activations and norms count, too
        version = served.export(tmp_path / "bundle", engine=EngineOptions(max_num_seqs=4), native=False)
        with pytest.raises(InvalidArgumentError, match="patches"):
            served.export(tmp_path / "other", inputs={"patches": pixels.numpy()})
    with serve(version) as bundle:
        found = bundle(pixel_values=pixels.numpy())
    np.testing.assert_allclose(found["logits"], wanted, atol=1e-5)


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_bundle_of_a_quantized_head(folders, tmp_path, preset):
    path, eager = folders("vit")
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = eager(pixels).logits.numpy()
    with serve(path, quantization=preset) as served:
        wanted = served.infer({"pixel_values": pixels.numpy()})["logits"]
        plan = served.plan()
        version = served.export(tmp_path / "bundle", engine=EngineOptions(max_num_seqs=4), reference=False)
        with pytest.raises(InvalidArgumentError, match=r"platforms: expected cpu, .* got h100"):
            served.export(tmp_path / "other", platforms=["cuda:h100"])
    assert plan.weight_bytes < 0.7 * 4 * sum(each.numel() for each in eager.parameters())
    with serve(version) as bundle:
        found = bundle(pixel_values=pixels.numpy())["logits"]
        assert preset in bundle.manifest["model"]["quantization"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert 1e-4 < np.abs(found - dense).max() < (0.1 if preset == "int8" else 1.0)
    files = [tmp_path / "bundle" / "1" / "weights.safetensors", path / "model.safetensors"]
    assert files[0].stat().st_size < 0.7 * files[1].stat().st_size


def test_classify_images(folders):
    path, eager = folders("vit")
    theirs = pipeline_of("image-classification", path, eager)
    images = task_models.images()
    with serve(path) as served:
        assert type(served) is VisionModel and served.methods == ("classify_images", "embed_images")
        for found, expected in zip(served.classify_images(images), theirs(images), strict=True):
            assert_same_labels(found, expected)
        assert_same_labels(served.classify_images(images[0], top_k=1), theirs(images[0], top_k=1))
        assert_same_labels(asyncio.run(served.aclassify_images(images[1])), theirs(images[1]))
        forwards = served.runtime.steps.forward
        assert forwards.num_programs == 2  # of 4 rows, and of 1
        served.classify_images(images * 2 + images[:2])
        served.classify_images(images + images[:1])
        assert forwards.num_programs == 3  # of 8 rows
        with pytest.raises(DeadlineError):
            served.classify_images(images, timeout_s=1e-9)
        with pytest.raises(UnsupportedModelError, match=r"detect: .*, whose methods are classify_images, embed_images"):
            served.detect(images)
        with pytest.raises(InvalidArgumentError, match=r"labels: expected none for a model with labels of its own"):
            served.classify_images(images, labels=["cat"])
        with pytest.raises(UnsupportedModelError, match="embed: expected a model that reads texts"):
            served.embed("cat")


def test_embed_images(folders):
    path, eager = folders("vit")
    processor = AutoImageProcessor.from_pretrained(path)
    images = task_models.images()
    with torch.no_grad():
        hidden = eager.vit(**processor(images, return_tensors="pt")).last_hidden_state.numpy()
    with serve(path) as served:
        np.testing.assert_allclose(served.embed_images(images, pooling="cls"), hidden[:, 0], atol=1e-4)
        mean = served.embed_images(images[0], pooling="mean", normalize=True)
        np.testing.assert_allclose(mean, hidden[0].mean(0) / np.linalg.norm(hidden[0].mean(0)), atol=1e-4)
        with pytest.raises(UnsupportedModelError, match="pooling: expected a model with a pooler"):
            served.embed_images(images)
        with pytest.raises(InvalidArgumentError, match="pooling: expected one of pooler, cls, mean"):
            served.embed_images(images, pooling="last")


def test_images_and_labels_in_words(folders):
    path, eager = folders("clip")
    theirs = pipeline_of("zero-shot-image-classification", path, eager, texts=True)
    processor = AutoImageProcessor.from_pretrained(path)
    images = task_models.images()
    with torch.no_grad():
        features = eager.get_image_features(**processor(images, return_tensors="pt")).pooler_output
    with serve(path) as served:
        for image, found in zip(images, served.classify_images(images, labels=CANDIDATES), strict=True):
            assert_same_labels(found, theirs(image, candidate_labels=CANDIDATES))
        found = served.classify_images(images[0], labels=CANDIDATES, template="the {}", top_k=2)
        assert_same_labels(found, theirs(images[0], candidate_labels=CANDIDATES, hypothesis_template="the {}")[:2])
        np.testing.assert_allclose(served.embed_images(images), features.numpy(), atol=1e-4)
        with pytest.raises(InvalidArgumentError, match=r"labels: expected texts for .*; give labels="):
            served.classify_images(images)


def test_detect(folders):
    path, eager = folders("detr")
    theirs = pipeline_of("object-detection", path, eager)
    images = task_models.images()
    with serve(path) as served:
        for image, found in zip(images, served.detect(images, threshold=0.2), strict=True):
            assert found
            assert_same_boxes(found, theirs(image, threshold=0.2))
        assert served.runtime.steps.forward.num_programs == 2  # two images of one shape, and one of another


@pytest.mark.thorough
def test_detect_what_words_say(folders):
    path, eager = folders("owlvit")
    theirs = pipeline_of("zero-shot-object-detection", path, eager, texts=True)
    images = task_models.images()
    with serve(path) as served:
        for image, found in zip(images, served.detect(images, labels=CANDIDATES, threshold=0.3), strict=True):
            assert_same_boxes(found, theirs(image, candidate_labels=CANDIDATES, threshold=0.3))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["segformer", "detr_panoptic"])
def test_segment(folders, name):
    path, eager = folders(name)
    theirs = pipeline_of("image-segmentation", path, eager)
    image = task_models.images()[0]
    options = {"threshold": 0.2, "mask_threshold": 0.2, "overlap_mask_area_threshold": 0.0}
    with serve(path) as served:
        found, expected = served.segment(image, **options), theirs(image, **options)
        assert found and [(e.label, e.score and round(e.score, 4)) for e in found] == [
            (e["label"], e["score"] and round(e["score"], 4)) for e in expected
        ]
        for one, other in zip(found, expected, strict=True):
            assert one.mask.shape == (48, 40) and (one.mask == (np.asarray(other["mask"]) > 0)).mean() > 0.999
        if name == "segformer":
            with pytest.raises(InvalidArgumentError, match=r"subtask: expected semantic, which .* has, got 'instance'"):
                served.segment(image, subtask="instance")


@pytest.mark.thorough
def test_depth(folders):
    path, eager = folders("glpn")
    theirs = pipeline_of("depth-estimation", path, eager)
    image = task_models.images()[1]
    with serve(path) as served:
        found, expected = served.depth(image), theirs(image)
        np.testing.assert_allclose(found.values, expected["predicted_depth"].numpy(), atol=1e-3)
        assert found.picture.size == expected["depth"].size == image.size


def test_unusual_images(folders, tmp_path, caplog):
    path, eager = folders("vit")
    theirs = pipeline_of("image-classification", path, eager)
    image = task_models.images()[0]
    grey = Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16) << 8) + 255)
    grey.save(tmp_path / "16bits.png")
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.save(tmp_path / "moves.gif", save_all=True, append_images=[image.rotate(90)])
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=turned)
    with serve(path) as served:
        assert_same_labels(served.classify_images(Image.new("RGB", (1, 1))), theirs(Image.new("RGB", (1, 1))))
        assert_same_labels(served.classify_images(tmp_path / "16bits.png"), theirs(image.convert("L")))
        assert_same_labels(served.classify_images(str(tmp_path / "cmyk.jpg")), theirs(str(tmp_path / "cmyk.jpg")))
        assert_same_labels(served.classify_images(tmp_path / "turned.png"), theirs(image.rotate(-90, expand=True)))
        assert_same_labels(served.classify_images(np.asarray(image)), theirs(image))
        with Image.open(tmp_path / "moves.gif") as moves:
            first = moves.convert("RGB")
        assert_same_labels(served.classify_images(tmp_path / "moves.gif"), theirs(first))
    assert "images: the first of 2 frames of an animation is read" in caplog.messages


def bad_images(folder):
    data = (folder / "image.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "text.png").write_text("I am an image")
    Image.new("1", (10_000, 6_000)).save(folder / "large.png")
    Image.new("F", (4, 4)).save(folder / "floats.tiff")
    yield folder / "large.png", r"^images: expected 1 to 50,000,000 pixels, got 10000 x 6000; make it smaller$"
    yield folder / "floats.tiff", "^image: expected 8 or 16 bits for each channel, got an image of mode 'F'"
    yield folder / "cut.png", "damaged or cut off"
    yield folder / "text.png", "which is something else"
    yield folder / "missing.png", "expected a file that is there"
    yield Image.new("1", (10_000, 6_000)), r"expected 1 to 50,000,000 pixels, got 10000 x 6000"
    yield Image.new("F", (4, 4)), "got an image of mode 'F'"
    yield 5, "expected a path, a PIL image or an array of pixels, got int"
    yield np.zeros((8, 8, 3), np.float32), r"expected pixels uint8\[height, width, 3\], got float32\[8, 8, 3\]"
    yield [], "expected at least one image, got none"


def test_bad_images(folders, tmp_path):
    task_models.images()[0].save(tmp_path / "image.png")
    with serve(folders("vit")[0]) as served:
        for value, message in bad_images(tmp_path):
            with pytest.raises(InvalidArgumentError, match=message) as caught:
                served.classify_images(value)
            assert "\n" not in str(caught.value)


def test_inputs_that_the_device_does_not_compute():
    def forward(batch):
        raise jax.errors.JaxRuntimeError("INTERNAL: operation failed: error\nmore")

    message = (
        r"^input: .*, got pixel_values \[1, 3, 8, 8\], on which it fails \(INTERNAL: .* error\); give a smaller one$"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        run_batches([{"pixel_values": torch.zeros(1, 3, 8, 8)}], forward)


def test_a_missing_processor(folders, tmp_path):
    _, eager = folders("vit")
    eager.save_pretrained(tmp_path)
    with serve(tmp_path) as served, pytest.raises(InvalidArgumentError, match="has no image processor"):
        served.classify_images(task_models.images())


@pytest.mark.thorough
def test_masks_of_prompts(folders):
    path, eager = folders("sam")
    processor = SamProcessor(AutoImageProcessor.from_pretrained(path))
    image = task_models.images()[1]

    def theirs(*, multimask_output=True, **prompts):
        inputs = processor(image, return_tensors="pt", **prompts)
        with torch.no_grad():
            output = eager(**inputs, multimask_output=multimask_output)
        masks = processor.post_process_masks(
            output.pred_masks, inputs["original_sizes"], inputs["reshaped_input_sizes"]
        )
        return masks[0].numpy(), output.iou_scores[0].numpy()

    boxes = [[5, 4, 30, 20], [30, 10, 60, 30]]
    with serve(path) as served:
        for found, (masks, scores) in (
            (served.masks(image, points=[(20, 10), (40, 20)]), theirs(input_points=[[[20, 10], [40, 20]]])),
            (served.masks(image, boxes=boxes), theirs(input_boxes=[boxes])),
            (asyncio.run(served.amasks(image, boxes=boxes[0])), theirs(input_boxes=[boxes[:1]])),
            (
                served.masks(image_id=served.image_id(image), boxes=boxes, multimask_output=False),
                theirs(input_boxes=[boxes], multimask_output=False),
            ),
        ):
            for objects, of_masks, of_scores in zip(found, masks, scores, strict=True):
                np.testing.assert_allclose([e.score for e in objects], -np.sort(-of_scores), atol=1e-4)
                for each, index in zip(objects, np.argsort(-of_scores, kind="stable"), strict=True):
                    assert each.mask.shape == (32, 64) and (each.mask == of_masks[index]).mean() > 0.999
        assert served._mask_decoder.num_encoded == 1
        served.torch_model.load_state_dict(eager.state_dict(), assign=True)
        served.masks(image, boxes=boxes)
        assert served._mask_decoder.num_encoded == 2  # an embedding of other weights is not kept
        for prompts, message in [
            ({}, "masks: expected points or boxes, got none"),
            ({"points": [1, 2]}, r"points: expected a list of \(x, y\) in pixels"),
            ({"points": [(1, 2)], "labels": [2]}, "labels: expected 1"),
            ({"points": [(1, 2)], "boxes": boxes}, "boxes: expected one box with points"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.masks(image, **prompts)
