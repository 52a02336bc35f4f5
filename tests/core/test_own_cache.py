"""Models that keep transformers' own cache, code that must know its masks, and masks as numbers."""

import copy
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from cache_name import CACHE
from thorough import thorough
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function, eager_mask, sliding_window_causal_mask_function
from transformers.models.big_bird import modeling_big_bird

from model_adapters.attention import additive_mask, torchax_attention
from model_adapters.bridge.views import jax_view, to_jax_array, to_torch_tensor, torch_view
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import causal_class, random_model, tiny_model
from torchax_serve import serve, to_jax

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
IDS = torch.tensor([[50, 74, 34, 13, 23]])


def served_like_eager(model, num_new):
    """`model` on JAX, whose tokens are those that it has in eager PyTorch."""
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": num_new, "min_new_tokens": num_new}
    eager = copy.deepcopy(model).generate(IDS, do_sample=False, **options)
    served = to_jax(model)
    assert torch.equal(served.generate(IDS, do_sample=False, **options), eager)
    return served


class CountsOnItsCache(transformers.LlamaForCausalLM):
    """Keeps the positions of all tokens on the cache itself, as Qwen4 Exp did on transformers 5.17."""

    _can_compile_fullgraph = False

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand(input_ids.shape[0], -1)
        if cache is not None:
            if hasattr(cache, "seen"):
                positions = torch.cat([cache.seen, cache.seen[:, -1:] + 1], dim=1)
            cache.seen = positions
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **{CACHE: cache}, **kwargs)
        ahead = positions.cumsum(1)[:, -input_ids.shape[1] :] % self.config.vocab_size
        output.logits = output.logits + 100.0 * torch.nn.functional.one_hot(ahead, self.config.vocab_size)
        return output


def test_state_that_model_code_keeps_on_the_cache_itself_is_not_lost(monkeypatch):
    config = copy.deepcopy(tiny_config("llama"))
    model = random_model(CountsOnItsCache, config)
    served = served_like_eager(model, 5)
    assert f"outside of them ({CACHE}.seen)" in served._jax_runtime.cache_support.unsupported_reason
    monkeypatch.setattr(CountsOnItsCache, "_can_compile_fullgraph", True)  # what says so is believed, and then checked
    with pytest.raises(UnsupportedModelError, match=rf"outside of them \({CACHE}.seen\)"):
        to_jax(random_model(CountsOnItsCache, config)).generate(IDS, max_new_tokens=5)


class AddsLayers(transformers.LlamaForCausalLM):
    """Gives its cache a layer more, which a step that got none would miss."""

    _can_compile_fullgraph = False

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        if cache is not None and len(cache.layers) == self.config.num_hidden_layers:
            cache.layers.append(DynamicLayer())
        return super().forward(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, **{CACHE: cache}, **kwargs
        )


def test_layers_that_model_code_adds_to_its_cache_are_not_lost():
    model = random_model(AddsLayers, copy.deepcopy(tiny_config("llama")))
    served = served_like_eager(model, 5)
    reason = served._jax_runtime.cache_support.unsupported_reason
    assert "in the 2 layers of its cache, got AddsLayers, which makes 3" in reason
    with serve(model) as on_engine, pytest.raises(UnsupportedModelError, match="which makes 3 of them"):
        _ = on_engine.engine


@pytest.mark.parametrize("model_type", ["cpmant"])
def test_tokens_are_those_of_transformers_own_cache(model_type):
    model = tiny_model(model_type)
    served = served_like_eager(model, 3)
    assert served._jax_runtime.cache_support.unsupported_reason


@pytest.mark.parametrize("model_type", [thorough("rembert"), "bert"])
def test_an_encoder_that_generates(model_type):
    """RemBERT as it is published: its configuration makes it an encoder, and its attention reads its cache."""
    model = random_model(causal_class(model_type), tiny_config(model_type, as_decoder=False), seed=1)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), "min_new_tokens": 4}
    wanted = copy.deepcopy(model).generate(IDS.repeat(2, 1), do_sample=False, max_new_tokens=4, **padded)
    served = served_like_eager(model, 6)
    assert "configured as an encoder" in served._jax_runtime.cache_support.unsupported_reason
    assert torch.equal(served.generate(IDS.repeat(2, 1), do_sample=False, max_new_tokens=4, **padded), wanted)


