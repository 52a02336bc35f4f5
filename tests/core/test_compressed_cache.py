"""The cache of DeepSeek-V4 in fixed shapes, beside transformers' own, which grows."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cache_name import CACHE
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.compressed_layer import CompressedLayer
from model_adapters.caches.device_cache import TraceCache, empty_layers
from model_adapters.caches.layers import IndexedLayer
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import causal_class, random_model
from torchax_serve import to_jax

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
KINDS = {"heavily_compressed_attention": DeepseekV4HCACache, "compressed_sparse_attention": DeepseekV4CSACache}
IDS = torch.tensor([[50, 74, 34, 13, 23, 7, 61, 2, 9], [3, 80, 11, 54, 29, 33, 70, 15, 42]])
CAPACITY = 40


@pytest.fixture(scope="module")
def config():
    config = copy.deepcopy(tiny_config("deepseek_v4"))
    config.layer_types, config.mlp_layer_types, config.num_hidden_layers = list(KINDS), ["moe", "moe"], 2
    return config


def run(layer, name, kv, gate, rate, width, tensor, array):
    """What model code does with new tokens [1, T, dim]: entries are sums of a block, and of the half before it."""
    blocks, gates, first = layer.store_compression_weights(name, tensor(kv), tensor(gate))
    blocks, gates = array(blocks).reshape(1, -1, rate, kv.shape[2]), array(gates).reshape(1, -1, rate, kv.shape[2])
    entries = np.zeros((1, 0, width), np.float32)
    if blocks.shape[1]:
        halves = (blocks + gates)[..., :width].sum(2)
        entries = 2.0 * (blocks + gates)[..., -width:].sum(2)
        if hasattr(layer, "overlap_kv") or getattr(layer, "overlaps", False):
            before = layer.update_overlap_state(name, tensor(blocks), tensor(gates), width)
            entries[:, 1:] += halves[:, :-1]
            if before[0] is not None:
                known = array(before[0]) + np.where(np.isinf(array(before[1])), 0.0, array(before[1]))
                entries[:, 0] += known.sum(1)
    return array(layer.update_compressor_states(name, tensor(entries))), int(array(first))


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_entries_are_those_of_the_cache_that_grows(config, kind, lengths, seed):
    theirs, layer = KINDS[kind](config), empty_layers(config, CAPACITY)[list(KINDS).index(kind)]
    assert isinstance(layer, CompressedLayer)
    rate, width, past = layer.rate, 3, 0
    random = np.random.default_rng(seed)
    for length in lengths:
        cache = TraceCache((layer,), torch_view(jnp.int32(past)))
        for name in theirs.buffer_kv:
            dim = width * (2 if layer.overlaps else 1)
            kv, gate = random.standard_normal((2, 1, length, dim)).astype(np.float32)
            args = (name, kv, gate, rate, width)
            expected, first = run(theirs, *args, torch.from_numpy, np.asarray)
            found, our_first = run(
                layer, *args, lambda x: torch_view(jnp.asarray(x)), lambda x: np.asarray(jax_view(x))
            )
            num_entries = (past + length) // rate
            assert expected.shape[1] == num_entries and found.shape[1] in (num_entries, CAPACITY // rate)
            np.testing.assert_allclose(found[:, :num_entries], expected, rtol=1e-5, atol=1e-5)
            assert our_first == first
            seen = np.asarray(jax_view(layer.mask_of_open(CAPACITY // rate, torch.float32)))
            assert list(np.isfinite(seen)) == [i < num_entries for i in range(CAPACITY // rate)]
        cache.states()
        past += length
    ours = KINDS[kind](config)
    layer.buffers = {name: tuple(map(jax_view, pair)) for name, pair in layer.buffers.items()}
    layer.overlap = {name: tuple(map(jax_view, pair)) for name, pair in layer.overlap.items()}
    for name in ours.buffer_kv:
        setattr(layer, f"{name}_pool", jax_view(getattr(layer, f"{name}_pool")))
    layer.fill(ours, past)
    for attribute in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
        for name, tensor in getattr(theirs, attribute, {}).items():
            copied = getattr(ours, attribute)[name]
            assert (copied is None) == (tensor is None)
            if tensor is not None:
                torch.testing.assert_close(copied, tensor, rtol=1e-5, atol=1e-5)
    assert ours.entry_count == theirs.entry_count


@pytest.mark.thorough
def test_caches_go_over_to_transformers_and_back_and_beams_reorder_them(config):
    model = random_model(causal_class("deepseek_v4"), config)
    eager = copy.deepcopy(model)
    served = to_jax(model)
    assert served._jax_runtime.cache_support.unsupported_reason is None
    options = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    beams = {"num_beams": 2, "length_penalty": 0.0}
    without = eager.generate(IDS, **options, **beams, use_cache=False)  # 5.17 leaves compressed keys where beams move
    assert torch.equal(served.generate(IDS, **options, **beams), without)
    answer = served.generate(IDS, **options, return_dict_in_generate=True)
    assert torch.equal(answer.sequences, eager.generate(IDS, **options))
    ours = answer[CACHE]
    assert type(ours) is DynamicCache
    newest = answer.sequences[:, -1:]
    with torch.no_grad():
        whole = eager(answer.sequences[:, :-1], use_cache=True)
        expected = eager(newest, **{CACHE: copy.deepcopy(whole[CACHE])}).logits
        on_ours = eager(newest, **{CACHE: ours}).logits
    on_theirs = served(newest, **{CACHE: whole[CACHE]}).logits
    torch.testing.assert_close(on_ours, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(on_theirs, expected, rtol=1e-4, atol=1e-4)


def test_counts_of_one_forward_are_cleared_after_it():
    compressed = CompressedLayer(CAPACITY, 4, 2, overlaps=False)
    compressed.num_new = 3
    indexed = IndexedLayer(CAPACITY)
    indexed.num_indexed = 3
    TraceCache((compressed, indexed), None).states()
    assert compressed.num_new == indexed.num_indexed == 0
