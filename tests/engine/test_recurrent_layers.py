"""Recurrent layers in the packed step: the tokens of eager PyTorch, in any company and any chunks."""

import logging
import re

import pytest
import torch
import transformers
from engine_requests import engine_request
from thorough import except_for
from weights import draw_matrices

from model_adapters.caches import state_layer
from torchax_serve import EngineOptions, RequestError, SamplingParams, serve

VOCAB_SIZE, NEW = 97, 12
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["linear_attention", "full_attention"]
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": MIXED,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
INKLING = {
    "rel_extent": 12,
    "log_scaling_n_floor": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
}
INKLING_2 = INKLING | {
    "unpadded_vocab_size": VOCAB_SIZE,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "num_hidden_layers": 4,
    "n_layers_per_attn_res_block": 2,
    "sliding_window_size": 16,
    "d_rel": 4,
}
TYPES = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4, "linear_value_head_dim": 8},
    "kimi_linear": EXPERTS
    | {
        "layer_types": MIXED,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "head_dim": 12,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "num_experts_per_token": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "granitemoehybrid": MAMBA2
    | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "layer_types": MIXED},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 8,
        "time_step_min": 0.5,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "time_step_min": 0.5,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "mamba_d_state": 8,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
    },
    "minimax": {
        "layer_types": MIXED,
        "block_size": 8,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "inkling_text": INKLING
    | {
        "layer_types": ["hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window_size": 128,
        "n_shared_experts": 1,
    },
    "inkling2_text": INKLING_2,
    "inkling2_loop_text": INKLING_2
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 3, "loop_gate_rank": 4}
    | {"sliding_window_size": 128},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 128,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "router_hidden_size": 16,
        "attention_bias": True,
    },
}
KEPT = [
    "qwen3_5_text",
    "falcon_h1",
    "mamba",
    "lfm2",
    "nemotron_h",
    "minimax",
    "recurrent_gemma",
    "zaya",
    "inkling2_text",
]
"""One of each op, among them a layer with pages and states, and a model without any pages."""
OPTIONS = EngineOptions(max_model_len=128, max_num_seqs=4, page_size=8, max_num_batched_tokens=20)


def tiny(model_type):
    return drawn(transformers.AutoConfig.for_model(model_type, **SIZES | TYPES[model_type]))


def drawn(config):
    """A model with weights that are drawn so that its answers differ, and do not end."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_matrices(model, std=0.2)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def eager_tokens(model, ids, num_new=NEW):
    row = torch.tensor([ids])
    return model.generate(row, max_new_tokens=num_new, do_sample=False)[0, len(ids) :].tolist()


def tokens(model, ids, num_new=NEW):
    params = SamplingParams(max_new_tokens=num_new, temperature=0, ignore_eos=True)
    return [list(answer.token_ids) for answer in model.generate_batch(ids, params)]


def request(ids):
    config = transformers.GenerationConfig(max_new_tokens=NEW)
    return engine_request(ids, config, SamplingParams(), seed=0)


# Their windows have few pages, which other requests take before the first prompt comes back.
EVICTED = ("inkling2_text", "inkling2_loop_text")


@pytest.mark.parametrize("model_type", except_for(KEPT, TYPES))
def test_tokens_are_those_of_eager_pytorch(model_type):
    """Of prompts in chunks beside other rows, of slots that others have had, and of a request alone."""
    eager = tiny(model_type)
    ids = prompts(45, 5, 1, 33, 12, 20)
    expected = [eager_tokens(eager, each) for each in ids]
    assert len({tuple(each) for each in expected}) > 3
    with serve(tiny(model_type), engine=OPTIONS) as model:
        assert tokens(model, ids) == expected
        assert "not packed" not in model.engine.description
        assert re.search(r"MB for the states of requests and of \d+ prefixes", model.engine.description)
        alone = [tokens(model, ids[:1]) for _ in range(2 if model_type in EVICTED else 1)]
        assert all(each == expected[:1] for each in alone)
        assert model.stats().scheduler.num_hit_tokens == 32  # 45 but for the last page and what is behind it


def test_a_state_of_nan_stays_with_its_request():
    model = tiny("qwen3_5_text")
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
    ids = prompts(9, 14)
    expected = [eager_tokens(model, each) for each in ids]
    with serve(model, engine=OPTIONS) as served:
        first, bad, second = (served.engine.submit(request(each)) for each in (ids[0], [5, 96, 7], ids[1]))
        with pytest.raises(RequestError, match="its logits were not finite numbers"):
            bad.result()
        assert [list(first.result()), list(second.result())] == expected
        assert tokens(served, [*ids, ids[0], ids[1]]) == expected * 2  # one of them in the slot of `bad`


def test_nobody_is_told_to_install_kernels_of_pytorch(caplog):
    model = tiny("mamba2")
    with caplog.at_level("WARNING", "transformers.integrations.hub_kernels"):
        logging.getLogger("transformers").propagate = True
        try:
            with serve(model, engine=OPTIONS) as served:
                tokens(served, prompts(5), 2)
        finally:
            logging.getLogger("transformers").propagate = False
    assert "falling back" not in caplog.text


def test_a_recurrence_that_is_not_known_runs_per_sequence(monkeypatch):
    """As of another release, whose functions have other arguments: they get handles that they cannot use."""
    from model_adapters.program import recurrent_functions

    monkeypatch.setattr(recurrent_functions, "recurrent_of", lambda tensor: None)
    eager, ids = tiny("qwen3_5_text"), prompts(9, 21)
    with serve(tiny("qwen3_5_text"), engine=OPTIONS) as model:
        assert tokens(model, ids) == [eager_tokens(eager, each) for each in ids]
        assert "not packed" in model.engine.description


def test_a_trace_that_fails_leaves_no_layer_to_others():
    """Mamba's scan takes the layer that was asked last, which must not be one of another trace."""
    with pytest.raises(ValueError), state_layer.asking():
        layer = state_layer.StateLayer({}, None, None, None, is_open=True)
        layer.recurrent_handle()
        assert state_layer.layer_asked_last() is layer
        raise ValueError
    assert state_layer.layer_asked_last() is None
