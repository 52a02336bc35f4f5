"""Transcripts of audio files by OpenAI's own client, against the model's own call on the samples."""

import asyncio
import base64
import io
import json
import re
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile
from running_server import RunningServer, serving

from torchax_serve.server.batch.results import BatchResults
from torchax_serve.server.batch.run import run_batch
from torchax_serve.server.options import ServerOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "seq2seq"))

from test_speech import RATE, sound, whisper
from timed_whisper import noise, timed_whisper

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
__all__ = ["whisper"]


@pytest.fixture(scope="module")
def speech(whisper):
    with serving(whisper[0]) as found:
        yield found


@pytest.fixture(scope="module")
def client(speech):
    with openai.OpenAI(base_url=f"{speech[0].url}/v1", api_key="none", max_retries=0) as found:
        yield found


def file_of(samples, form="WAV", rate=RATE, subtype=None):
    data = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(data, "w", rate, channels, subtype, format=form) as file:
        for begin in range(0, len(samples), 1 << 16):  # libvorbis ends the process at millions of samples at once
            file.write(samples[begin : begin + (1 << 16)])
    return data.getvalue()


@pytest.mark.parametrize(("form", "subtype"), [("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", None), ("MP3", None)])
def test_files_of_every_kind(client, speech, form, subtype):
    data = file_of(sound(1.2), form, subtype=subtype)
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    answer = client.audio.transcriptions.create(model="tiny", file=(f"a.{form.lower()}", data))
    assert answer.text == speech[1].transcribe(samples, sampling_rate=RATE)
    text = client.audio.transcriptions.create(model="tiny", file=("a", data), response_format="text")
    assert text.strip() == answer.text


def test_other_rates_and_channels_are_converted(client):
    time = np.arange(int(1.0 * 44_100)) / 44_100
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32) * 0.1
    stereo = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", file_of(np.stack([tone, tone], 1), rate=44_100))
    )
    assert isinstance(stereo.text, str)


@pytest.mark.parametrize(
    "data",
    [
        b"no audio",
        file_of(np.zeros(0, np.float32)),
        file_of(sound(1))[:40],
        file_of(np.full(99, np.nan), subtype="FLOAT"),
        file_of(sound(1), rate=500),
    ],
)
def test_files_that_are_no_audio_are_refused(client, data):
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="tiny", file=("a.wav", data))
    assert caught.value.param == "file"


@pytest.mark.parametrize(
    ("form", "rate", "seconds"), [("FLAC", 8000, 1900), ("OGG", 8000, 1900), ("FLAC", 1000, 36_000)]
)
def test_long_silence_in_a_small_file_is_refused(client, form, rate, seconds):
    data = file_of(np.zeros(seconds * rate, np.int16), form, rate=rate)
    assert len(data) < 2_000_000
    with pytest.raises(openai.BadRequestError, match="1800 s"):
        client.audio.transcriptions.create(model="tiny", file=(f"a.{form.lower()}", data))


