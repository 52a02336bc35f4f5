"""Tiny random models whose greedy choices are clear and differ from prompt to prompt."""

import copy
import functools

import torch
import transformers
from weights import draw_matrices

VOCAB_SIZE = 97

ARCHITECTURES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 8,  # shorter than the prompts
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 1},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"state_size": 8},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MORE = {
    "youtu": {**LATENT, "num_key_value_heads": 4},  # latent attention, without experts
    "qwen3_5_text": {  # a gated delta rule in one layer, attention in the other
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # counts its positions by itself
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
}


@functools.cache
def _shared(model_type: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = transformers.AutoConfig.for_model(model_type, **{**common, **(ARCHITECTURES | MORE)[model_type]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    draw_matrices(model, std=0.2)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A model of its own, random weights, attention as eager code; the same weights at each call."""
    return copy.deepcopy(_shared(model_type, dtype))


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of different length, padded on the left: input_ids and attention_mask, int64[2, 11]."""
    ids = torch.randint(3, VOCAB_SIZE, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = 0
    return ids, mask
