"""Sparse attention in the packed step: the tokens of eager PyTorch, where indexers leave most tokens out."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from test_recurrent_layers import NEW, VOCAB_SIZE, drawn, eager_tokens, prompts
from thorough import except_for, thorough

from model_adapters.caches.index_handles import HandleMode, IndexKeys, IndexPages, TopTokens
from model_adapters.caches.packed_batch import NotPackableError, pages_of
from model_adapters.errors import UnsupportedModelError
from torchax_serve import EngineOptions, SamplingParams, serve

TAKEN = 6
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "index_topk": TAKEN,
    "index_head_dim": 16,
    "index_n_heads": 16,  # of so many one is above zero, so that no scores are equal
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "first_k_dense_replace": 1,
}
SHARED = {"indexer_types": ["full", "shared", "full"]}
TYPES = {
    "deepseek_v32": {},
    "glm_moe_dsa": SHARED,
    "axk2": {},
    "hy_v4": SHARED,  # masks that are added, sinks
    "dots3_note_text": {
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "sliding_window_size": 6,
        "layer_types": ["sliding_attention", "indexed_attention", "indexed_attention"],
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 6},
        "index_topk": 2,
        "sliding_window": 7,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "qwen4_exp_text": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 6,
        "indexer_compress_ratio": 3,
        "hc_lowrank": 8,
    },
}
NGRAMS = {
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 16,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}
OPTIONS = EngineOptions(max_model_len=128, max_num_seqs=4, page_size=8, max_num_batched_tokens=20)


def tiny(model_type, **changes):
    return drawn(transformers.AutoConfig.for_model(model_type, **SIZES | TYPES[model_type] | changes))


@functools.cache
def expected(model_type, *lengths, num_new=NEW, **changes):
    model = tiny(model_type, **changes)
    return [eager_tokens(model, ids, num_new) for ids in prompts(*lengths)]


def tokens(model, ids, num_new=NEW):
    params = SamplingParams(max_new_tokens=num_new, temperature=0, ignore_eos=True)
    return [list(answer.token_ids) for answer in model.generate_batch(ids, params)]


LENGTHS = 45, 5, 1, 33, 12, 20


@pytest.mark.parametrize("model_type", except_for(["deepseek_v32", "hy_v4"], TYPES))
def test_tokens_are_those_of_eager_pytorch(model_type):
    """Of prompts in chunks beside rows that decode, of a request alone, and behind a prefix that is found."""
    wanted = expected(model_type, *LENGTHS)
    is_hybrid = model_type == "qwen4_exp_text"
    everything = expected(model_type, *LENGTHS, **({"indexer_budget": 129} if is_hybrid else {"index_topk": 128}))
    assert sum(one != other for one, other in zip(wanted, everything, strict=True)) > 2  # else nothing is tested
    with serve(tiny(model_type), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        assert tokens(model, prompts(*LENGTHS)) == wanted
        assert "not packed" not in model.engine.description
        assert tokens(model, prompts(*LENGTHS)[:1]) == wanted[:1]
        before = model.stats().scheduler.num_hit_tokens
        assert tokens(model, prompts(*LENGTHS)[:1]) == wanted[:1]
        assert model.stats().scheduler.num_hit_tokens - before == (32 if is_hybrid else 40)


def test_a_step_may_have_more_tokens_than_a_sequence():
    """DeepSeek-V4's code widens a mask that is narrower than the keys of a step."""
    options = dataclasses.replace(OPTIONS, max_model_len=24, max_num_batched_tokens=64)
    with serve(tiny("deepseek_v4"), engine=options) as model:
        assert tokens(model, prompts(15, 5, 11, 12), 8) == expected("deepseek_v4", 15, 5, 11, 12, num_new=8)
        assert "not packed" not in model.engine.description


N_GRAMS = """
import test_sparse_indexers as tests

wanted = tests.expected_with_ngrams()
with tests.serve(tests.tiny("qwen4_exp_text", **tests.NGRAMS), engine=tests.OPTIONS) as model:
    assert "not packed" not in model.engine.description
    assert tests.tokens(model, tests.prompts(*tests.LENGTHS)) == wanted
    assert tests.tokens(model, tests.prompts(*tests.LENGTHS)[:1]) == wanted[:1]
    assert model.stats().scheduler.num_hit_tokens == 32
"""


