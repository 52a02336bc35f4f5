"""Objects that stand for those of transformers: the same for text requests, and replaced by them for the rest."""

import copy
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GenerationConfig

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams
from torchax_serve.start.recorded_objects import GenerationValues, RecordedConfig, RecordedTokenizer, TokenizerRecord
from torchax_serve.start.torch_side import TorchSide
from torchax_serve.text.detokenizer import Detokenizer

TEXTS = ("What is JAX?", " 你好, e\u0301 🙂\n\n", "<|im_start|>user")


@pytest.fixture(scope="module")
def real():
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture
def side(real):
    return TorchSide(lambda: SimpleNamespace(tokenizer=real))


@pytest.fixture
def recorded(real, side):
    template = real.chat_template
    record = TokenizerRecord(real.backend_tokenizer.to_str(), template, template, dict(real.special_tokens_map))
    backend = Future()
    backend.set_result(record.tokenizer())
    return RecordedTokenizer(side, record, backend)


@pytest.mark.parametrize("text", TEXTS)
def test_a_recorded_tokenizer_encodes_and_decodes_as_the_real_one(real, recorded, side, text):
    for with_special in (True, False):
        ids = recorded(text, add_special_tokens=with_special)["input_ids"]
        assert ids == real(text, add_special_tokens=with_special)["input_ids"]
        assert recorded.encode(text, add_special_tokens=with_special) == ids
        for skips in (True, False):
            decoded = recorded.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert decoded == real.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        detokenizers = [Detokenizer(each) for each in (recorded, real)]
        assert len({tuple(map(each.push, ids)) for each in detokenizers}) == 1
    assert recorded.get_chat_template(None, None) == real.get_chat_template()
    assert recorded.get_vocab() == real.get_vocab()
    assert side.loaded is None


def test_what_was_not_recorded_is_the_real_tokenizers(real, recorded, side):
    assert len(recorded) == len(real) and side.loaded is None
    assert recorded("a", return_offsets_mapping=True)["offset_mapping"][-1] == (0, 1)
    assert side.loaded is not None
    for name in ("all_special_ids", "bos_token_id", "eos_token_id"):
        assert getattr(recorded, name) == getattr(real, name)
    assert recorded.convert_tokens_to_ids("<bos>") == real.convert_tokens_to_ids("<bos>")


def test_what_no_request_uses_of_a_tokenizer_is_an_error(recorded):
    with pytest.raises(UnsupportedModelError, match="got padding_side; take the tokenizer of the model itself"):
        assert recorded.padding_side


def test_a_recorded_configuration_says_what_it_has_not():
    config = RecordedConfig({"vocab_size": 7}, ["top_k"])
    assert config.vocab_size == config.get_text_config(decoder=True).vocab_size == 7
    assert getattr(config, "top_k", 3) == 3
    with pytest.raises(UnsupportedModelError, match="expected one of vocab_size, which were recorded, got hidden_size"):
        assert config.hidden_size
    assert copy.copy(config).vocab_size == 7


def test_values_of_a_generation_config_merge_with_parameters_as_the_real_one():
    real = GenerationConfig(temperature=0.5, do_sample=True, top_p=0.9)
    recorded = GenerationValues(vars(real), real._get_default_generation_params())
    params = SamplingParams(max_new_tokens=7, top_k=3, stop="x")
    merged = params.merged_into(recorded)
    assert merged.written_into(real).to_dict() == params.merged_into(real).to_dict()
    assert copy.deepcopy(merged)._get_default_generation_params() == real._get_default_generation_params()


def test_the_torch_side_is_loaded_once():
    loads = []
    side = TorchSide(lambda: loads.append(1) or "real")
    assert (side.loaded, side.get(), side.get(), side.loaded, loads) == (None, "real", "real", "real", [1])


def test_a_process_that_ends_waits_for_the_tokenizer_it_is_making():
    script = """
import time
from unittest.mock import MagicMock
from torchax_serve.start.stored_model import StoredModel

def make():
    time.sleep(1)
    print("made")

record = MagicMock()
record.tokenizer.tokenizer = make
StoredModel("a", record, {}, None, MagicMock(), MagicMock()).tokenizer(MagicMock())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


@pytest.mark.parametrize("kind", [RecordedConfig, RecordedTokenizer])
def test_an_object_without_attributes_is_of_its_own_class(kind):
    """Profilers and debuggers look at objects before their `__init__` has run."""
    half_made = kind.__new__(kind)
    assert half_made.__class__ is kind
    assert not hasattr(half_made, "_side")
