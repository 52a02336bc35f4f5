"""Pipelines of the hub, against a look-alike of it on this machine."""

import shutil

import hub_lookalike
import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image
from tiny_pipelines import PROMPT, stable_diffusion
from typer.testing import CliRunner

from torchax_serve import CheckpointError, ImageModel, ModelNotFoundError, UnsupportedArgumentError, serve
from torchax_serve.cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "people/draws"
SIZE = {"width": 32, "height": 32, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("repository")
    stable_diffusion(tmp_path_factory.mktemp("tokenizer")).save_pretrained(path)
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, path / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    shutil.copy(weights, path / "all-in-one.safetensors")
    (path / "README.md").write_text("not needed")
    return path


@pytest.fixture(scope="module")
def server():
    with hub_lookalike.serving() as hub:
        yield hub


@pytest.fixture
def hub(server, folder, monkeypatch, tmp_path):
    server.repositories.clear()
    server.requests.clear()
    server.status = None
    hub_lookalike.point_at(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    server.repositories[NAME] = hub_lookalike.Repository(folder)
    return server


def pixels(image):
    return np.asarray(image, np.float32)


def test_a_pipeline_is_downloaded_once_and_drawn(hub, folder, tmp_path):
    with serve(folder) as here:
        wanted = pixels(here.generate_image(PROMPT, seed=7, **SIZE))
    with serve(NAME) as model:
        assert isinstance(model, ImageModel)
        assert model.name == NAME
        assert np.array_equal(pixels(model.generate_image(PROMPT, seed=7, **SIZE)), wanted)
    fetched = hub.fetched()
    assert len(fetched) == len(set(fetched)), "a file was downloaded twice"
    for name in ("model_index.json", "unet/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"):
        assert name in fetched
    assert not {"all-in-one.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors", "README.md"} & set(fetched)

    hub.requests.clear()
    output = tmp_path / "fox.png"
    options = ["--steps", "1", "--width", "32", "--height", "32", "--seed", "7", "--output", str(output)]
    done = CliRunner().invoke(app, ["draw", NAME, PROMPT, *options])
    assert done.exit_code == 0, done.stderr
    assert np.array_equal(pixels(Image.open(output)), wanted)
    assert hub.fetched() == []

    hub.status = 503  # away: the cached copy counts
    serve(NAME).close()
    hub.requests.clear()
    serve(NAME, local_files_only=True).close()
    assert hub.requests == []
    done = CliRunner().invoke(app, ["run", NAME, "Hello"])
    assert done.exit_code == 2
    assert "use torchax-serve draw" in done.stderr


def refused(name, *parts, error=CheckpointError, **options):
    with pytest.raises(error) as caught:
        serve(name, **options)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_what_is_refused(hub, folder, tmp_path):
    refused("people/none", "has no model people/none", error=ModelNotFoundError)
    refused(NAME, "has no revision 'v2'", error=ModelNotFoundError, revision="v2")
    refused(NAME, "adapter: expected none with a pipeline", error=UnsupportedArgumentError, adapter="x")
    refused(NAME, "adapters: expected none with a pipeline", error=UnsupportedArgumentError, adapters={"a": "x"})
    refused(folder, "revision: expected none with the folder", error=UnsupportedArgumentError, revision="main")
    hub.repositories[NAME].token = "secret"
    refused(NAME, "is gated and no token was given", error=ModelNotFoundError)

    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (pickled / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    (pickled / "unet" / "diffusion_pytorch_model.safetensors").rename(pickled / "unet" / "diffusion_pytorch_model.bin")
    hub.repositories["people/pickled"] = hub_lookalike.Repository(pickled)
    refused("people/pickled", "people/pickled/unet are pickle files", "allow_pickle=True")


@pytest.mark.parametrize(
    "command", [["run", NAME, "Hello"], ["embed", NAME, "Hello"], ["profile", NAME], ["pull", NAME]]
)
def test_commands_of_language_models_name_a_pipeline_that_is_not_here(hub, command):
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert f"model: expected one of transformers, got {NAME}, a pipeline of diffusers; use torchax-serve draw" in (
        " ".join(done.stderr.split())
    )
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_draw_names_what_is_no_pipeline(hub, folder, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{}")
    hub.repositories["people/text"] = hub_lookalike.Repository(tmp_path / "text")
    output = ["--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(app, ["draw", "people/text", PROMPT, *output])
    assert done.exit_code != 0
    assert "people/text holds no model_index.json, so it is not a pipeline of diffusers" in done.stderr
    assert "Traceback" not in done.stderr
    done = CliRunner().invoke(app, ["draw", str(folder), PROMPT, "--revision", "main", *output])
    assert done.exit_code == 2
    assert "--revision: expected with a hub id" in done.stderr
