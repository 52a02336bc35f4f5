"""``/v1/images/generations`` by OpenAI's own client: the images of the model's own call."""

import base64
import io
import urllib.request

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from running_server import serving
from tiny_pipelines import PROMPT, dit, stable_diffusion

from torchax_serve import UnsafeImageError
from torchax_serve.cli.serve import _load
from torchax_serve.cli.shared.engine_options import EngineFlags
from torchax_serve.cli.shared.several_models import file_bytes

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = {"num_inference_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    stable_diffusion(tmp_path_factory.mktemp("tokenizer")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0) as found:
        yield found


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)), np.float32)


def post(server, **body):
    return httpx.post(f"{server.url}/v1/images/generations", json={"model": "tiny", **body}, timeout=60)


def test_images_are_those_of_the_model(served, client):
    _, model = served
    options = {"seed": 7, "negative_prompt": "blue", "guidance_scale": 3.0, **STEPS}
    answer = client.images.generate(model="tiny", prompt=PROMPT, n=2, size="32x24", extra_body=options)
    assert (answer.output_format, answer.size, answer.background) == ("png", "32x24", "opaque")
    for index, each in enumerate(answer.data):
        expected = model.generate_image(PROMPT, width=32, height=24, **(options | {"seed": 7 + index}))
        assert np.array_equal(pixels(base64.b64decode(each.b64_json)), np.asarray(expected, np.float32))
    (listed,) = client.models.list().data
    assert (listed.id, listed.tasks) == ("tiny", ["generate_image"])


def test_urls_have_the_image_in_them(client):
    options = {"seed": 1, **STEPS}
    own = client.images.generate(prompt=PROMPT, size="auto", response_format="b64_json", extra_body=options).data[0]
    url = client.images.generate(prompt=PROMPT, response_format="url", extra_body=options).data[0].url
    assert url.startswith("data:image/png;base64,")
    with urllib.request.urlopen(url) as file:
        assert np.array_equal(pixels(file.read()), pixels(base64.b64decode(own.b64_json)))


@pytest.mark.parametrize("form", ["jpeg", "webp"])
def test_other_forms_of_files(client, form):
    sizes = []
    for quality in (100, 1):
        answer = client.images.generate(
            prompt=PROMPT, output_format=form, output_compression=quality, extra_body={"seed": 1, **STEPS}
        )
        data = base64.b64decode(answer.data[0].b64_json)
        assert Image.open(io.BytesIO(data)).format == form.upper()
        sizes.append(len(data))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"size": "33x32"}, "size", "size: width: expected a multiple of 2 pixels, got 33; take 32 or 34"),
        ({"size": "big"}, "size", "size: expected auto or WIDTHxHEIGHT of at most 4096 pixels, got 'big'"),
        ({"size": "32x5000"}, "size", "size: expected auto or WIDTHxHEIGHT of at most 4096 pixels"),
        ({"n": 11}, "n", "n: expected a number from 1 to 10, got 11"),
        ({"n": 0}, "n", "n: expected a number from 1 to 10, got 0"),
        ({"seed": -1}, "seed", "seed: expected a whole number from 0"),
        ({"num_inference_steps": 1001}, "num_inference_steps", "num_inference_steps: expected a number from 1 to"),
        ({"prompt": " "}, "prompt", "prompt: expected a text, got an empty one"),
        ({"output_compression": 50}, "output_compression", "output_compression: expected output_format jpeg or webp"),
        ({"background": "transparent"}, "background", "background: expected auto; images are opaque"),
        ({"quality": "high"}, "quality", "quality: expected auto; write num_inference_steps"),
        ({"stream": True}, "stream", "stream: expected false"),
        ({"steps": 3}, "steps", "unknown field 'steps'"),
        ({"response_format": "png"}, "response_format", "response_format: expected 'b64_json' or 'url', got 'png'"),
    ],
)
def test_what_no_pipeline_does_is_refused_by_name(served, fields, param, message):
    answer = post(served[0], **{"prompt": PROMPT, **STEPS, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(message)


def test_fields_that_change_nothing_pass(client):
    answer = client.images.generate(
        prompt=PROMPT, quality="auto", background="auto", moderation="low", user="me", n=1, extra_body=STEPS
    )
    assert len(answer.data) == 1


def test_removed_images_are_errors_of_the_prompt(served, monkeypatch):
    server, model = served
    pipeline = model.pipeline
    seen = []

    def generate(prompt, **options):
        seen.append(prompt)
        raise UnsafeImageError("the pipeline's safety checker has removed the image; change the prompt or the seed")

    monkeypatch.setattr(type(model), "generate_image", lambda self, prompt, **options: generate(prompt, **options))
    answer = post(server, prompt=PROMPT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "content_policy_violation")
    assert seen == [PROMPT] and model.pipeline is pipeline


def test_a_request_that_nobody_waits_for_ends_behind_a_step(served, monkeypatch):
    server, model = served
    steps, own = [], type(model).generate_image

    def counted(self, prompt, *, on_step, **options):
        return own(self, prompt, on_step=lambda *each: (steps.append(each), on_step(*each)), **options)

    monkeypatch.setattr(type(model), "generate_image", counted)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/images/generations", json={"prompt": PROMPT, "num_inference_steps": 900}, timeout=0.5
        )
    assert post(server, prompt=PROMPT, **STEPS).status_code == 200  # the queue has one thread
    assert 0 < len(steps) < 900


def test_other_routes_name_the_kind_of_model(served):
    url = served[0].url
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/audio/speech", {"input": "Hi"}),
        ("/api/generate", {"model": "tiny", "prompt": "Hi"}),
    ):
        answer = httpx.post(f"{url}{path}", json=body)
        assert answer.status_code == 404 and "generate_image" in answer.text, path
    for path in ("/stats", "/metrics", "/api/tags", "/api/ps", "/readyz", "/openapi.json", "/load"):
        assert httpx.get(f"{url}{path}").status_code == 200, path
    assert (
        httpx.post(f"{url}/api/show", json={"model": "tiny"}).json()["details"]["family"] == "StableDiffusionPipeline"
    )


def test_pipelines_without_a_prompt_say_so(tmp_path):
    with serving(dit(tmp_path)) as (server, _):
        answer = post(server, prompt=PROMPT)
    assert answer.status_code == 400 and "class_labels" in answer.json()["error"]["message"]


def test_the_command_loads_a_pipeline_without_an_engine(folder):
    assert file_bytes(str(folder)) > 10_000
    with _load(str(folder), engine=EngineFlags()) as model:
        assert model.methods == ("generate_image",) and model.weight_counts()[0] > 10_000
    with pytest.raises(ValueError, match="--max-num-seqs: expected no option of the engine"):
        _load(str(folder), engine=EngineFlags(max_num_seqs=2))