def expected_with_ngrams():
    model = tiny("qwen4_exp_text", **NGRAMS)
    return [eager_tokens(model, ids) for ids in prompts(*LENGTHS)]


@pytest.mark.parametrize("bits", [32, thorough(64)])
def test_embeddings_of_ngrams(bits):
    """Their hash function has numbers of 64 bits, which JAX has if it is told to."""
    if bits == 32:
        with pytest.raises(UnsupportedModelError, match="set JAX_ENABLE_X64=1"):
            serve(tiny("qwen4_exp_text", **NGRAMS), engine=OPTIONS)
        return
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", N_GRAMS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_indexer_that_takes_all_tokens_reads_none(monkeypatch):
    """Its keys are stored and not read; attention runs on the kernels that others have."""
    monkeypatch.setattr("model_adapters.caches.paged_layers.take_tokens", None)
    monkeypatch.setattr("model_adapters.caches.paged_cache.sparse_attention", None)
    with serve(tiny("deepseek_v32", index_topk=128), engine=OPTIONS) as model:
        assert tokens(model, prompts(*LENGTHS)) == expected("deepseek_v32", *LENGTHS, index_topk=128)
        assert "not packed" not in model.engine.description


def test_layers_of_a_kind_are_traced_once(caplog):
    """Also those that take the tokens of a layer before them."""
    config = {"num_hidden_layers": 6, "first_k_dense_replace": 0, "indexer_types": ["full", "shared", "shared"] * 2}
    (ids,) = prompts(9)
    wanted = eager_tokens(tiny("glm_moe_dsa", **config), ids, 2)
    with caplog.at_level("DEBUG", "torchax_serve"), serve(tiny("glm_moe_dsa", **config), engine=OPTIONS) as model:
        assert tokens(model, [ids], 2) == [wanted]
    assert "is traced by itself" not in caplog.text


@torch.no_grad()
def test_latents_in_8_bits_have_index_keys_as_they_are(monkeypatch):
    eager, (ids,) = tiny("deepseek_v32"), prompts(45)
    with serve(tiny("deepseek_v32"), engine=dataclasses.replace(OPTIONS, kv_cache_dtype="int8")) as model:
        cache, found = model.engine._runner._cache, tokens(model, [ids])
        assert [str(pages_of(pool).dtype) for pool in cache.pools] == ["int8"] * 3 + ["float32"] * 3
        assert [shape.width for shape in cache.plan.shapes] == [24] * 3 + [16] * 3
        scales = cache._scales
    kind = type(eager.model.layers[0].self_attn)
    own = kind.expand_kv

    def expand_rounded(self, latents, rotated):
        (by, _) = scales[self.layer_idx]
        rounded = (torch.round(x / by[0]).clamp(-127, 127) * by[0] for x in (latents, rotated))
        return own(self, *rounded)

    exact = eager_tokens(eager, ids)
    monkeypatch.setattr(kind, "expand_kv", expand_rounded)
    assert found == [eager_tokens(eager, ids)] != [exact]


def test_what_pages_have_no_form_for_is_refused():
    """Code that computes something else of index keys or scores is not packed."""
    keys = IndexKeys(IndexPages(None, 2, 9, None), (1, 9, 4))
    with HandleMode():
        with pytest.raises(NotPackableError, match="go through softmax, for which pages have no form"):
            torch.softmax(keys, -1)
        with pytest.raises(NotPackableError, match="from the left"):
            torch.matmul(keys, torch.zeros(1))
        mask = TopTokens(None, None).new_ones((1, 2, 9), torch.bool).scatter(-1, TopTokens(None, None), False)
        with pytest.raises(NotPackableError, match="a mask that is more than causal"):
            torch.ones(1, 1, 2, 9, dtype=torch.bool) & ~mask
        with pytest.raises(NotPackableError, match="a mask hides the tokens that an indexer takes"):
            torch.ones(1, 1, 2, 9, dtype=torch.bool) & mask
        with pytest.raises(NotPackableError, match="not hidden by the lowest number"):
            torch.zeros(1, 1, 2, 9).masked_fill(mask, -5.0)
    with pytest.raises(NotPackableError, match="outside of a packed step"):
        torch.relu(keys)
