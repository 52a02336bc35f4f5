"""Objects that stand for those of transformers: the same for text requests, and replaced by them for the rest."""

import copy
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams
from torchax_serve.start.recorded_tokenizer import RecordedTokenizer, TokenizerRecord
from torchax_serve.start.torch_side import ABSENT, Deferred, RecordedConfig, RecordedGenerationConfig, TorchSide
from torchax_serve.text.detokenizer import Detokenizer

TEXTS = ("What is JAX?", " 你好, e\u0301 🙂\n\n", "<|im_start|>user")


@pytest.fixture(scope="module")
def real():
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture
def side(real):
    config = GenerationConfig(temperature=0.5, do_sample=True)
    return TorchSide(lambda: SimpleNamespace(tokenizer=real, generation_config=config, config=config))


@pytest.fixture
def recorded(real, side):
    template = real.chat_template
    record = TokenizerRecord(real.backend_tokenizer.to_str(), template, template, dict(real.special_tokens_map))
    backend = Future()
    backend.set_result(record.tokenizer())
    return RecordedTokenizer(side, lambda model: model.tokenizer, record, backend)


@pytest.mark.parametrize("text", TEXTS)
def test_a_recorded_tokenizer_encodes_and_decodes_as_the_real_one(real, recorded, side, text):
    for with_special in (True, False):
        ids = recorded(text, add_special_tokens=with_special)["input_ids"]
        assert ids == real(text, add_special_tokens=with_special)["input_ids"]
        for skips in (True, False):
            decoded = recorded.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert decoded == real.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        detokenizers = [Detokenizer(each) for each in (recorded, real)]
        assert len({tuple(map(each.push, ids)) for each in detokenizers}) == 1
    assert recorded.get_chat_template(None, None) == real.get_chat_template()
    assert recorded.get_vocab() == real.get_vocab()
    assert side.loaded is None


def test_what_was_not_recorded_is_the_real_tokenizers(real, recorded, side):
    assert recorded("a", return_offsets_mapping=True)["offset_mapping"][-1] == (0, 1)
    assert side.loaded is not None
    assert len(recorded) == len(real)
    assert isinstance(recorded, PreTrainedTokenizerBase)


def test_an_attribute_is_set_on_the_real_object(side):
    config = RecordedConfig(side, lambda model: model.config, {"temperature": 0.5, "top_k": ABSENT})
    assert config.temperature == 0.5
    assert not hasattr(config, "top_k")
    assert side.loaded is None
    config.temperature = 0.7
    assert side.get().config.temperature == config.temperature == 0.7


def test_a_generation_config_merges_with_parameters_as_the_real_one(side):
    real = GenerationConfig(temperature=0.5, do_sample=True, top_p=0.9)
    values = {**vars(real), "_defaults": real._get_default_generation_params()}
    recorded = RecordedGenerationConfig(side, lambda model: model.generation_config, values)
    params = SamplingParams(max_new_tokens=7, top_k=3, stop="x")
    merged = params.merged_into(recorded)
    assert side.loaded is None
    assert merged.written_into(real).to_dict() == params.merged_into(real).to_dict()
    assert copy.deepcopy(merged)._get_default_generation_params() == real._get_default_generation_params()


def test_the_torch_side_is_loaded_once():
    loads = []
    side = TorchSide(lambda: loads.append(1) or SimpleNamespace(name="real"))
    report = Deferred(side, lambda model: model, {"quantization": ""})
    assert report.quantization == ""
    assert not loads
    assert (report.name, report.name, loads) == ("real", "real", [1])


def test_a_process_that_ends_waits_for_the_tokenizer_it_is_making():
    script = """
import time
from unittest.mock import MagicMock
from torchax_serve.entrypoints.recorded_model import _tokenizer

def make():
    time.sleep(1)
    print("made")

_tokenizer(MagicMock(), MagicMock(tokenizer=make))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


def test_an_object_without_attributes_is_of_its_own_class():
    """Profilers and debuggers look at objects before their `__init__` has run."""
    half_made = Deferred.__new__(Deferred)
    assert isinstance(half_made, Deferred) and not isinstance(half_made, PreTrainedTokenizerBase)
    assert not hasattr(half_made, "vocab_size")
