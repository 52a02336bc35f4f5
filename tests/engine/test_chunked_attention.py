"""Llama 4's chunked attention in packed steps, beside eager PyTorch."""

import dataclasses

import pytest
import torch
from test_recurrent_layers import eager_tokens, tokens
from transformers import Llama4ForCausalLM, Llama4TextConfig

from model_adapters.ops import registry
from torchax_serve import EngineOptions, UnsupportedArgumentError, serve

CHUNK, NEW = 16, 24
LENGTHS = 5, 16, 17, 33, 45
OPTIONS = EngineOptions(page_size=4, max_num_batched_tokens=48, max_model_len=128)


@pytest.fixture(scope="module")
def llama():
    """A Llama 4 whose queries without rotary embeddings are scaled from position 3 on, prompts, and eager tokens."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=CHUNK, floor_scale=4,
        attn_scale=0.5, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    assert set(config.layer_types) == {"chunked_attention", "full_attention"}
    model = Llama4ForCausalLM(config).eval()
    prompts = [torch.randint(2, 100, (length,)).tolist() for length in LENGTHS]
    expected = [eager_tokens(model, ids, NEW) for ids in prompts]
    return model, prompts, expected


def test_requests_share_steps_and_prefixes(llama):
    """Prompts are cut inside of chunks and at their borders, alone, side by side, and again from stored pages."""
    model, prompts, expected = llama
    with serve(model, engine=OPTIONS) as served, registry.record_calls() as calls:
        assert tokens(served, prompts, NEW) == expected
        assert [tokens(served, [each], NEW)[0] for each in prompts] == expected
        assert {op for op, _ in calls} >= {"paged_attention", "decode_attention"}
        assert served.stats().scheduler.num_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 8, "kv_cache_memory_bytes": 100 << 10}, id="short steps, preemption"),
        pytest.param({"speculative": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts"),
    ],
)
def test_tokens_do_not_depend_on_how_steps_are_cut(llama, options):
    model, prompts, expected = llama
    with serve(model, engine=dataclasses.replace(OPTIONS, **options)) as served:
        assert tokens(served, prompts, NEW) == expected


def test_chunks_that_pages_do_not_divide(llama):
    """Forwards are per sequence then, with transformers' mask; drafts, whose tokens would differ, are refused."""
    model, prompts, expected = llama
    options = EngineOptions(page_size=32, max_model_len=128)
    with serve(model, engine=options) as served:
        assert tokens(served, prompts[2:4], NEW) == expected[2:4]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with (
        serve(model, engine=dataclasses.replace(options, speculative=drafts)) as served,
        pytest.raises(UnsupportedArgumentError, match="chunks of tokens that pages do not divide"),
    ):
        tokens(served, prompts[:1], NEW)
