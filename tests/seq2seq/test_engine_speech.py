"""Decoders behind audio encoders on the engine: sounds of different lengths in one batch, beside eager PyTorch."""

import copy

import pytest
import torch
import transformers
from steps_taken import steps_taken
from thorough import thorough
from transformers import Wav2Vec2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextPreTrainedModel
from transformers.models.speecht5.modeling_speecht5 import SpeechT5SpeechEncoderPrenet
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PreTrainedModel

from model_adapters import quirks
from model_adapters.caches.encoder_mask import SourceMask
from parity_sweep.tiny.audio import audio_inputs, audio_model
from torchax_serve import EngineOptions, serve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
OPTIONS = EngineOptions(max_num_seqs=4, page_size=4, max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20)
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
SEEDS = {"speecht5": 1}
"""Of weights with which the answers to two sounds differ, where those of seed 0 are the same."""


@pytest.mark.parametrize("model_type", ["speech_to_text", "moonshine", thorough("speecht5"), thorough("canary")])
def test_sounds_of_different_lengths_share_steps(model_type):
    model_class = getattr(transformers, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type])
    eager = audio_model(model_type, model_class, SEEDS.get(model_type, 0)).eval()
    inputs = audio_inputs(model_type, eager)
    expected = {name: eager.generate(**copy.deepcopy(one), **GREEDY)[:, -6:] for name, one in inputs.items()}
    assert not torch.equal(expected["first"], expected["second"])
    with serve(copy.deepcopy(eager), engine=OPTIONS) as served:
        served.engine.check_integrity = True
        config = copy.deepcopy(served.generation_config)
        config.update(**GREEDY)
        streams = [served.iter_tokens((), config, inputs=inputs[name]) for name in ("first", "second")]
        answers = [list(stream) for stream in streams]
        assert answers == [expected[name][0].tolist() for name in ("first", "second")]
        before = steps_taken(served)
        assert torch.equal(served.generate(**inputs["padded"], **GREEDY)[:, -6:], expected["padded"])
        assert 0 < steps_taken(served) - before < 12  # both rows in the same steps
        assert served._single_engine is None


WAV = {"conv_kernel": (10, 3, 3, 2), "conv_stride": (5, 2, 2, 2), "conv_dim": (8, 8, 8, 8), "adapter_stride": 2}


@pytest.mark.parametrize(
    ("model_type", "config", "owner"),
    [
        (
            "speech_to_text",
            transformers.Speech2TextConfig(num_conv_layers=3, conv_kernel_sizes=(5, 5, 5)),
            Speech2TextPreTrainedModel,
        ),
        ("speecht5", transformers.SpeechT5Config(), SpeechT5SpeechEncoderPrenet),
        ("speech-encoder-decoder", Wav2Vec2Config(**WAV), Wav2Vec2PreTrainedModel),
        ("speech-encoder-decoder", Wav2Vec2Config(**WAV, add_adapter=True), Wav2Vec2PreTrainedModel),
    ],
)
def test_lengths_are_those_that_the_model_computes(model_type, config, owner):
    whole = config
    if model_type == "speech-encoder-decoder":
        decoder = transformers.BertConfig(is_decoder=True, add_cross_attention=True)
        whole = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(config, decoder)
    rule = SourceMask(*quirks.of_type(model_type).encoder_mask(whole))
    holder = type("Holder", (), {"config": config})()
    for length in range(1, 20):
        num_inputs = torch.tensor([rule.argument(20, length).sum().item()])
        for more in (0, rule.stride - 1):  # the last inputs of an output, too
            count = owner._get_feat_extract_output_lengths(holder, num_inputs + more)
            assert int(count) == length == int(rule.seen((num_inputs + more).numpy())[0])


def test_a_decoder_behind_another_encoder_has_no_known_lengths():
    encoder = transformers.WhisperConfig()
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, transformers.BertConfig())
    assert quirks.of_type("speech-encoder-decoder").encoder_mask(config) is None
