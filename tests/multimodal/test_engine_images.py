"""Prompts with images in the engine's steps, next to each other and to text, beside eager PyTorch."""

import copy

import jax.numpy as jnp
import pytest
import torch

from model_adapters.bridge.views import torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.program import media
from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import EngineOptions, serve
from torchax_serve.executors import choice

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
NEW = 6
BUDGET = 19  # of tokens in a step: two prompts of 13 do not fit, so that one of them is cut


class Tiny:
    """A tiny model on the engine, with eager PyTorch's answers."""

    def __init__(self, model_type):
        self.model_type = model_type
        self.eager = image_model(model_type).eval()
        self.inputs = [inputs_of(self.eager, model_type, index) for index in range(2)]
        self.text = [4, 5, 6, 7, 8, 9]

    def start(self):
        budget = 32 if self.model_type == "paligemma" else BUDGET  # its prompts have 25 tokens
        options = EngineOptions(
            max_model_len=64, max_num_seqs=4, page_size=4, max_num_batched_tokens=budget, kv_cache_memory_bytes=1 << 20
        )
        self.served = serve(copy.deepcopy(self.eager), engine=options)
        self.served.engine.check_integrity = True
        self.config = copy.deepcopy(self.served.generation_config)
        self.config.update(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        return self

    @torch.no_grad()
    def expected(self, **inputs):
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        return self.eager.generate(**copy.deepcopy(inputs), **options)[0, -NEW:].tolist()

    def stream(self, inputs):
        return self.served.iter_tokens((), self.config, inputs=inputs)

    def tokens(self, inputs):
        return list(self.stream(inputs))

    @property
    def counts(self):
        encoder = self.served.torch_model._jax_runtime.media_encoder
        return encoder.num_encoded, encoder.num_encoder_runs

    @property
    def num_hit_tokens(self):
        return self.served.engine.stats().scheduler.num_hit_tokens


@pytest.fixture(scope="module", params=("qwen2_5_vl", "gemma3"))
def tiny(request):
    made = Tiny(request.param).start()
    with made.served:
        yield made


def test_images_of_several_requests_in_one_batch(tiny):
    assert "per-sequence" not in tiny.served.engine.description
    check_batch(tiny)


def test_images_beside_recurrent_layers():
    tiny = Tiny("lfm3_vl").start()
    with tiny.served:
        assert "per-sequence" not in tiny.served.engine.description
        check_batch(tiny)


def test_images_in_forwards_per_request(monkeypatch):
    def refuse(runtime, sizes):
        raise NotPackableError("tested")

    monkeypatch.setattr(choice, "packed_executor", refuse)
    tiny = Tiny("lfm3_vl").start()
    with tiny.served:
        assert "per-sequence" in tiny.served.engine.description
        check_batch(tiny)


def test_inputs_of_layers_that_are_those_of_the_tokens():
    tiny = Tiny("gemma4").start()
    with tiny.served:
        assert "per-sequence" not in tiny.served.engine.description
        check_batch(tiny)


def test_inputs_of_layers_that_are_of_images_are_not_left_out():
    values = ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [1.0])
    found, same, other, short = (torch_view(jnp.asarray(each)) for each in values)
    assert bool(media._are_equal({"x": found, "y": [found]}, {"x": same, "y": [same]}))
    assert not bool(media._are_equal({"x": found, "y": [found]}, {"x": same, "y": [other]}))
    for of_text in ({}, {"x": short}, {"x": [found, found]}):
        with pytest.raises(UnsupportedModelError, match="its language model gets x of images"):
            media._are_equal({"x": found}, of_text)


def test_a_prompt_of_which_every_token_sees_all_others():
    """Pages of PaliGemma hold what the text behind them says: another question finds none of the image's."""
    tiny = Tiny("paligemma").start()
    first, second = tiny.inputs
    other = {**first, "input_ids": first["input_ids"].clone()}
    other["input_ids"][0, -1] += 1
    expected = [tiny.expected(**inputs) for inputs in (first, other, second)]
    assert len(set(map(tuple, expected))) == 3
    with tiny.served:
        assert "per-sequence" not in tiny.served.engine.description
        assert [tiny.tokens(inputs) for inputs in (first, other, second)] == expected
        assert (tiny.num_hit_tokens, tiny.served._single_engine) == (0, None)
        streams = [tiny.stream(inputs) for inputs in (first, second)]  # found, and in one batch
        assert [list(stream) for stream in streams] == [expected[0], expected[2]]
        assert tiny.num_hit_tokens > 0
        longer = {name: _repeated(name, value, 12) for name, value in first.items()}
        assert tiny.tokens(longer) == tiny.expected(**longer)
        assert tiny.served._single_engine is not None  # more than a step has room for


