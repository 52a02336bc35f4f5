"""Labels and embeddings of files, and speech, over HTTP: those of the model's own calls."""

import base64
import gzip
import io
import json
import zlib

import httpx
import numpy as np
import openai
import pytest
import soundfile
import task_models
import torch
from PIL import Image

from torchax_serve.server.speech import sentences

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


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


def test_embeddings_of_images_in_the_form_of_cohere(servers):
    server, model = servers("clip")
    images = task_models.images()[:2]
    expected = model.embed_images(images)
    urls = [image_part(each)["image_url"]["url"] for each in images]
    inputs = [{"content": [image_part(each)]} for each in images]
    for body in ({"images": urls}, {"inputs": inputs, "input_type": "image"}):
        answer = post(server, "/v2/embed", **body).json()
        np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=1e-5)
    for body, param in (({"texts": ["a cat"]}, "texts"), ({"images": urls, "max_tokens": 3}, "max_tokens")):
        answer = post(server, "/v2/embed", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = post(servers("vit")[0], "/v2/embed", images=urls)  # a classifier without a pooler
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "images")


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_speech_of_a_voice(servers):
    server, model = servers("speecht5")
    voice = np.random.default_rng(0).normal(size=12).astype(np.float32)
    expected = model.speak("the cat sat", seed=3, speaker_embedding=voice).samples
    asked = {"input": "the cat sat", "seed": 3, "response_format": "wav", "speaker_embedding": voice.tolist()}
    samples, _ = soundfile.read(io.BytesIO(post(server, "/v1/audio/speech", **asked, speed=1.0).content))
    np.testing.assert_allclose(samples, np.clip(expected, -1, 1), atol=1e-4)
    for change, param in ({"speaker_embedding": None}, "speaker_embedding"), ({"speed": 2.0}, "speed"):
        answer = post(server, "/v1/audio/speech", **asked | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


SENTENCES = ["a small cat sat here.", "the cat ran away today!"]


def test_streamed_speech_is_that_of_its_sentences(servers):
    server, model = servers("vits")
    spoken = [model.speak(each, seed=3).samples for each in SENTENCES]
    expected = np.clip(np.concatenate(spoken), -1, 1)
    asked = {"model": "tiny", "voice": "default", "input": " ".join(SENTENCES), "extra_body": {"seed": 3}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        streaming = client.audio.speech.with_streaming_response
        for form in ("pcm", "wav", "opus"):
            with streaming.create(**asked, response_format=form, stream_format="audio") as answer:
                data, rate = b"".join(answer.iter_bytes()), int(answer.headers["x-sample-rate"])
                assert "content-length" not in answer.headers
            if form == "opus":
                samples, rate = soundfile.read(io.BytesIO(data))
                assert abs(len(samples) - len(expected)) <= 960  # the last frame
                continue
            begin = 44 if form == "wav" else 0
            np.testing.assert_allclose(np.frombuffer(data[begin:], "<i2") / 32767, expected, atol=1e-4)
            if form == "wav":
                assert len(soundfile.read(io.BytesIO(data))[0]) == len(expected) and rate == 16_000
        with streaming.create(**asked, response_format="pcm", stream_format="sse") as answer:
            lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [each["type"] for each in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    for each, samples in zip(events, spoken, strict=False):
        own = np.frombuffer(base64.b64decode(each["audio"]), "<i2") / 32767
        np.testing.assert_allclose(own, np.clip(samples, -1, 1), atol=1e-4)
    usage = events[-1]["usage"]
    assert usage["input_tokens"] == usage["total_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "response_format: expected pcm, wav, opus with a stream, got mp3"),
        ({"stream_format": "sse", "response_format": "flac"}, "response_format: expected pcm, wav, opus with a stream"),
        ({"stream_format": "bytes"}, "stream_format: expected 'audio' or 'sse', got 'bytes'"),
    ],
)
def test_streams_that_cannot_be_are_refused(servers, fields, message):
    answer = post(servers("vits")[0], "/v1/audio/speech", input=" ".join(SENTENCES), **fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)


def test_an_error_behind_the_first_sentence_cuts_the_answer(servers):
    server, _ = servers("vits")
    asked = {"model": "tiny", "input": f"{SENTENCES[0]} 12345 67890 12345 67890", "response_format": "pcm"}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{server.url}/v1/audio/speech", json=asked | {"stream": True}, timeout=60)
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=asked | {"stream_format": "sse"}, timeout=60)
    assert "speech.audio.delta" in answer.text and '"error"' in answer.text and "speech.audio.done" not in answer.text
    asked["input"] = "12345 67890 12345. " + SENTENCES[0]
    assert httpx.post(f"{server.url}/v1/audio/speech", json=asked | {"stream": True}, timeout=60).status_code == 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi.", ["Hi."]),
        (
            "Dr. Who lives in this town. Yes? He does, and well.",
            ["Dr. Who lives in this town.", "Yes? He does, and well."],
        ),
        ("A first line of text\nand a second one", ["A first line of text", "and a second one"]),
        ("これは最初の文であり長い文です。二番目。", ["これは最初の文であり長い文です。 二番目。"]),
        ("One sentence that is long. So", ["One sentence that is long. So"]),
        (" ", [" "]),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


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


def tensor(array, *, is_binary=False):
    names = {"float32": "FP32", "int64": "INT64"}
    entry = {"name": "pixel_values", "shape": list(array.shape), "datatype": names[str(array.dtype)]}
    if is_binary:
        return entry | {"parameters": {"binary_data_size": array.nbytes}}
    return entry | {"data": array.reshape(-1).tolist()}


def test_open_inference_protocol(servers):
    server, model = servers("vit")
    pixels = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    expected = model.infer({"pixel_values": pixels})["logits"]
    with torch.no_grad():
        eager = model.torch_model(pixel_values=torch.from_numpy(pixels)).logits
    np.testing.assert_allclose(expected, eager, atol=1e-5)
    url = f"{server.url}/v2/models/tiny"
    for path in ("/v2/health/live", "/v2/health/ready", "/v2", "/v2/models/tiny/ready"):
        assert httpx.get(f"{server.url}{path}").status_code == 200
    answer = httpx.post(f"{url}/infer", json={"id": "7", "inputs": [tensor(pixels)]}, timeout=60).json()
    assert (answer["model_name"], answer["id"]) == ("tiny", "7")
    (logits,) = answer["outputs"]
    assert (logits["name"], logits["datatype"], logits["shape"]) == ("logits", "FP32", [2, 3])
    np.testing.assert_allclose(np.reshape(logits["data"], (2, 3)), expected, atol=1e-5)
    head = {"inputs": [tensor(pixels, is_binary=True)], "outputs": [{"name": "logits"}]}
    head = json.dumps(head | {"parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = httpx.post(f"{url}/infer", content=head + pixels.tobytes(), headers=headers, timeout=60)
    length = int(answer.headers["Inference-Header-Content-Length"])
    (entry,) = json.loads(answer.content[:length])["outputs"]
    assert entry["parameters"] == {"binary_data_size": 24}
    np.testing.assert_allclose(np.frombuffer(answer.content[length:], "<f4").reshape(2, 3), expected, atol=1e-5)
    metadata = httpx.get(url).json()
    assert metadata["inputs"] == [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1]}]
    for wrong, message in [
        (tensor(pixels) | {"shape": [1]}, "inputs[0].data: expected 1 numbers"),
        (tensor(pixels) | {"datatype": "BYTES"}, "inputs[0].datatype: expected one of BOOL"),
        (tensor(pixels) | {"name": "ids"}, "inputs: expected pixel_values and other arguments"),
        (tensor(pixels, is_binary=True), "expected 24576 bytes of a tensor of this shape"),
        (tensor(pixels) | {"shape": [-1, 3]}, "inputs[0].shape: expected numbers above 0"),
    ]:
        answer = httpx.post(f"{url}/infer", json={"inputs": [wrong]}, timeout=60)
        assert answer.status_code == 400 and message in answer.json()["error"], answer.text
    answer = httpx.post(f"{url}/infer", json={"inputs": [tensor(pixels)], "outputs": [{"name": "x"}]}, timeout=60)
    assert answer.status_code == 400 and "expected one of logits" in answer.json()["error"]
    assert httpx.get(f"{server.url}/v2/models/other").status_code == 404


def test_what_tritonclient_sends_besides(servers):
    """Versions, compressed bodies, times in microseconds; and errors as text, without which it raises a TypeError."""
    server, model = servers("vit")
    pixels = np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32)
    expected = model.infer({"pixel_values": pixels})["logits"]
    url = f"{server.url}/v2/models/tiny"
    body = {"inputs": [tensor(pixels, is_binary=True)], "parameters": {"timeout": 60_000_000, "priority": 2}}
    head = json.dumps(body).encode()
    whole, length = head + pixels.tobytes(), {"Inference-Header-Content-Length": str(len(head))}
    for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        headers = length | {"Content-Encoding": coding}
        answer = httpx.post(f"{url}/versions/1/infer", content=compress(whole), headers=headers, timeout=60)
        np.testing.assert_allclose(answer.json()["outputs"][0]["data"], expected.reshape(-1), atol=1e-5)
        answer = httpx.post(f"{url}/infer", content=compress(whole)[:-9], headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"].startswith(f"expected a body in {coding}")) == (400, True)
    bomb = gzip.compress(bytes(server.options.connection.max_body_bytes + 1))
    answer = httpx.post(f"{url}/infer", content=bomb, headers={"Content-Encoding": "gzip"}, timeout=60)
    assert answer.status_code == 413 and "expected a body of at most" in answer.json()["error"]
    answer = httpx.post(f"{url}/infer", content=whole, headers=length | {"Content-Encoding": "br"}, timeout=60)
    assert (answer.status_code, answer.json()["error"][:40]) == (415, "expected Content-Encoding: gzip or defla")
    assert httpx.get(url).json()["versions"] == ["1"]
    for path in (f"{url}/versions/1", f"{url}/versions/1/ready"):
        assert httpx.get(path).status_code == 200
    assert httpx.get(f"{url}/versions/2").json() == {
        "error": "/v2/models: expected version 1 of tiny, got 2; leave it out"
    }
    config = httpx.get(f"{url}/config").json()
    assert config["max_batch_size"] == 0
    assert config["input"] == [{"name": "pixel_values", "data_type": "TYPE_FP32", "dims": [-1, 3, -1, -1]}]
    index = httpx.post(f"{server.url}/v2/repository/index", json={}).json()
    assert index == [{"name": "tiny", "version": "1", "state": "READY"}]
    for parameters, message in (
        ({"timeout": -1}, "parameters.timeout: expected microseconds, a whole number >= 0, got -1"),
        ({"sequence_id": 3}, "parameters: expected binary_data_output, timeout or priority, got sequence_id"),
    ):
        answer = httpx.post(f"{url}/infer", json={"inputs": [tensor(pixels)], "parameters": parameters}, timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (400, message)
    answer = httpx.post(f"{url}/infer", json={"inputs": [tensor(pixels)], "parameters": {"timeout": 1}}, timeout=60)
    assert answer.status_code == 504 and isinstance(answer.json()["error"], str)
    assert isinstance(httpx.post(f"{server.url}/v2/embed", json={}).json()["error"], dict)  # Cohere's


def test_statistics_and_shared_memory_in_the_form_of_triton(servers):
    server, _ = servers("vit")
    pixels = np.zeros((1, 3, 32, 32), np.float32)
    url = f"{server.url}/v2/models/tiny"
    (before,) = httpx.get(f"{server.url}/v2/models/stats").json()["model_stats"]
    for given in (pixels, pixels):
        assert httpx.post(f"{url}/infer", json={"inputs": [tensor(given)]}, timeout=60).status_code == 200
    assert httpx.post(f"{url}/infer", json={"inputs": [tensor(pixels) | {"name": "ids"}]}).status_code == 400
    (after,) = httpx.get(f"{url}/versions/1/stats").json()["model_stats"]
    assert (after["name"], after["version"]) == ("tiny", "1") and after["last_inference"] > 1e12
    added = {
        name: after["inference_stats"][name]["count"] - row["count"] for name, row in before["inference_stats"].items()
    }
    parts = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 2)
    assert added == parts | {"fail": 1, "cache_hit": 0, "cache_miss": 0}
    times = {name: row["ns"] for name, row in after["inference_stats"].items()}
    assert times["success"] == sum(times[name] for name in parts if name != "success") and times["compute_infer"] > 0
    assert after["batch_stats"][0]["compute_infer"] == after["inference_stats"]["compute_infer"]
    for kind in ("system", "cuda"):
        assert httpx.get(f"{server.url}/v2/{kind}sharedmemory/status").json() == []
        assert httpx.post(f"{server.url}/v2/{kind}sharedmemory/unregister").status_code == 200
        answer = httpx.post(f"{server.url}/v2/{kind}sharedmemory/region/a/register", json={"key": "/a", "byte_size": 8})
        assert (
            answer.status_code == 400 and "got shared memory, which this server does not read" in answer.json()["error"]
        )
    region = {"parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 24}}
    shared_input = {name: value for name, value in tensor(pixels).items() if name != "data"} | region
    for body in ({"inputs": [shared_input]}, {"inputs": [tensor(pixels)], "outputs": [{"name": "logits"} | region]}):
        answer = httpx.post(f"{url}/infer", json=body)
        assert answer.status_code == 400 and "shared memory, which this server does not read" in answer.json()["error"]
