"""Sounds in chats (`input_audio`): the answer is that of eager PyTorch, and an error names the part of the message."""

import base64
import io
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from running_server import serving

from torchax_serve.multimodal import processor_of

sys.path.insert(0, str(Path(__file__).parents[1] / "multimodal"))

import glmasr_folder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def wav_of(samples):
    data = io.BytesIO()
    soundfile.write(data, samples, glmasr_folder.RATE, "FLOAT", format="WAV")
    return data.getvalue()


def test_sounds_in_a_chat(tmp_path):
    eager = glmasr_folder.make(tmp_path)
    sounds = [np.random.default_rng(seed).standard_normal(8000).astype(np.float32) * 0.1 for seed in (0, 1)]
    with serving(tmp_path) as (server, model), openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def ask(data):
            parts = [
                {"type": "text", "text": "What ?"},
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}},
            ]
            messages = [{"role": "user", "content": parts}]
            return client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)

        for samples in sounds:
            inputs = processor_of(model)(text=["USER: What ? <|pad|> ASSISTANT:"], audio=[samples])
            tokens = eager.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            expected = model.tokenizer.decode(tokens, skip_special_tokens=True)
            assert ask(wav_of(samples)).choices[0].message.content == expected
        for broken in (b"no sound", wav_of(sounds[0][:0]), wav_of(np.full(9, np.nan, np.float32))):
            with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[1\]: expected") as caught:
                ask(broken)
            assert caught.value.param == "messages[0].content[1]"
