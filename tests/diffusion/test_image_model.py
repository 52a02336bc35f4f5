"""`serve` of a pipeline's folder, `generate_image`, and ``torchax-serve draw``."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import PROMPT, copied, dit, flux, stable_diffusion
from typer.testing import CliRunner

from torchax_serve import (
    EngineOptions,
    ImageModel,
    InvalidArgumentError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
    serve,
)
from torchax_serve.cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = {"width": 32, "height": 32, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return stable_diffusion(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(eager, tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    eager.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    with serve(folder) as made:
        yield made


def pixels(image):
    return np.asarray(image, np.float32)


def test_image_of_a_folder_is_that_of_eager_pytorch(eager, model):
    assert isinstance(model, ImageModel)
    generator = torch.Generator().manual_seed(7)
    wanted = copied(eager)("a fox", generator=generator, guidance_scale=3.0, negative_prompt="blue", **SIZE).images[0]
    found = model.generate_image("a fox", seed=7, guidance_scale=3.0, negative_prompt="blue", **SIZE)
    assert found.size == (32, 32)
    assert np.abs(pixels(found) - pixels(wanted)).max() <= 1  # of 255: rounding


def test_seeds_batches_and_steps(model):
    one, again = (model.generate_image(PROMPT, seed=1, **SIZE) for _ in range(2))
    assert np.array_equal(pixels(one), pixels(again))
    assert not np.array_equal(pixels(one), pixels(model.generate_image(PROMPT, **SIZE)))
    assert len(model.generate_image([PROMPT, "snow"], seed=1, **SIZE)) == 2
    steps = []
    model.generate_image(PROMPT, seed=1, on_step=lambda *each: steps.append(each), **SIZE)
    assert steps == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 31}, "width: expected a multiple of 2 pixels, got 31; take 30 or 32"),
        ({"height": 0}, "height: expected a whole number >= 1, got 0"),
        ({"num_inference_steps": 1.5}, "num_inference_steps: expected a whole number >= 1, got 1.5"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"prompt": " "}, "prompt: expected a text, got an empty one"),
        ({"prompt": 3}, "prompt: expected a text or a list of texts, got 3"),
        ({"negative_prompt": 3}, "negative_prompt: expected a text or a list of texts, got 3"),
    ],
)
def test_bad_arguments(model, given, message):
    asked = {"prompt": PROMPT, **SIZE, **given}
    with pytest.raises(InvalidArgumentError) as error:
        model.generate_image(asked.pop("prompt"), **asked)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_what_diffusers_refuses_is_one_line(model):
    with pytest.raises(InvalidArgumentError, match="divisible by 8") as error:
        model.generate_image(PROMPT, width=36, height=32, num_inference_steps=1)
    assert "\n" not in str(error.value)


def test_unknown_arguments_and_other_pipelines(model, tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="temperature"):
        model.generate_image(PROMPT, temperature=1.0)
    with serve(dit(tmp_path)) as classes, pytest.raises(UnsupportedModelError, match="class_labels; call"):
        classes.generate_image(PROMPT)
    expected = pytest.raises(InvalidArgumentError, match="width: expected a multiple of 4 pixels, got 34")
    with serve(flux(tmp_path)) as packed, expected:
        packed.generate_image(PROMPT, width=34, height=32)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"engine": EngineOptions()}, "engine"),
        ({"quantization": "int8"}, "quantization"),
        ({"random_weights": True}, "random_weights"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"revision": "main"}, "revision"),
        ({"mesh": {"data": 1, "model": 1, "nodes": 1}}, "mesh"),
    ],
)
def test_arguments_of_language_models_are_refused(folder, given, name):
    with pytest.raises((UnsupportedArgumentError, InvalidArgumentError), match=f"^{name}: "):
        serve(folder, **given)


def test_closed_and_damaged(folder, tmp_path):
    model = serve(folder)
    model.close()
    with pytest.raises(TorchaxServeError, match="closed"):
        model.generate_image(PROMPT)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline", "unet": ["a", "b"]}')
    with pytest.raises(TorchaxServeError, match="expected a pipeline that diffusers can load") as error:
        serve(tmp_path)
    assert "\n" not in str(error.value)


def test_draw_writes_the_image_of_the_model(folder, model, tmp_path):
    output = tmp_path / "fox.png"
    options = ["--steps", "2", "--width", "32", "--height", "32", "--seed", "7", "--output", str(output)]
    done = CliRunner().invoke(app, ["draw", str(folder), PROMPT, *options])
    assert done.exit_code == 0, done.stderr
    assert "32 x 32 pixels" in done.stderr
    assert np.array_equal(pixels(Image.open(output)), pixels(model.generate_image(PROMPT, seed=7, **SIZE)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-folder", "a fox", "-o", "x.png"], "expected the hub id of a diffusers pipeline, or its folder"),
        (["{folder}", "a fox", "-o", "x.txt"], "--output: expected a name that ends with .png"),
        (["{folder}", "a fox", "-o", "no/such/x.png"], "--output: expected a folder that is there"),
        (["{folder}", " ", "-o", "{output}"], "prompt: expected a text"),
        (["{folder}", "a fox", "--mesh", "model=64", "-o", "{output}"], "mesh: expected at most the"),
    ],
)
def test_draw_refuses(folder, tmp_path, arguments, message):
    given = [each.format(folder=folder, output=tmp_path / "x.png") for each in arguments]
    done = CliRunner().invoke(app, ["draw", *given])
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_other_commands_name_draw(folder):
    done = CliRunner().invoke(app, ["run", str(folder), "Hello"])
    assert done.exit_code == 2
    assert "use torchax-serve draw" in done.stderr