def bigbird_with_the_masks_of_an_encoder(monkeypatch):
    """Its code as transformers had it until 5.17: a decoder whose tokens see those behind them."""
    source = Path(modeling_big_bird.__file__).read_text()
    for now, then in (
        ("create_bidirectional_mask, create_causal_mask", "create_bidirectional_mask"),
        ("create_causal_mask if self.config.is_decoder else create_bidirectional_mask", "create_bidirectional_mask"),
        (f"{CACHE}={CACHE} if self.config.is_decoder else None,", ""),
    ):
        source = source.replace(now, then)
    assert "create_causal_mask" not in source
    older = types.ModuleType("transformers.models.big_bird.modeling_older")
    older.__package__, older.__file__ = modeling_big_bird.__package__, modeling_big_bird.__file__
    monkeypatch.setitem(sys.modules, older.__name__, older)
    exec(compile(source, older.__file__, "exec"), vars(older))
    return random_model(older.BigBirdForCausalLM, tiny_config("big_bird"))


def test_a_decoder_with_the_masks_of_an_encoder_sees_no_room(monkeypatch):
    model = bigbird_with_the_masks_of_an_encoder(monkeypatch)
    served = served_like_eager(model, 6)
    assert "those of an encoder" in served._jax_runtime.cache_support.unsupported_reason


def test_the_cache_that_comes_back_goes_on():
    model = random_model(causal_class("cpmant"), tiny_config("cpmant"))
    eager, served = copy.deepcopy(model), to_jax(model)
    longer = torch.cat([IDS, torch.tensor([[7]])], 1)  # this type's code cuts off by itself what the cache has
    with torch.no_grad():
        theirs = eager(IDS, use_cache=True)
        wanted = eager(longer, **{CACHE: theirs[CACHE]}, use_cache=True).logits
    ours = served(IDS, use_cache=True)
    assert type(ours[CACHE]) is DynamicCache
    assert ours[CACHE].get_seq_length() == theirs[CACHE].get_seq_length() - 1
    found = served(longer, **{CACHE: ours[CACHE]}, use_cache=True).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def longformer(model_class, **options):
    config = tiny_config("longformer", as_decoder=False, overrides={"attention_window": [4, 4]})
    for name, value in options.items():
        setattr(config, name, value)
    return random_model(model_class, config)


def test_code_that_reads_its_masks_on_the_host_is_given_them():
    model = longformer(transformers.LongformerModel)
    eager, served = copy.deepcopy(model), to_jax(model)
    looks_at_all = torch.tensor([[1, 0, 0, 0, 1]])
    for given in ({}, {"global_attention_mask": looks_at_all}):
        mask = torch.tensor([[1, 1, 1, 1, 0]])
        with torch.no_grad():
            wanted = eager(IDS, attention_mask=mask, **given).last_hidden_state
        found = served(IDS, attention_mask=mask, **given).last_hidden_state
        torch.testing.assert_close(found[:, :4], wanted[:, :4], atol=1e-4, rtol=0)
    assert served._jax_runtime.steps.num_traces["forward"] <= 4
    other = torch.tensor([[9, 8, 7, 6, 5]])
    before = served._jax_runtime.steps.num_traces["forward"]
    with torch.no_grad():
        wanted = eager(other, attention_mask=mask).last_hidden_state
    found = served(other, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[:, :4], wanted[:, :4], atol=1e-4, rtol=0)
    assert served._jax_runtime.steps.num_traces["forward"] == before  # the ids are no constants of the program


def test_an_assert_on_values_is_answered_behind_the_step():
    model = random_model(transformers.XLMModel, tiny_config("xlm", as_decoder=False))
    eager, served = copy.deepcopy(model), to_jax(model)
    lengths = torch.tensor([4])
    with torch.no_grad():
        wanted = eager(IDS, lengths=lengths).last_hidden_state
    found = served(IDS, lengths=lengths).last_hidden_state
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    with pytest.raises(InvalidArgumentError, match="expected inputs that fit each other"):
        served(IDS, lengths=torch.tensor([6]))


@pytest.mark.parametrize("mask_function", [causal_mask_function, sliding_window_causal_mask_function(3)])
def test_masks_as_numbers_are_those_of_eager_code(mask_function):
    sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5, "mask_function": mask_function}
    mask = additive_mask(**sizes)
    assert torch.equal(mask, eager_mask(**sizes))
    q, k, v = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    scores = (q @ k.transpose(2, 3)) * 8**-0.5 + mask
    wanted = (scores.softmax(-1) @ v).transpose(1, 2)
    module = torch.nn.Identity()
    for given in (mask, torch.cat([mask], -1)):  # with its notes, and without
        views = [torch_view(to_jax_array(x)) for x in (q, k, v)]
        out, _ = torchax_attention(module, *views, given)
        torch.testing.assert_close(to_torch_tensor(jax_view(out)), wanted, atol=1e-5, rtol=0)
