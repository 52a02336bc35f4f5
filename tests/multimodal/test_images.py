"""A checkpoint of images and text through the public functions, beside eager PyTorch, and what is refused."""

import dataclasses
import io
import json

import llava_folder
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from torchax_serve import SamplingParams, serve
from torchax_serve.multimodal import processor_of
from torchax_serve.multimodal.images import checked_image
from torchax_serve.multimodal.placeholders import check_has_media

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
TEXT = "USER: <image> What is this ? ASSISTANT:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(scope="module")
def eager(folder):
    return llava_folder.make(folder)


@pytest.fixture(scope="module")
def model(eager, folder):
    with serve(folder) as served:
        yield served


@pytest.fixture(scope="module")
def processor(model):
    return processor_of(model)


def picture(seed=0, size=(30, 20)):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def inputs_of(processor, text=TEXT, **kwargs):
    return processor(text=text, images=kwargs.pop("images", picture()), return_tensors="pt", **kwargs)


def test_tokens_match_eager_pytorch(model, eager, processor):
    inputs = inputs_of(processor)
    ours = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, eager.generate(**inputs, max_new_tokens=12, do_sample=False))
    traces = model.torch_model._jax_runtime.steps.num_traces
    assert traces["decode"] == 1  # the fast loop, and one program for all tokens
    assert traces["method"] == 1  # the encoder


def test_another_image_of_the_same_size_compiles_nothing(model, eager, processor):
    model.generate(**inputs_of(processor), max_new_tokens=3)
    before = dict(model.torch_model._jax_runtime.steps.num_traces)
    inputs = inputs_of(processor, images=picture(7))
    ours = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(ours, eager.generate(**inputs, max_new_tokens=3, do_sample=False))
    assert dict(model.torch_model._jax_runtime.steps.num_traces) == before


def test_left_padded_batch(model, eager, processor):
    processor.tokenizer.padding_side = "left"
    texts = [TEXT, "USER: <image> What ? ASSISTANT:"]
    inputs = inputs_of(processor, texts, images=[picture(1), picture(2)], padding=True)
    ours = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, eager.generate(**inputs, max_new_tokens=6, do_sample=False))


def test_beams_and_logits(model, eager, processor):
    inputs = inputs_of(processor)
    beams = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **beams), eager.generate(**inputs, **beams))
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, eager(**inputs).logits, atol=1e-4, rtol=0)


def test_chat_sees_the_image(model, processor):
    def asked(image):
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is this ?"}]
        return model.chat([{"role": "user", "content": content}], SamplingParams(max_new_tokens=8, temperature=0))

    inputs = inputs_of(processor, "USER: <image> What is this ? ASSISTANT:")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert asked(picture()) == model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(asked(picture(size=(1, 1))), str)
    with pytest.raises(InvalidArgumentError, match="expected an image of 1 to 100,000,000 pixels, got 20000x20000"):
        asked(Image.new("1", (20_000, 20_000)))
    with pytest.raises(InvalidArgumentError, match="expected messages, images and audio that the processor"):
        asked("nowhere.png")


def test_chat_about_images_as_a_stream(model):
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "What ?"}]}
    ]
    params = SamplingParams(max_new_tokens=8, temperature=0)
    whole = model.chat(messages, params)
    stream = model.chat(messages, params, stream=True)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    assert (stream.stats.finish_reason, stream.stats.new_tokens) == ("length", 8)
    stop = whole[len(whole) // 2 :][:3]
    assert model.chat(messages, dataclasses.replace(params, stop=[stop])) == whole[: whole.index(stop)]
    sampled = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    assert model.chat(messages, sampled) == "".join(model.chat(messages, sampled, stream=True))


def test_closed_stream_about_images(model):
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "What ?"}]}
    ]
    with model.chat(messages, SamplingParams(max_new_tokens=60, temperature=0), stream=True) as stream:
        next(stream)
    assert stream.stats.finish_reason == "abort"
    assert stream.stats.new_tokens < 60
    assert model.chat(messages, SamplingParams(max_new_tokens=4, temperature=0))


def test_one_answer_about_images(model):
    messages = [{"role": "user", "content": [{"type": "image", "image": picture()}]}]
    for stream in (False, True):
        with pytest.raises(UnsupportedArgumentError, match="n: expected one answer"):
            model.chat(messages, SamplingParams(n=2, temperature=1.0), stream=stream)


