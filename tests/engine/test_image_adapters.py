"""Prompts with images whose requests name adapters of the language model, beside eager peft, unmerged."""

import copy

import pytest
import torch
from adapter_models import PeftModels
from thorough import except_for

from model_adapters.errors import UnsupportedModelError
from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import EngineOptions, SamplingParams, serve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
NEW = 6
OPTIONS = EngineOptions(
    max_model_len=64, max_num_seqs=8, page_size=4, max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20
)
OF_TEXT = r".*language_model.*\.(q_proj|v_proj|o_proj|gate_proj)"
CONFIGS = {
    "wide": {"r": 4, "target_modules": OF_TEXT},
    "narrow": {"r": 2, "target_modules": OF_TEXT, "use_rslora": True},
}


@pytest.fixture(scope="module", params=except_for(["qwen2_5_vl"], ["qwen2_5_vl", "gemma3", "kimi_k25"]))
def models(request, tmp_path_factory):
    """A tiny model served with two adapters, eager peft, and the inputs of two prompts."""
    base = image_model(request.param).eval()
    inputs = [inputs_of(base, request.param, index) for index in range(2)]
    served_base = copy.deepcopy(base)
    peft = PeftModels(base, tmp_path_factory.mktemp("adapters"), CONFIGS)
    with serve(served_base, engine=OPTIONS, adapters=peft.folders()) as served:
        served.engine.check_integrity = True
        yield served, peft, inputs


def start(served, inputs, adapter):
    params = SamplingParams(max_new_tokens=NEW, min_new_tokens=NEW, temperature=0.0, adapter=adapter)
    return served.iter_tokens((), inputs=inputs, params=params)


def test_prompts_with_images_and_adapters_share_steps(models):
    served, peft, inputs = models
    rows = [(one, adapter) for adapter in ("wide", "narrow", None) for one in inputs]
    text = inputs[0]["input_ids"][:, :3]  # no placeholder is among them
    streams = [start(served, one, adapter) for one, adapter in rows]
    plain = SamplingParams(max_new_tokens=NEW, min_new_tokens=NEW, temperature=0.0, adapter="wide")
    of_text = served.iter_tokens(text[0].tolist(), params=plain)
    expected = [peft.media_tokens(adapter, one, NEW) for one, adapter in rows]
    assert [list(stream) for stream in streams] == expected
    assert list(of_text) == peft.media_tokens("wide", {"input_ids": text, "attention_mask": torch.ones_like(text)}, NEW)
    assert len({tuple(tokens) for tokens in expected}) > 3
    assert served._single_engine is None
    encoder = served.torch_model._jax_runtime.media_encoder
    assert encoder.num_encoded == 2, "an image is encoded once, whatever the adapters of its requests"


def test_pages_of_an_image_belong_to_the_adapter(models):
    served, peft, inputs = models
    for adapter in ("wide", "narrow"):  # also where this test runs without the others
        list(start(served, inputs[0], adapter))
    before = served.engine.stats().scheduler.num_hit_tokens
    list(start(served, inputs[0], "wide"))
    again = served.engine.stats().scheduler.num_hit_tokens - before
    assert again > 0
    served.unload_adapter("narrow")
    served.load_adapter("narrow", peft.folder("narrow"))
    hits = served.engine.stats().scheduler.num_hit_tokens
    assert list(start(served, inputs[0], "narrow")) == peft.media_tokens("narrow", inputs[0], NEW)
    assert served.engine.stats().scheduler.num_hit_tokens == hits


def test_adapters_of_an_encoder_are_refused(tmp_path):
    base = image_model("gemma3").eval()
    peft = PeftModels(copy.deepcopy(base), tmp_path, {"seen": {"r": 2, "target_modules": ["q_proj"]}})
    with pytest.raises(UnsupportedModelError, match=r"vision.*q_proj is a layer outside of the decoder") as caught:
        serve(base, engine=OPTIONS, adapters=peft.folders())
    assert "\n" not in str(caught.value)
