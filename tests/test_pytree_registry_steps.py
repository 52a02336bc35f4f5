"""Caches that go in and out of a jitted function, step by step, against eager torch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cache_name import CACHE
from thorough import thorough
from transformers import cache_utils
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseStaticCacheLayer

import pytree_registry
from model_adapters.bridge import extract, views
from model_adapters.lowerings import install

pytree_registry.register_all()
install.install()

# torchax asks JAX for the 64-bit integers that torch code names; JAX says that it makes 32-bit ones of them.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

WINDOW = 6
STATIC_LAYERS = [
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
    cache_utils.StaticIndexedLayer,
    cache_utils.LinearAttentionAndStaticFullAttentionLayer,
    cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer,
    MiniMaxM3VLSparseStaticCacheLayer,
]


def as_jax(tree):
    return jax.tree.map(lambda leaf: views.to_jax_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def token(generator, length):
    return torch.from_numpy(generator.standard_normal((1, 2, length, 4)).astype(np.float32))


@pytest.mark.parametrize("cls", STATIC_LAYERS, ids=lambda cls: cls.__name__)
def test_a_static_layer_decodes_as_in_torch_without_a_trace_per_token(cls):
    offered = {"max_cache_len": 20, "sliding_window": WINDOW}
    wanted = inspect.signature(cls.__init__).parameters
    eager, layer = (cls(**{key: value for key, value in offered.items() if key in wanted}) for _ in range(2))
    traces = []

    def write(layer, keys, values):
        sizes = layer.get_mask_sizes(keys.shape[-2])
        extra = layer.update_indexer(keys[:, 0]) if hasattr(layer, "update_indexer") else None
        keys, values = layer.update(keys, values)
        return layer, keys, values, sizes, extra

    @jax.jit
    def step(layer, keys, values):
        traces.append(1)
        view = views.torch_view((layer, keys, values))
        with views.torchax.default_env():
            return views.jax_view(write(*view))

    generator = np.random.default_rng(0)
    layer = as_jax(layer)
    for length in (2, *[1] * 12):
        keys, values = token(generator, length), token(generator, length)
        layer, *got = step(layer, *as_jax((keys, values)))
        eager, *expected = write(eager, keys, values)
        np.testing.assert_array_equal(got[0], expected[0].numpy())
        np.testing.assert_array_equal(got[1], expected[1].numpy())
        assert [int(size) for size in got[2]] == list(expected[2])
        assert int(layer.get_seq_length()) == int(eager.get_seq_length())
        for name in ("keys", "values", "indexer_keys", "cumulative_length"):
            if hasattr(eager, name):
                np.testing.assert_array_equal(getattr(layer, name), getattr(eager, name).numpy())
    # A window goes through: the prompt, filling, its last place (one token short of full), full.
    assert len(traces) == (4 if cls.is_sliding else 2)


def test_a_chunk_into_a_filling_window_is_refused_and_has_a_way_out():
    def step(layer, chunk):
        view = views.torch_view((layer, chunk))
        with views.torchax.default_env():
            layer, chunk = view
            layer.update(chunk, chunk)
            return views.jax_view(layer)

    generator = np.random.default_rng(0)
    tokens = token(generator, 7)
    eager = cache_utils.StaticSlidingWindowLayer(max_cache_len=20, sliding_window=WINDOW)
    eager.update(tokens[:, :, :3], tokens[:, :, :3])
    eager.update(tokens[:, :, 3:], tokens[:, :, 3:])
    layer = as_jax(cache_utils.StaticSlidingWindowLayer(max_cache_len=20, sliding_window=WINDOW))
    layer = jax.jit(step)(layer, as_jax(tokens[:, :, :3]))
    with pytest.raises(pytree_registry.TracedCountError, match="token by token, or call under"):
        jax.jit(step)(layer, as_jax(tokens[:, :, 3:]))
    with pytree_registry.exact_counts():
        layer = jax.jit(step)(layer, as_jax(tokens[:, :, 3:]))
    np.testing.assert_array_equal(layer.keys, eager.keys.numpy())
    assert int(layer.get_seq_length()) == 7


def test_a_cache_from_jax_goes_on_in_eager_torch():
    config = transformers.Gemma3TextConfig(num_hidden_layers=2, sliding_window=WINDOW)
    tokens = token(np.random.default_rng(0), 10)
    eager = cache_utils.StaticCache(config, max_cache_len=20)
    for at in range(9):
        eager.update(tokens[:, :, at : at + 1], tokens[:, :, at : at + 1], 0)
    identity = jax.jit(lambda cache: cache)
    moved = jax.tree.map(views.to_torch_tensor, identity(as_jax(eager)))
    assert moved.get_seq_length() == 9
    assert type(moved.layers[0].cumulative_length_int) is int
    for cache in (moved, eager):
        cache.update(tokens[:, :, 9:], tokens[:, :, 9:], 0)
    np.testing.assert_array_equal(moved.layers[0].keys, eager.layers[0].keys)


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def build(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **HEADS)).eval()
    if kind != "mamba":
        layers = ["sliding_attention", "sliding_attention" if kind == "gemma3 all sliding" else "full_attention"]
        config = transformers.Gemma3TextConfig(**TINY, **HEADS, sliding_window=4, layer_types=layers)
        return transformers.Gemma3ForCausalLM(config).eval()
    config = transformers.MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=64)
    return transformers.MambaForCausalLM(config).eval()


def decode(model, cache_name, cache, ids, prompt_len):
    """Logits of every position, prompt and then token by token, the cache going through ``jax.jit``; the traces."""
    weights, function = extract.extract_jax(model)
    traces = []

    @jax.jit
    def step(weights, ids, cache):
        traces.append(1)
        out = function(weights, (), {"input_ids": ids, cache_name: cache, "use_cache": True})
        return out.logits, out[cache_name]

    logits = []
    cache = as_jax(cache)
    for part in (ids[:, :prompt_len], *ids[:, prompt_len:].split(1, dim=1)):
        out, cache = step(weights, as_jax(part), cache)
        logits.append(np.asarray(out))
    return np.concatenate(logits, axis=1), len(traces)


@pytest.mark.parametrize(
    ("kind", "cache", "num_traces"),
    [
        ("llama", "static", 2),
        thorough("gemma3", "static", 4),
        thorough("gemma3 all sliding", "dynamic", 4),
        ("mamba", "dynamic", 2),
    ],
)
def test_decoding_with_the_cache_as_a_pytree_gives_the_logits_of_eager_torch(kind, cache, num_traces):
    model = build(kind)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 64, (2, 8)))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits.numpy()
    if cache == "static":
        made = cache_utils.StaticCache(model.config, max_cache_len=12)
    else:
        made = cache_utils.DynamicCache(config=model.config)
    name = "cache_params" if kind == "mamba" and CACHE != "cache" else CACHE
    logits, traces = decode(model, name, made, ids, prompt_len=2)
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
    assert traces == num_traces


def test_encoder_decoder_caches_go_in_and_out():
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    generator = np.random.default_rng(0)
    prompt, ids = (torch.from_numpy(generator.integers(1, 64, (2, length))) for length in (5, 4))
    with torch.no_grad():
        expected = model(input_ids=prompt, decoder_input_ids=ids).logits.numpy()
    weights, function = extract.extract_jax(model)

    @jax.jit
    def first(weights, prompt, ids):
        return function(weights, (), {"input_ids": prompt, "decoder_input_ids": ids, "use_cache": True})

    @jax.jit
    def following(weights, encoder_outputs, ids, cache):
        inputs = {"encoder_outputs": encoder_outputs, "decoder_input_ids": ids, CACHE: cache}
        out = function(weights, (), {**inputs, "use_cache": True})
        return out.logits, out[CACHE]

    out = first(weights, as_jax(prompt), as_jax(ids[:, :1]))
    assert type(out) is transformers.modeling_outputs.Seq2SeqLMOutput
    cache, logits = out[CACHE], [out.logits]
    assert type(cache) is cache_utils.EncoderDecoderCache
    assert cache.is_updated == {0: True, 1: True}
    encoder_outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
    for at in range(1, 4):
        step, cache = following(weights, encoder_outputs, as_jax(ids[:, at : at + 1]), cache)
        logits.append(step)
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), expected, rtol=2e-5, atol=2e-5)
