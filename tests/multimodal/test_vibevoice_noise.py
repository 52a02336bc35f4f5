"""VibeVoice's audio encoder draws noise unless told not to: refused where it is asked for, left out elsewhere."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    VibeVoiceAcousticTokenizerFeatureExtractor,
    VibeVoiceAsrForConditionalGeneration,
    VibeVoiceAsrProcessor,
)

from parity_sweep.tiny import audio
from torchax_serve import SamplingParams, UnsupportedArgumentError, serve
from torchax_serve.multimodal import processor_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
RATE = 24_000
GREEDY = {"max_new_tokens": 6, "do_sample": False}
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'audio' %}<audio> "
    "{% else %}{{ part.text }}{% endif %}{% endfor %} w7{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint with a token for each 3200 samples, as its processor counts them."""
    path = tmp_path_factory.mktemp("vibevoice")
    codec = {"downsampling_ratios": [40, 80], "depths": [1, 1, 1], "num_filters": 4}
    parts = ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(audio.CONFIGS, "vibevoice_asr", dict.fromkeys(parts, codec))
        model = audio.audio_model("vibevoice_asr", VibeVoiceAsrForConditionalGeneration, 0)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    words = {f"w{index}": index for index in range(model.config.text_config.vocab_size)}
    words["<audio>"] = words.pop(f"w{model.config.audio_token_id}")
    assert words["<audio>"] == model.config.audio_token_id
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", additional_special_tokens=["<audio>"])
    extractor = VibeVoiceAcousticTokenizerFeatureExtractor(sampling_rate=RATE)
    VibeVoiceAsrProcessor(extractor, fast, TEMPLATE, audio_token="<audio>").save_pretrained(path)
    return path


def test_noise_is_refused_by_name_and_left_out_of_transcripts_and_chats(folder):
    eager = VibeVoiceAsrForConditionalGeneration.from_pretrained(folder).eval()
    samples = np.random.default_rng(0).standard_normal(RATE).astype(np.float32) * 0.1
    with serve(folder) as model:
        inputs = dict(processor_of(model).apply_transcription_request(samples))
        drawn = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            drawn.append(eager(**inputs).logits)
        assert not torch.equal(*drawn)  # transformers draws new noise at each call
        with pytest.raises(UnsupportedArgumentError, match=r"sample: expected False, got True, .* pass sample=False"):
            model.generate(**inputs, **GREEDY)
        with pytest.raises(UnsupportedArgumentError, match="sample: expected False"):
            model.transcribe(samples, sampling_rate=RATE, sample=True, **GREEDY)
        tokens = eager.generate(**inputs, sample=False, **GREEDY)
        assert torch.equal(model.generate(**inputs, sample=False, **GREEDY), tokens)
        expected = model.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert model.transcribe(samples, sampling_rate=RATE, **GREEDY) == expected
        content = [{"type": "audio", "audio": samples, "sampling_rate": RATE}]
        answer = model.chat([{"role": "user", "content": content}], SamplingParams(max_new_tokens=6, do_sample=False))
        assert answer == expected
        assert model.engine.stats().scheduler.num_new_tokens == 2 * GREEDY["max_new_tokens"]  # both on the engine
