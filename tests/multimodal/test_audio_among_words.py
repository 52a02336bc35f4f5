"""A checkpoint that reads sounds among words, through the public functions, and what is refused."""

import copy

import glmasr_folder
import numpy as np
import pytest
import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve import SamplingParams, serve
from torchax_serve.engine.request_handle import RequestError
from torchax_serve.entrypoints.speech_model import SpeechModel
from torchax_serve.multimodal import processor_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
RATE = glmasr_folder.RATE
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("glmasr")


@pytest.fixture(scope="module")
def eager(folder):
    return glmasr_folder.make(folder)


@pytest.fixture(scope="module")
def model(eager, folder):
    with serve(folder) as served:
        yield served


def sound(seconds, seed=0):
    return np.random.default_rng(seed).standard_normal(int(seconds * RATE)).astype(np.float32) * 0.1


def question(audio, **others):
    parts = [{"type": "audio", "audio": audio, "sampling_rate": RATE, **others}, {"type": "text", "text": "What ?"}]
    return [{"role": "user", "content": parts}]


def test_tokens_match_eager_pytorch(model, eager):
    text = "USER: <|pad|> What ? ASSISTANT:"
    inputs = processor_of(model)(text=[text], audio=[sound(0.6)])
    ours = model.generate(**inputs, **GREEDY)
    assert torch.equal(ours, eager.generate(**inputs, **GREEDY))
    assert model.torch_model._jax_runtime.steps.num_traces["decode"] == 1  # the fast loop
    others = processor_of(model)(text=[text], audio=[sound(0.6, 1)])
    assert not torch.equal(model.generate(**others, **GREEDY), ours)


def test_chat(model, eager):
    audio = sound(0.5, 2)
    inputs = processor_of(model)(text=["USER: <|pad|> What ? ASSISTANT:"], audio=[audio])
    tokens = eager.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    expected = model.tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert model.chat(question(audio), SamplingParams(max_new_tokens=8, do_sample=False)) == expected
    assert (
        "".join(model.chat(question(audio), SamplingParams(max_new_tokens=8, do_sample=False), stream=True)) == expected
    )


def test_transcripts(model, eager):
    assert isinstance(model, SpeechModel)
    sounds = [sound(0.6, 3), sound(0.4, 4)]
    inputs = processor_of(model).apply_transcription_request(audio=sounds)
    tokens = eager.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    expected = [text.strip() for text in model.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    assert expected[0] != expected[1]
    before = model.engine.stats().scheduler.num_new_tokens
    assert model.transcribe(sounds, sampling_rate=RATE, **GREEDY) == expected
    asked = model.transcribe(sounds[0], sampling_rate=RATE, prompt="What is this ?", **GREEDY)
    assert asked != expected[0]
    assert model.engine.stats().scheduler.num_new_tokens > before and model._single_engine is None
    assert len(model.transcribe(sounds[0], sampling_rate=RATE, num_beams=2, **GREEDY)) > 0
    assert model._single_engine is not None  # beams do not share steps
    with pytest.raises(RequestError, match="expected its end within timeout_s"):
        model.transcribe(sounds, sampling_rate=RATE, timeout_s=1e-4, **GREEDY)
    with pytest.raises(ValueError, match="no_such_option"):
        model.transcribe(sounds, sampling_rate=RATE, no_such_option=1, **GREEDY)


def test_bad_audio(model):
    with pytest.raises(InvalidArgumentError, match="audio: expected samples, got none"):
        model.chat(question(sound(0)))
    with pytest.raises(InvalidArgumentError, match=r"expected 16000 samples per second, .* got 8000"):
        model.chat(question(sound(1), sampling_rate=8000))
    with pytest.raises(InvalidArgumentError, match=r"expected 16000 samples per second, .* got None"):
        model.chat(question(sound(1), sampling_rate=None))
    with pytest.raises(InvalidArgumentError, match=r"expected one channel, .* got shape \[2, 100\]"):
        model.chat(question(np.zeros((2, 100), np.float32)))
    with pytest.raises(InvalidArgumentError, match="got one without audio"):
        model.chat([{"role": "user", "content": [{"type": "audio"}]}])
    with pytest.raises(InvalidArgumentError, match=r"it raised .*check paths and contents"):
        model.chat([{"role": "user", "content": [{"type": "audio", "path": "nobody.wav"}]}])
    with pytest.raises(UnsupportedModelError, match="expected a processor with a part for images, got GlmAsrProcessor"):
        model.chat([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    with pytest.raises(InvalidArgumentError, match=r"expected 16000 samples per second, .* got 8000"):
        model.transcribe(sound(1), sampling_rate=8000)
    with pytest.raises(InvalidArgumentError, match="expected audio for the placeholder tokens 3 of the prompt"):
        model.generate(torch.tensor([[4, 3, 3, 5]]), **GREEDY)
    inputs = processor_of(model)(text=["USER: <|pad|> What ?"], audio=[sound(0.6)])
    inputs["input_ids"][inputs["input_ids"] == 3] = 8
    with pytest.raises(InvalidArgumentError, match="expected a placeholder token 3 for each feature of the audio, got"):
        model.generate(**inputs, **GREEDY)


def test_sounds_of_several_prompts_share_steps_and_are_found_by_their_samples(model, eager):
    text = "USER: <|pad|> What ? ASSISTANT:"
    asked = [processor_of(model)(text=[text], audio=[sound(0.6, seed)]) for seed in (0, 1)]
    lens = [inputs["input_ids"].shape[1] for inputs in asked]
    expected = [
        eager.generate(**inputs, **GREEDY)[0, length:].tolist() for inputs, length in zip(asked, lens, strict=True)
    ]
    assert expected[0] != expected[1]
    config = copy.deepcopy(model.generation_config)
    config.update(**GREEDY)
    streams = [model.iter_tokens((), config, inputs=dict(inputs)) for inputs in asked]
    assert [list(stream) for stream in streams] == expected
    encoder = model.torch_model._jax_runtime.media_encoder
    encoded, hits = encoder.num_encoded, encoder.num_hits
    assert encoded >= 2
    assert [list(model.iter_tokens((), config, inputs=dict(inputs))) for inputs in asked] == expected
    assert (encoder.num_encoded, encoder.num_hits) == (encoded, hits + 2)