def test_beams_in_the_generation_config(model, processor, monkeypatch):
    inputs = inputs_of(processor, "USER: <image> What is this ? ASSISTANT:")
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, num_beams=2)[0, inputs["input_ids"].shape[1] :]
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "What is this ?"}]
    answer = model.chat([{"role": "user", "content": content}], SamplingParams(max_new_tokens=5))
    assert answer == model.tokenizer.decode(tokens, skip_special_tokens=True)


def test_placeholders_that_do_not_fit(model, processor):
    inputs = dict(inputs_of(processor))
    two = torch.cat([inputs["pixel_values"]] * 2)
    for call in (model, model.generate):
        with pytest.raises(InvalidArgumentError, match="for each feature of the images, got 16 of"):
            call(**{**inputs, "pixel_values": two})
    text = dict(processor.tokenizer("USER: What is this ?", return_tensors="pt"))
    text.pop("token_type_ids", None)
    with pytest.raises(InvalidArgumentError, match="got 0 of them"):
        model.generate(**text, pixel_values=inputs["pixel_values"])


def test_placeholders_without_an_image(model, processor):
    ids = inputs_of(processor)["input_ids"]
    with pytest.raises(InvalidArgumentError, match="expected images for the placeholder tokens 3 of the prompt, got"):
        model.generate(input_ids=ids)
    with pytest.raises(InvalidArgumentError, match="expected images for the placeholder tokens"):
        list(model.iter_tokens(ids[0].tolist()))


def test_a_processor_without_images(folder, eager, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with (
        serve(tmp_path, random_weights=True) as model,
        pytest.raises(UnsupportedModelError, match="expected a processor next to the weights"),
    ):
        processor_of(model)
    for file in folder.iterdir():
        if "token" in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "NoSuchProcessor"}))
    with serve(tmp_path, random_weights=True) as model, pytest.raises((UnsupportedModelError, CheckpointError)) as said:
        processor_of(model)
    assert "processor" in str(said.value)


def test_sizes():
    checked_image(Image.new("1", (1, 1)))
    checked_image("a/path.png")
    with pytest.raises(InvalidArgumentError, match="got 0x3"):
        checked_image(Image.new("1", (0, 3)))


def test_one_placeholder_of_images_and_videos_is_met_by_either():
    config = transformers.Molmo2Config(image_patch_id=7)  # which is its token of videos as well
    assert config.image_token_id == config.video_token_id == 7
    for name in ("pixel_values", "pixel_values_videos"):
        check_has_media(config, [7], ["input_ids", name])
    with pytest.raises(InvalidArgumentError, match="expected images for the placeholder tokens 7"):
        check_has_media(config, [7], ["input_ids"])


def test_a_model_of_videos_alone_may_call_their_frames_pixels():
    config = transformers.InstructBlipVideoConfig(video_token_index=7)
    check_has_media(config, [7], ["input_ids", "pixel_values"])
    for names in (["input_ids"], ["input_ids", "input_features"]):
        with pytest.raises(InvalidArgumentError, match="expected videos for the placeholder tokens 7"):
            check_has_media(config, [7], names)


def test_images_of_16_bits_are_scaled_and_not_cut_off():
    pixels = np.array([[0, 256, 300], [40_000, 65_535, 128]], np.uint16)
    for dtype in ("<u2", ">u2"):
        found = checked_image(Image.fromarray(pixels.astype(dtype)))
        assert np.asarray(found.convert("RGB"))[..., 0].tolist() == (pixels // 256).tolist()
    for mode in ("RGBA", "P", "CMYK", "LA", "1"):
        assert checked_image(image := Image.new(mode, (2, 2))) is image


def test_images_that_no_processor_reads_right():
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    for image, said in (
        (Image.open(file), "expected a still image, got an animation of 2 frames"),
        (Image.new("F", (2, 2)), "expected 8 or 16 bits for each channel, got an image of mode 'F'"),
        (Image.new("I", (2, 2)), "of mode 'I'"),
        (np.full((2, 2, 3), np.nan), "expected finite numbers"),
        (np.zeros((2, 0, 3), np.uint8), "got 0x2"),
        (np.zeros((2, 2, 2, 2)), r"got float64\[2, 2, 2, 2\]"),
        (np.zeros((2, 2), bool), r"got bool\[2, 2\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=said) as caught:
            checked_image(image)
        assert "\n" not in str(caught.value)
    for shape in ((2, 3), (2, 3, 3), (3, 2, 3)):
        assert checked_image(array := np.zeros(shape, np.uint8)) is array
