"""Labels and embeddings of files, and speech, over HTTP: those of the model's own calls."""

import base64
import contextlib
import io

import httpx
import numpy as np
import openai
import pytest
import soundfile
import task_models
from PIL import Image
from running_server import serving

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Starts a server of a model of `task_models`, once."""
    found = {}

    def of(name):
        if name not in found:
            path = tmp_path_factory.mktemp(name)
            getattr(task_models, name)(path)
            found[name] = opened.enter_context(serving(path))
        return found[name]

    with contextlib.ExitStack() as opened:
        yield of


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return base64.b64encode(file.getvalue()).decode()


def image_part(image, **options):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(image, **options)}"}}


def wav(samples, rate):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return base64.b64encode(file.getvalue()).decode()


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def test_labels_of_images(servers):
    server, model = servers("vit")
    images = task_models.images()
    expected = model.classify_images(images, top_k=None)
    forms = [{"content": [image_part(images[0])]}, {"multimodal_data": [png(images[1])]}, image_part(images[2])]
    forms[1]["prompt_string"] = "<__media__>"
    answer = post(server, "/classify", input=forms).json()
    names = list(model.config.id2label.values())
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    for row, labels in zip(answer["data"], expected, strict=True):
        scores = {each.label: each.score for each in labels}
        assert row["label"] == labels[0].label and row["labels"] == names and row["num_classes"] == 3
        np.testing.assert_allclose(row["probs"], [scores[name] for name in names], atol=1e-5)
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["tasks"] == ["classify", "embed"]


def test_images_are_turned_once(servers, tmp_path):
    server, model = servers("vit")
    exif = Image.Exif()
    exif[0x0112] = 6
    image = task_models.images()[0]
    image.save(tmp_path / "turned.png", exif=exif)
    expected = {each.label: each.score for each in model.classify_images(tmp_path / "turned.png")}
    row = post(server, "/classify", input=image_part(image, exif=exif)).json()["data"][0]
    np.testing.assert_allclose(row["probs"], [expected[name] for name in row["labels"]], atol=1e-5)


def test_embeddings_of_images(servers):
    server, model = servers("vit")
    images = task_models.images()[:2]
    expected = model.embed_images(images, pooling="mean", normalize=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options = {"pooling": "mean", "normalize": True, "input": [image_part(each) for each in images]}
        answer = client.embeddings.create(model="tiny", input="", encoding_format="float", extra_body=options)
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)


def test_labels_of_sound(servers):
    server, model = servers("wav2vec")
    tone, _ = task_models.sounds()
    expected = {each.label: each.score for each in model.classify_audio(tone, sampling_rate=16_000)}
    part = {"type": "input_audio", "input_audio": {"data": wav(tone, 16_000), "format": "wav"}}
    for form in (part, {"multimodal_data": [wav(tone, 16_000)]}):
        row = post(server, "/classify", input=form).json()["data"][0]
        np.testing.assert_allclose(row["probs"], [expected[name] for name in row["labels"]], atol=1e-5)


def test_speech(servers):
    server, model = servers("vits")
    expected = model.speak("a small cat", seed=3, speaker=1).samples
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for form, tolerance in (("wav", 1e-4), ("flac", 1e-4), ("pcm", 1e-4), ("mp3", None), ("opus", None)):
            answer = client.audio.speech.create(
                model="tiny", voice="1", input="a small cat", response_format=form, extra_body={"seed": 3}
            )
            if form == "pcm":
                samples, rate = (
                    np.frombuffer(answer.content, "<i2") / 32767,
                    int(answer.response.headers["x-sample-rate"]),
                )
            else:
                samples, rate = soundfile.read(io.BytesIO(answer.content))
            assert rate == 16_000 and len(samples)
            if tolerance is not None:
                np.testing.assert_allclose(samples, np.clip(expected, -1, 1), atol=tolerance)
        answer = client.audio.speech.create(
            model="tiny", voice="default", input="a small cat", speed=2.0, response_format="wav", extra_body={"seed": 3}
        )
        quick = model.speak("a small cat", seed=3, speaking_rate=2.0 * model.config.speaking_rate).samples
        assert len(soundfile.read(io.BytesIO(answer.content))[0]) == len(quick)


def test_bad_files(servers):
    images = task_models.images()
    cut = png(images[0])[:200]
    tone, _ = task_models.sounds()
    of_images = [
        ("a cat", "input: expected files, as"),
        ([[1, 2]], "input: expected files, as"),
        ({"type": "text", "text": "a cat"}, "input: expected files of type image, got text"),
        ({"multimodal_data": [cut]}, r"input[0]: expected an image as"),
        ({"multimodal_data": ["I am an image"]}, "input[0]: expected base64"),
        ({"multimodal_data": [base64.b64encode(b"I am an image").decode()]}, r"input[0]: expected an image as"),
        ({"multimodal_data": [wav(tone, 16_000)]}, "input: expected files of type image, got audio"),
        ({"content": [image_part(images[0]), image_part(images[1])]}, "expected one part with a file"),
        ({"type": "image_url", "image_url": "http://127.0.0.1/cat.png"}, "remote files are not fetched"),
        (image_part(Image.new("1", (10_000, 6_000))), "expected at most 50000000 pixels, got 10000 x 6000"),
    ]
    silence = np.full(1600, np.nan, np.float32)
    of_sound = [
        ({"multimodal_data": [wav(silence, 16_000)]}, "expected samples that are finite numbers"),
        (image_part(images[0]), "input: expected files of type audio, got image"),
    ]
    for name, cases in (("vit", of_images), ("wav2vec", of_sound)):
        for given, message in cases:
            answer = post(servers(name)[0], "/classify", input=given)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "input"), error
            assert message in error["message"]
    for body, param in [
        ({"input": image_part(images[0]), "labels": ["cat"]}, "labels"),
        ({"input": image_part(images[0]), "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ]:
        answer = post(servers("vit")[0], "/classify", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for body, param in [
        ({"input": "a cat", "voice": "alloy"}, "voice"),
        ({"input": "a cat", "voice": "2"}, "voice"),
        ({"input": "a cat", "speed": 9.0}, "speed"),
        ({"input": "a cat", "response_format": "aac"}, "response_format"),
        ({"input": "a cat", "instructions": "sing"}, "instructions"),
        ({"input": ""}, "input"),
    ]:
        answer = post(servers("vits")[0], "/v1/audio/speech", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    answer = post(servers("vit")[0], "/v1/audio/speech", input="a cat")
    assert answer.status_code == 404 and "expected a model that speaks" in answer.json()["error"]["message"]
