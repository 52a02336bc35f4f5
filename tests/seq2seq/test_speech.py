"""Speech to text beside eager PyTorch."""

import json

import numpy as np
import pytest
import torch
import transformers
from tiny_whisper import tiny_whisper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.engine.request_handle import RequestError
from torchax_serve.entrypoints.speech_model import SpeechModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
RATE, SECOND = 16_000, 16_000


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A folder with a tiny Whisper that hears two seconds at a time, and the model itself."""
    path = tmp_path_factory.mktemp("whisper")
    model = tiny_whisper(suppress_tokens=None, is_multilingual=False, no_timestamps_token_id=55)
    model.save_pretrained(path)
    transformers.WhisperFeatureExtractor(chunk_length=2, sampling_rate=RATE).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(60)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2").save_pretrained(
        path
    )
    return path, model


def sound(seconds, seed=0):
    return np.random.default_rng(seed).standard_normal(int(seconds * SECOND)).astype(np.float32) * 0.1


def test_transcripts_match_transformers(whisper):
    path, eager = whisper
    sounds = [sound(1.5, 0), sound(0.7, 1)]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(path)
    features = extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    tokens = eager.generate(input_features=features, max_new_tokens=10)
    expected = transformers.AutoTokenizer.from_pretrained(path).batch_decode(tokens, skip_special_tokens=True)
    with serve(path) as served:
        assert isinstance(served, SpeechModel)
        assert torch.equal(served.generate(input_features=features, max_new_tokens=10), tokens)
        assert served.transcribe(sounds, sampling_rate=RATE, max_new_tokens=10) == expected
        assert served.transcribe(sounds[0], sampling_rate=RATE, max_new_tokens=10) == expected[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_features_have_the_dtype_of_the_weights(whisper, dtype):
    """The extractor makes float32, which PyTorch's convolutions do not multiply with 16-bit weights."""
    features = transformers.AutoFeatureExtractor.from_pretrained(whisper[0])(
        sound(1.5), sampling_rate=RATE, return_tensors="pt"
    ).input_features
    with serve(whisper[0], dtype=dtype) as served:
        tokens = served.generate(input_features=features.to(getattr(torch, dtype)), max_new_tokens=10)
        expected = served.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        assert served.transcribe([sound(1.5)], sampling_rate=RATE, max_new_tokens=10) == expected
        assert served.transcribe(sound(4.6, 2), sampling_rate=RATE, max_new_tokens=10)
        assert served.transcribe_with_times(sound(4.6, 2), sampling_rate=RATE, max_new_tokens=10).text


def test_transcriptions_are_on_the_queue(whisper):
    """Rows of Whisper on the engine of batches, beams on the static one; both end at a time limit, and go on."""
    path, eager = whisper
    features = transformers.AutoFeatureExtractor.from_pretrained(path)(
        sound(1.5), sampling_rate=RATE, return_tensors="pt"
    ).input_features
    tokens = eager.generate(input_features=features, max_new_tokens=10, num_beams=2)
    expected = transformers.AutoTokenizer.from_pretrained(path).batch_decode(tokens, skip_special_tokens=True)[0]
    with serve(path) as served:
        for options in ({}, {"num_beams": 2}, {"do_sample": True}):
            with pytest.raises(RequestError, match="expected its end within timeout_s"):
                served.transcribe(sound(1.5), sampling_rate=RATE, max_new_tokens=40, timeout_s=1e-4, **options)
        before = served.stats()
        served.transcribe(sound(1.5), sampling_rate=RATE, max_new_tokens=10, do_sample=True, priority=1)
        assert served.transcribe(sound(1.5), sampling_rate=RATE, max_new_tokens=10, num_beams=2) == expected
        assert served.stats().scheduler.num_prompt_tokens > before.scheduler.num_prompt_tokens
        assert not served.stats().scheduler.num_running


def test_long_audio_is_transcribed_in_windows_as_in_transformers(whisper):
    path, eager = whisper
    long = sound(4.6, 2)  # more than two windows of two seconds
    extractor = transformers.AutoFeatureExtractor.from_pretrained(path)
    options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
    features = extractor(long, sampling_rate=RATE, return_tensors="pt", **options)
    assert features.input_features.shape[-1] > 400
    asked = {"return_timestamps": True, "max_new_tokens": 6, "do_sample": False}
    tokens = eager.generate(**features, **asked)
    expected = transformers.AutoTokenizer.from_pretrained(path).batch_decode(tokens, skip_special_tokens=True)[0]
    first = eager.generate(input_features=features.input_features[..., :200], **asked)
    assert tokens.shape[1] > first.shape[1]  # there is more than the first window
    with serve(path) as served:
        assert torch.equal(served.generate(**features, **asked), tokens)
        assert served.transcribe(long, sampling_rate=RATE, max_new_tokens=6, do_sample=False) == expected.strip()


def test_bad_input(whisper):
    path, _ = whisper
    with serve(path) as served:
        with pytest.raises(InvalidArgumentError, match=r"audio\[0\]: expected samples, got none"):
            served.transcribe(sound(0), sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match="expected at least one array of samples"):
            served.transcribe([], sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match=r"expected 16000 samples per second, .* got 8000"):
            served.transcribe(sound(1), sampling_rate=8000)
        with pytest.raises(InvalidArgumentError, match=r"expected one channel, .* got shape \[2, 100\]"):
            served.transcribe(np.zeros((2, 100), np.float32), sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match="expected floating-point samples from -1 to 1, got int16"):
            served.transcribe(np.zeros(100, np.int16), sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match="with values that are no numbers"):
            served.transcribe(np.full(100, np.nan, np.float32), sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match="expected a numpy array of samples or a list of such, got str"):
            served.transcribe("speech.wav", sampling_rate=RATE)
        with pytest.raises(InvalidArgumentError, match=r"input_features: expected an input .* \[1, 80, 0\]"):
            served.torch_model.get_encoder()(torch.zeros(1, 80, 0))
        with pytest.raises(UnsupportedModelError, match="embed: expected a model that reads texts, got "):
            served.embed("a cat", pooling="mean")


def test_long_audio_needs_a_checkpoint_with_timestamps(whisper):
    path, _ = whisper
    with serve(path) as served:
        del served.generation_config.no_timestamps_token_id
        with pytest.raises(
            InvalidArgumentError, match=r"expected at most 2 s of audio .* got 4.6 s; cut it into pieces"
        ):
            served.transcribe(sound(4.6), sampling_rate=RATE)


def test_a_folder_without_a_feature_extractor(whisper, tmp_path):
    _, model = whisper
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(
        tmp_path
    )
    with serve(tmp_path) as served, pytest.raises(InvalidArgumentError, match="has no feature extractor"):
        served.transcribe(sound(1), sampling_rate=RATE)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "Nobody"}))
    with serve(tmp_path) as served, pytest.raises(CheckpointError, match="do not make a feature extractor"):
        served.transcribe(sound(1), sampling_rate=RATE)
