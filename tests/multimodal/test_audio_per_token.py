"""Models that hear a piece of sound with every token they write, beside eager PyTorch."""

import copy

import numpy as np
import pytest
import torch
import transformers
from thorough import except_for
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    KyutaiSpeechToTextFeatureExtractor,
    KyutaiSpeechToTextProcessor,
    PreTrainedTokenizerFast,
)

from parity_sweep.tiny.audio import audio_inputs, audio_model
from torchax_serve import UnsupportedArgumentError, UnsupportedModelError, serve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
GREEDY = {"max_new_tokens": 12, "do_sample": False}
CLASSES = {
    "voxtral_realtime": transformers.VoxtralRealtimeForConditionalGeneration,
    "kyutai_speech_to_text": transformers.KyutaiSpeechToTextForConditionalGeneration,
}
RATE = 24000


def made(model_type):
    return audio_model(model_type, CLASSES[model_type], 0)


@pytest.mark.parametrize("model_type", except_for(["voxtral_realtime"], CLASSES))
def test_tokens_match_eager_pytorch_from_a_folder(model_type, tmp_path):
    eager = made(model_type)
    eager.save_pretrained(tmp_path)
    given = audio_inputs(model_type, eager)
    expected = {name: copy.deepcopy(eager).generate(**given[name], **GREEDY) for name in ("first", "second", "padded")}
    assert not torch.equal(expected["first"], expected["second"])
    with serve(tmp_path) as model:
        for name, tokens in expected.items():
            assert torch.equal(model.generate(**given[name], **GREEDY), tokens), name
        traces = model.torch_model._jax_runtime.steps.num_traces["forward"]
        model.generate(**given["first"], max_new_tokens=16, do_sample=False)
        assert model.torch_model._jax_runtime.steps.num_traces["forward"] == traces  # nothing compiles token by token
        with pytest.raises(UnsupportedModelError):
            _ = model.engine


def test_streamed_audio_is_refused():
    eager = made("voxtral_realtime")
    given = dict(audio_inputs("voxtral_realtime", eager)["first"])
    pieces = given.pop("input_features")
    with (
        serve(eager) as model,
        pytest.raises(UnsupportedArgumentError, match="input_features: expected a tensor with all of the input"),
    ):
        model.generate(**given, input_features=(piece for piece in pieces.split(8, -1)))


def test_windows_of_the_codec_are_refused():
    eager = made("kyutai_speech_to_text")
    given = audio_inputs("kyutai_speech_to_text", eager)["first"]
    eager.generation_config.audio_window_size = 5
    with serve(eager) as model, pytest.raises(UnsupportedArgumentError, match="audio_window_size: expected None"):
        model.generate(**given, **GREEDY)


def test_transcripts(tmp_path):
    eager = made("kyutai_speech_to_text")
    eager.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(128)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")
    extractor = KyutaiSpeechToTextFeatureExtractor(sampling_rate=RATE)
    processor = KyutaiSpeechToTextProcessor(extractor, tokenizer)
    processor.save_pretrained(tmp_path)
    audio = [np.random.default_rng(seed).standard_normal(400).astype(np.float32) for seed in (0, 1)]
    inputs = processor(audio=audio, sampling_rate=RATE, return_tensors="pt")
    tokens = eager.generate(**inputs, **GREEDY)[:, 1:]
    expected = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    with serve(tmp_path) as model:
        assert model.transcribe(audio, sampling_rate=RATE, **GREEDY) == expected
    assert expected[0] != expected[1]
