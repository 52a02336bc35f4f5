"""Transcripts of audio files by OpenAI's own client, against the model's own call on the samples."""

import io
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile
from running_server import serving

sys.path.insert(0, str(Path(__file__).parents[1] / "seq2seq"))

from test_speech import RATE, sound, whisper

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
    soundfile.write(data, samples, rate, format=form, subtype=subtype)
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


def test_long_silence_in_a_small_file_is_refused(client):
    data = file_of(np.zeros(1900 * 8000, np.float32), "FLAC", rate=8000)
    assert len(data) < 1_000_000
    with pytest.raises(openai.BadRequestError, match="1800 s"):
        client.audio.transcriptions.create(model="tiny", file=("a.flac", data))


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