def check_batch(tiny):
    text = tiny.served.iter_tokens(tiny.text, tiny.config)
    streams = [tiny.stream(inputs) for inputs in tiny.inputs]
    answers = [list(stream) for stream in streams]
    assert answers == [tiny.expected(**inputs) for inputs in tiny.inputs]
    assert answers[0] != answers[1]
    ids = torch.tensor([tiny.text])
    assert list(text) == tiny.expected(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert tiny.served._single_engine is None


def test_pages_and_features_are_found_by_the_pixels(tiny):
    expected = [tiny.expected(**inputs) for inputs in tiny.inputs]
    for inputs in tiny.inputs:
        tiny.tokens(inputs)
    encoded, hits = tiny.counts, tiny.num_hit_tokens
    assert [tiny.tokens(inputs) for inputs in tiny.inputs] == expected
    assert tiny.counts == encoded
    full_pages = [(inputs["input_ids"].shape[1] - 1) // 4 for inputs in tiny.inputs]
    assert tiny.num_hit_tokens - hits == 4 * sum(full_pages)
    hits = tiny.num_hit_tokens
    other = {**tiny.inputs[0], "pixel_values": tiny.inputs[1]["pixel_values"]}
    assert tiny.tokens(other) == tiny.expected(**other)
    assert tiny.num_hit_tokens - hits == 4  # the text in front of the image
    longer = {name: _beside(name, value, [8, 9], 0) for name, value in tiny.inputs[1].items()}
    encoded = tiny.counts
    assert tiny.tokens(longer) == tiny.expected(**longer)
    assert tiny.counts == encoded
    hits, later_turn = tiny.num_hit_tokens, [*tiny.expected(**tiny.inputs[0]), 8, 9]
    longer = {name: _beside(name, value, later_turn, 1) for name, value in tiny.inputs[0].items()}
    assert tiny.tokens(longer) == tiny.expected(**longer)
    assert tiny.num_hit_tokens - hits >= 4 * full_pages[0]  # the image's pages, and those of the answer


def _beside(name, value, ids, place):
    """The inputs with tokens of text in front (place 0) or behind (place 1)."""
    if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        return value
    text = torch.tensor([{"input_ids": ids, "attention_mask": [1] * len(ids)}.get(name, [0] * len(ids))])
    return torch.cat([value, text] if place else [text, value], 1)


def test_two_images_in_a_prompt(tiny):
    both = {}
    for name, value in tiny.inputs[0].items():
        is_text = value.ndim == 2 and value.shape == tiny.inputs[0]["input_ids"].shape
        both[name] = torch.cat([value, tiny.inputs[1][name]], int(is_text))
    assert tiny.tokens(both) == tiny.expected(**both)


def test_bad_prompts_end_no_other_request(tiny):
    good = tiny.stream(tiny.inputs[0])
    placeholders = tiny.inputs[0]["input_ids"][0, 5:6]
    for extra, words in ((1, "placeholder token"), (-1, "placeholder token")):
        ids = tiny.inputs[0]["input_ids"]
        ids = torch.cat([ids[:, :5], placeholders[None].repeat(1, extra), ids[:, 5:]], 1) if extra > 0 else ids[:, 1:]
        if extra < 0:
            ids = torch.cat([tiny.inputs[0]["input_ids"][:, :4], tiny.inputs[0]["input_ids"][:, 5:]], 1)
        bad = {**tiny.inputs[0], "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        bad |= {name: _sized(bad[name], ids) for name in ("token_type_ids", "mm_token_type_ids") if name in bad}
        with pytest.raises(InvalidArgumentError, match=words) as caught:
            tiny.stream(bad)
        assert "\n" not in str(caught.value)
    longest = {name: _repeated(name, value) for name, value in tiny.inputs[0].items()}
    with pytest.raises(InvalidArgumentError, match="expected a prompt of at most 63 tokens, its images among them"):
        tiny.stream(longest)
    assert list(good) == tiny.expected(**tiny.inputs[0])


def _sized(value, ids):
    return torch.cat([value, value[:, -1:].repeat(1, ids.shape[1])], 1)[:, : ids.shape[1]]


def _repeated(name, value, number=70):
    """The inputs with so many tokens of text behind."""
    if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        return value
    last = {"input_ids": 8, "attention_mask": 1}.get(name, 0)
    return torch.cat([value, torch.full((1, number), last)], 1)