def test_forms_that_are_none(speech, server):
    url = f"{speech[0].url}/v1/audio/transcriptions"
    assert httpx.post(url, json={}).status_code == 415
    assert httpx.post(url, data={"model": "tiny"}, files={"other": b"x"}).status_code == 400
    head = {"Content-Type": "multipart/form-data; boundary=x"}
    assert httpx.post(url, content=b"--x\r\nnonsense", headers=head).status_code == 400
    assert httpx.post(url, content=b"", headers={"Content-Type": "multipart/form-data"}).status_code == 400
    many = {f"field{index}": "x" for index in range(100)}
    assert httpx.post(url, data=many, files={"file": b"x"}).status_code == 400
    unknown = httpx.post(url, data={"model": "tiny", "wat": "x"}, files={"file": file_of(sound(1))})
    assert unknown.json()["error"]["param"] == "wat"
    assert httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": b"x"}).status_code == 404


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("embeddings", "input")])
def test_a_model_of_audio_reads_no_texts(speech, path, field):
    answer = httpx.post(f"{speech[0].url}/v1/{path}", json={"model": "tiny", field: "a", "max_tokens": 2})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("got tiny, whose tasks are transcribe")


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    path = tmp_path_factory.mktemp("timed")
    timed_whisper(path)
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def timed_client(timed):
    with openai.OpenAI(base_url=f"{timed[0].url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_verbose_json_is_what_the_client_expects(timed, timed_client):
    audio = noise(3.4, 1)
    data = file_of(audio, subtype="FLOAT")
    expected = timed[1].transcribe_with_times(audio, sampling_rate=RATE, words=True, language="en", task="transcribe")
    answer = timed_client.audio.transcriptions.create(
        model="tiny",
        file=("a.wav", data),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    checked = openai.types.audio.TranscriptionVerbose.model_validate(answer.model_dump(), strict=True)
    assert (checked.text, checked.language) == (expected.text, "english")
    assert checked.duration == pytest.approx(3.4)
    for segment, other in zip(checked.segments, expected.segments, strict=True):
        assert (segment.start, segment.end, segment.text) == (other.start_s, other.end_s, other.text)
        assert (segment.tokens, segment.seek) == (other.token_ids, other.seek)
        assert segment.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-5)
    assert [(each.word, each.start, each.end) for each in checked.words] == [
        (word.text, word.start_s, word.end_s) for word in expected.words
    ]
    plain = timed_client.audio.transcriptions.create(
        model="tiny", file=("a.wav", data), language="en", response_format="verbose_json"
    )
    assert plain.words is None and len(plain.segments) == len(expected.segments)


def test_subtitles(timed, timed_client):
    audio = noise(3.4, 1)
    expected = timed[1].transcribe_with_times(audio, sampling_rate=RATE, language="en", task="transcribe").segments
    fields = {"model": "tiny", "file": ("a.wav", file_of(audio, subtype="FLOAT")), "language": "en"}
    clock = r"(\d\d):(\d\d):(\d\d)[.,](\d{3})"
    for form, sign in (("srt", ","), ("vtt", ".")):
        text = timed_client.audio.transcriptions.create(response_format=form, **fields)
        assert text.startswith("WEBVTT\n\n" if form == "vtt" else "1\n")
        found = re.findall(rf"{clock} --> {clock}\n(.*)\n", text)
        assert len(found) == len(expected) == text.count("-->")
        for times, segment in zip(found, expected, strict=True):
            hours, minutes, seconds, milliseconds = map(int, times[:4])
            start_s = 3600 * hours + 60 * minutes + seconds + milliseconds / 1000
            assert start_s == pytest.approx(segment.start_s, abs=1e-3)
            assert times[-1] == " ".join(segment.text.split())
        assert sign in text.partition("-->")[0]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client's own method
def test_translations_take_the_same_forms(timed, timed_client):
    audio = noise(1.4, 2)
    data = file_of(audio, subtype="FLOAT")
    answer = timed_client.audio.translations.create(
        model="tiny", file=("a.wav", data), response_format="verbose_json", extra_body={"language": "de"}
    )
    expected = timed[1].transcribe_with_times(audio, sampling_rate=RATE, language="de", task="translate")
    checked = openai.types.audio.TranslationVerbose.model_validate(answer.model_dump(), strict=True)
    assert (checked.text, checked.language) == (expected.text, "english")


@pytest.mark.parametrize("seconds", [1.4, 4.2])
def test_a_streamed_transcript_is_the_complete_one(timed, timed_client, seconds):
    audio = noise(seconds, 3)
    fields = {"model": "tiny", "file": ("a.wav", file_of(audio, subtype="FLOAT")), "language": "en"}
    complete = timed_client.audio.transcriptions.create(**fields).text
    *deltas, last = timed_client.audio.transcriptions.create(stream=True, **fields)
    assert all(isinstance(each, openai.types.audio.TranscriptionTextDeltaEvent) for each in deltas)
    assert isinstance(last, openai.types.audio.TranscriptionTextDoneEvent)
    assert "".join(each.delta for each in deltas) == last.text == complete
    assert len(deltas) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": True}, "stream"),
        ({"language": "Klingon"}, "language"),
        ({"extra_body": {"stream": "perhaps"}}, "stream"),
        ({"prompt": "Dear reader"}, "prompt"),
        ({"include": ["logprobs"]}, "include"),
    ],
)
def test_what_cannot_be_had_is_named(client, fields, param):
    """The model of this client has no alignment heads, and one language."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="tiny", file=("a.wav", file_of(sound(1))), **fields)
    assert caught.value.param == param


def test_a_client_that_goes_frees_its_work(timed):
    """Of a minute of noise, whether or not it is streamed, and whatever has times."""
    server, model = timed
    url, form = f"{server.url}/v1/audio/transcriptions", {"model": "tiny", "language": "en"}
    first = httpx.post(url, data=form, files={"file": ("a", file_of(sound(1)))}, timeout=60)  # makes the engine
    assert first.status_code == 200, first.text
    data = file_of(noise(60, 4), "FLAC")

    async def go(fields):
        async with httpx.AsyncClient(timeout=60) as http:
            with pytest.raises(TimeoutError):
                answer = http.post(url, data=form | fields, files={"file": ("a", data)})
                raise AssertionError((await asyncio.wait_for(answer, 0.7)).text)

    async def main():
        await asyncio.gather(*map(go, [{}, {"response_format": "verbose_json"}, {"stream": "true"}]))

    asyncio.run(main())
    until = time.monotonic() + 5
    while (stats := model.stats().scheduler).num_running or stats.num_waiting or server.context.num_in_flight:
        assert time.monotonic() < until, stats
        time.sleep(0.02)


def test_a_transcription_has_the_time_limit_of_requests(timed):
    impatient = RunningServer(timed[1], request_timeout_s=0.3)
    try:
        form, files = {"model": "tiny", "language": "en"}, {"file": ("a", file_of(noise(60, 4), "FLAC"))}
        answer = httpx.post(f"{impatient.url}/v1/audio/transcriptions", data=form, files=files, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    finally:
        impatient.stop()


def test_a_file_of_requests_has_audio_as_data_urls(speech):
    samples = sound(1.2)
    url = f"data:audio/wav;base64,{base64.b64encode(file_of(samples, subtype='FLOAT')).decode()}"
    bodies = [{"model": "tiny", "file_url": url, "temperature": 0.0}, {"model": "tiny", "file_url": "https://a/b"}]
    lines = [
        {"custom_id": f"{index}", "method": "POST", "url": "/v1/audio/transcriptions", "body": body}
        for index, body in enumerate(bodies)
    ]
    output = io.BytesIO()
    source = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    run_batch(speech[1], source, BatchResults(output), ServerOptions(served_model_names=("tiny",)))
    found = {line["custom_id"]: line["response"] for line in map(json.loads, output.getvalue().splitlines())}
    assert found["0"]["body"]["text"] == speech[1].transcribe(samples, sampling_rate=RATE)
    assert found["1"]["status_code"] == 400 and found["1"]["body"]["error"]["param"] == "file_url"
