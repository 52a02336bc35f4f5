"""Labels and transcripts of sound beside transformers' own pipelines."""

import asyncio

import numpy as np
import pytest
import soundfile
import task_models
import torch
from scipy.signal import resample_poly
from transformers import AutoFeatureExtractor, AutoTokenizer, pipeline

from torchax_serve import AudioModel, InvalidArgumentError, UnsupportedModelError, serve

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
RATE = 16_000


def assert_same_labels(found, expected):
    assert [each.label for each in found] == [each["label"] for each in expected]
    np.testing.assert_allclose([e.score for e in found], [e["score"] for e in expected], atol=1e-4)


def test_classify_audio(folders, tmp_path):
    path, eager = folders("wav2vec")
    theirs = pipeline("audio-classification", model=eager, feature_extractor=AutoFeatureExtractor.from_pretrained(path))
    tone, noise = task_models.sounds()
    stereo = np.stack([tone[::2], 0.5 * tone[::2]], 1)
    soundfile.write(tmp_path / "stereo.wav", stereo, RATE // 2, subtype="FLOAT")
    with serve(path) as served:
        assert type(served) is AudioModel and served.methods == ("classify_audio",)
        found = served.classify_audio([tone, noise, tone], sampling_rate=RATE)
        for one, sound in zip(found, (tone, noise, tone), strict=True):
            assert_same_labels(one, theirs(sound))
        found = asyncio.run(served.aclassify_audio(tone, sampling_rate=RATE, top_k=1))
        assert_same_labels(found, theirs(tone, top_k=1))
        silence = np.zeros_like(tone)
        assert_same_labels(served.classify_audio(silence, sampling_rate=RATE), theirs(silence))
        mean = resample_poly(stereo.mean(1).astype(np.float32), 2, 1).astype(np.float32)
        assert_same_labels(served.classify_audio(tmp_path / "stereo.wav"), theirs(mean))
        assert served.runtime.steps.forward.num_programs == 3  # one and two rows of one length, one of another
        with pytest.raises(UnsupportedModelError, match=r"transcribe: .*, whose methods are classify_audio"):
            served.transcribe(tone, sampling_rate=RATE)
        (tmp_path / "text.wav").write_text("I am a sound")
        for sound, rate, message in [
            (np.where(tone > 0.2, np.nan, tone), RATE, "values that are no numbers"),
            (stereo.astype(np.float32), RATE, "expected one channel"),
            (tone, RATE // 2, "sampling_rate: expected 16000 samples per second"),
            (tone, None, "sampling_rate: expected the rate of an array"),
            (tmp_path / "text.wav", None, "which is something else or damaged"),
            (tmp_path / "none.wav", None, "expected a file that is there"),
            (tone[:1], RATE, r"got input_values \[1, 1\], on which PyTorch fails, too"),
            (tone * np.float32(1e38), RATE, "expected samples from -1 to 1, got 4"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.classify_audio(sound, sampling_rate=rate)


@pytest.mark.thorough
def test_transcribe_letters(folders):
    path, eager = folders("wav2vec_ctc")
    theirs = pipeline(
        "automatic-speech-recognition",
        model=eager,
        feature_extractor=AutoFeatureExtractor.from_pretrained(path),
        tokenizer=AutoTokenizer.from_pretrained(path),
    )
    sounds = task_models.sounds()
    expected = [theirs(sound)["text"] for sound in sounds]
    with serve(path) as served:
        assert served.transcribe(sounds, sampling_rate=RATE) == expected and all(expected)
        assert asyncio.run(served.atranscribe(sounds[0], sampling_rate=RATE)) == expected[0]


def test_speak(folders):
    path, eager = folders("vits")
    reader = AutoTokenizer.from_pretrained(path)
    texts = ["a small cat"]

    def theirs(text, **options):
        torch.manual_seed(7)
        with torch.no_grad():
            return eager(**reader(text, return_tensors="pt"), **options).waveform[0].numpy()

    with serve(path) as served:
        assert served.methods == ("speak",) and served.num_speakers == 2
        for text, found in zip(texts, served.speak(texts, seed=7), strict=True):
            assert found.sampling_rate == 16_000 and found.samples.dtype == np.float32
            np.testing.assert_allclose(found.samples, theirs(text), atol=1e-4)
        found = asyncio.run(served.aspeak(texts[0], seed=7, speaker=1, speaking_rate=2.0))
        np.testing.assert_allclose(found.samples, theirs(texts[0], speaker_id=1, speaking_rate=2.0), atol=1e-4)
        with torch.no_grad():
            scaled = {name: 0.9 * value for name, value in eager.state_dict().items() if name.startswith("duration")}
        was = {name: value.clone() for name, value in eager.state_dict().items() if name in scaled}
        served.torch_model.load_state_dict(scaled, strict=False, assign=True)
        eager.load_state_dict(scaled, strict=False)
        np.testing.assert_allclose(served.speak(texts, seed=7)[0].samples, theirs(texts[0]), atol=1e-4)
        eager.load_state_dict(was, strict=False)
        for options, message in [
            ({"speaker": 2}, "speaker: expected a number from 0 to 1"),
            ({"speaking_rate": 0}, "speaking_rate: expected a number"),
            ({"seed": -1}, "seed: expected"),
            ({"speaker_embedding": [0.0]}, "speaker_embedding: expected none"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.speak(texts, **options)
        with pytest.raises(InvalidArgumentError, match=r"texts\[0\]: expected some text, got an empty one"):
            served.speak("")


def test_speak_with_a_spectrogram_and_a_vocoder(folders, tmp_path):
    path, (eager, vocoder) = folders("speecht5")
    reader = AutoTokenizer.from_pretrained(path)
    voices = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    text = "the cat sat on the mat"
    given = reader(text, return_tensors="pt")["input_ids"]
    with serve(path) as served:
        assert type(served) is AudioModel and served.methods == ("speak",)
        lens = []
        for seed, voice in ((8, voices[0]), (9, voices[1])):
            torch.manual_seed(seed)
            expected = eager.generate_speech(given, torch.tensor(voice)[None], vocoder=vocoder).numpy()
            found = served.speak(text, seed=seed, speaker_embedding=voice)
            assert found.sampling_rate == 16_000
            np.testing.assert_allclose(found.samples, expected, atol=1e-4)
            lens.append(len(expected) // 32)
        assert lens[0] == given.shape[1] * 20 // 2 and 1 < lens[1] < lens[0]  # the most steps, and an end
        assert served.runtime.steps.call_method.num_programs <= 3  # one for all frames, a postnet for each number
        for options, message in [
            ({}, r"speaker_embedding: expected float\[12\], an x-vector of the voice"),
            ({"speaker_embedding": voices}, r"expected float\[12\] for .*, got shape \[2, 12\]"),
            ({"speaker_embedding": voices[0] * np.nan}, "got values that are no numbers"),
            ({"speaker_embedding": voices[0], "speaking_rate": 2.0}, "speaking_rate: expected none"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                served.speak(text, **options)
    task_models.speecht5(tmp_path, vocoder=False)
    with (
        serve(tmp_path) as served,
        pytest.raises(InvalidArgumentError, match="its files in the folder vocoder next to"),
    ):
        served.speak("a cat", speaker_embedding=voices[0])
