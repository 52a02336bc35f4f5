"""Layers that attend to the keys of earlier ones (Gemma 3n, Gemma 4 E2B), packed, beside eager PyTorch."""

import dataclasses

import pytest
import torch
import transformers
from gemma_models import VOCAB, assistant_model, drawn
from test_recurrent_layers import eager_tokens, tokens
from thorough import thorough

from model_adapters.ops import registry
from torchax_serve import EngineOptions, serve

LENGTHS, NEW = (3, 8, 21, 40), 20
SIZES = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
KINDS = {
    "Gemma3n": {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0]},
    "Gemma4": {"global_head_dim": 16},
}
OPTIONS = EngineOptions(page_size=4, max_num_batched_tokens=48, max_model_len=128, max_num_seqs=4)


@pytest.fixture(scope="module", params=["Gemma4", thorough("Gemma3n")])
def gemma(request):
    """A kind of Gemma, a model of it, prompts, and eager tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}TextConfig")(**SIZES, **KINDS[request.param])
    model = drawn(getattr(transformers, f"{request.param}ForCausalLM")(config))
    prompts = [torch.randint(1, VOCAB, (length,)).tolist() for length in LENGTHS]
    expected = [eager_tokens(model, ids, NEW) for ids in prompts]
    assert len(set(map(tuple, expected))) == len(prompts)  # tokens that depend on the prompt
    return request.param, model, prompts, expected


def test_requests_share_steps_and_prefixes(gemma):
    _, model, prompts, expected = gemma
    with serve(model, engine=OPTIONS) as served, registry.record_calls() as calls:
        assert tokens(served, prompts, NEW) == expected
        assert [tokens(served, [each], NEW)[0] for each in prompts] == expected
        assert {op for op, _ in calls} >= {"paged_attention", "decode_attention"}
        assert served.stats().scheduler.num_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 8, "kv_cache_memory_bytes": 24 << 10}, id="short steps, preemption"),
        pytest.param({"speculative": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts"),
    ],
)
def test_tokens_do_not_depend_on_how_steps_are_cut(gemma, options):
    _, model, prompts, expected = gemma
    with serve(model, engine=dataclasses.replace(OPTIONS, **options)) as served:
        assert tokens(served, prompts, NEW) == expected


def test_an_assistant_reads_the_keys_that_layers_share(gemma):
    kind, model, prompts, expected = gemma
    if kind == "Gemma3n":  # which has no assistant
        return
    drafts = {"method": "mtp", "model": assistant_model(), "num_speculative_tokens": 3}
    with serve(model, engine=dataclasses.replace(OPTIONS, speculative=drafts)) as served:
        assert tokens(served, prompts, NEW) == expected
        assert served.stats().scheduler.num_draft_tokens > 0
