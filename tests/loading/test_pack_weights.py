"""A served model whose linear layers lie packed answers as one whose layers lie as they were."""

import weakref

import jax
import numpy as np
import pytest
import torch
from loading_models import tiny_folder, tiny_model
from transformers import GenerationConfig

from model_adapters.bridge.extract import extract_jax
from model_adapters.loading import compress_weights, load_model
from model_adapters.ops import compressed_weight
from model_adapters.ops.compressed_weight import CompressedWeight
from model_adapters.ops.cpu import ffi
from torchax_serve import EngineOptions, serve
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.runtime.eager import EagerReference

REASON = ffi.packing_unsupported_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no packed weights on this processor: {REASON}")
PROMPTS = [[5, 9, 12], list(range(3, 33)), [7], [60, 2, 31, 8, 8]]


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(compress_weights, "MIN_BYTES", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama", torch.bfloat16)


def packed_names(model):
    return {name for name, weight in model._loaded.weights.items() if isinstance(weight, CompressedWeight)}


def answers(model):
    config = GenerationConfig(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    running = [model.iter_tokens(prompt, config) for prompt in PROMPTS]  # side by side
    return [list(tokens) for tokens in running]


def test_a_served_model_has_its_linear_layers_packed_and_the_same_tokens(folder):
    options, eager = EngineOptions(batch_invariant=True), tiny_model("llama", torch.bfloat16)
    with serve(folder, engine=options, pack_weights=False) as plain, serve(folder, engine=options) as model:
        linear = {f"{n}.weight" for n, m in plain._loaded.module.named_modules() if isinstance(m, torch.nn.Linear)}
        assert packed_names(plain) == set()
        assert packed_names(model) == linear
        assert answers(model) == answers(plain)
        ids = torch.tensor([PROMPTS[3]])
        np.testing.assert_allclose(model(ids).logits.float(), eager(ids).logits.detach().float(), atol=0.02)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_packed_and_read_by_products_alone(model_type, tmp_path, monkeypatch):
    texts, compile_one = [], CachedFunction.compile

    def recorded(self, *args, **kwargs):
        program = compile_one(self, *args, **kwargs)
        texts.append((program[0] if isinstance(program, tuple) else program).as_text())
        return program

    tiny_folder(tmp_path, model_type, torch.bfloat16)
    options = EngineOptions(batch_invariant=True)
    with serve(tmp_path, engine=options, pack_weights=False) as plain:
        expected = answers(plain)
    monkeypatch.setattr(CachedFunction, "compile", recorded)
    with serve(tmp_path, engine=options) as model:
        experts = {name for name, each in model._loaded.module.named_parameters() if each.ndim == 3}
        assert experts and experts <= packed_names(model)
        assert answers(model) == expected
    assert any("tas_packed_routed_linear" in text for text in texts)
    assert not any('"tas_unpack"' in text for text in texts)


def test_experts_stored_the_other_way_round_stay_as_they_are(tmp_path):
    tiny_model("gpt_oss", torch.bfloat16).save_pretrained(tmp_path)
    with serve(tmp_path) as model:
        experts = {name for name, each in model._loaded.module.named_parameters() if each.ndim == 3}
        assert experts and not experts & packed_names(model)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_eager_pytorch_beside_it_has_every_bit(model_type, tmp_path):
    loaded = load_model(tiny_folder(tmp_path, model_type, torch.bfloat16))
    assert compress_weights.pack_weights(loaded.module, loaded.weights)
    eager = dict(EagerReference(loaded).module.named_parameters())
    for name, expected in tiny_model(model_type, torch.bfloat16).named_parameters():
        assert torch.equal(eager[name], expected), name


def test_a_tied_head_and_the_table_that_is_looked_up_in_are_one_packed_weight(tmp_path):
    tiny_model("llama", torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path)
    with serve(tmp_path, engine=EngineOptions(batch_invariant=True)) as model:
        weights = model._loaded.weights
        assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
        assert weights["lm_head.weight"].plain is None
        got = answers(model)
    with serve(tmp_path, engine=EngineOptions(batch_invariant=True), pack_weights=False) as plain:
        assert got == answers(plain)


def test_what_was_packed_is_freed_before_the_next_is_packed(folder, monkeypatch):
    """Of all arrays that are packed, one for each thread is there in both forms at the most."""
    loaded, compress_weight, alive = load_model(folder), compress_weights.compressed_weight.compress_weight, []
    linear = {f"{n}.weight" for n, m in loaded.module.named_modules() if isinstance(m, torch.nn.Linear)}
    before = [weakref.ref(loaded.weights[name]) for name in sorted(linear)]

    def counted(*args, **kwargs):
        packed = compress_weight(*args, **kwargs)
        alive.append(sum(ref() is not None for ref in before))
        return packed

    monkeypatch.setattr(compress_weights.compressed_weight, "compress_weight", counted)
    monkeypatch.setattr(compress_weights.os, "cpu_count", lambda: 1)
    assert compress_weights.pack_weights(loaded.module, loaded.weights) == len(before)
    assert alive == list(range(len(before), 0, -1))


def test_what_is_small_or_of_another_type_stays_as_it_is(folder, monkeypatch):
    with serve(folder, dtype="float32") as model:
        assert packed_names(model) == set()
    monkeypatch.setattr(compress_weights, "MIN_BYTES", 1 << 20)
    with serve(folder) as model:
        assert packed_names(model) == set()


def test_what_is_not_packed_lies_in_large_pages(folder, monkeypatch):
    moved = []
    monkeypatch.setattr(compress_weights, "in_huge_pages", moved.append)
    with serve(folder) as model:
        weights = model._loaded.weights
        assert len(moved) == len({id(array) for array in moved})
        assert {id(array) for array in moved} == {id(weights[name]) for name in weights.keys() - packed_names(model)}
    moved.clear()
    with serve(tiny_model("llama", torch.bfloat16)):
        assert moved == []  # a caller's memory is left alone


def test_an_object_keeps_the_weights_that_it_shares():
    with serve(tiny_model("llama", torch.bfloat16)) as model:
        assert packed_names(model) == set()


def test_a_layer_that_computes_something_else_stays_as_it_is():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    module = torch.nn.Sequential(torch.nn.Linear(64, 64), Scaled(64, 64)).to(torch.bfloat16)
    weights, _ = extract_jax(module)
    assert compress_weights.pack_weights(module, weights) == 1
    assert isinstance(weights["0.weight"], CompressedWeight)
    assert not isinstance(weights["1.weight"], CompressedWeight)


def index_lengths(weights):
    packed = [weight for weight in weights.values() if isinstance(weight, CompressedWeight)]
    return {shape: {each.index.size for each in packed if each.shape == shape} for shape in {w.shape for w in packed}}


def test_indices_of_one_shape_have_one_length_so_that_layers_share_a_traced_function():
    def matrix(num_uncompressed):
        values = np.tile(2.0 ** np.arange(-31, 1), (32, 32)).astype(np.float32)  # of sixteen high bytes
        values[0, : 8 * num_uncompressed : 8] = 1e-30
        return jax.numpy.asarray(values, jax.numpy.bfloat16)

    arrays = {name: matrix(number) for name, number in [("a", 0), ("b", 1), ("c", 2)]}
    weights = {name: compressed_weight.compress_weight(array) for name, array in arrays.items()}
    weights |= {"tied": weights["a"], "dense": arrays["a"]}
    assert [len(found) for found in index_lengths(weights).values()] == [3]
    compress_weights.equalize_indices(weights)
    assert weights["tied"] is weights["a"] and weights["dense"] is arrays["a"]
    assert [len(found) for found in index_lengths(weights).values()] == [1]
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(weights[name].unpacked()), np.asarray(array))


def test_one_index_that_is_much_longer_does_not_lengthen_the_others():
    lengths = [100] * 50 + [90] * 50 + [5000]
    assert compress_weights._common_length(lengths, num_bytes=2000) == 100
    assert compress_weights._common_length(lengths, num_bytes=2_000_000) == 5000
