"""Tiny models that draft heads draft for."""

import random

import torch
import transformers
from engine_models import VOCAB_SIZE
from weights import draw_matrices

NUM_NEW = 24


def llama(dtype=torch.float32, hidden_size=32, vocab_size=VOCAB_SIZE):
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw_matrices(model.eval(), std=0.2)
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def prompts(sizes=(2, 9, 40)):
    rng = random.Random(8)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in sizes]


def text_of(model, prompt):
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    return output[0].tolist()


def deeper(model_type):
    """A model with one layer more than is served, which becomes the prediction layer."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 128,
    }
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    indexed = latent | {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}  # of which one is above zero
    more = {
        "deepseek_v3": latent,
        "glm4_moe": {"head_dim": 8, "num_key_value_heads": 2},
        "deepseek_v32": indexed,
        "glm_moe_dsa": indexed | {"indexer_types": ["full", "shared", "full"]},
    }[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw_matrices(model.eval(), std=0.2)
    model.generation_config.eos_token_id = None
    return model


def hybrid(model_type="qwen3_next", num_layers=4):
    """A model whose layers have recurrent states, but for the last one."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "layer_types": [*["linear_attention"] * (num_layers - 1), "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 128,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    config = transformers.AutoConfig.for_model(model_type, **sizes, **(experts if model_type == "qwen3_next" else {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw_matrices(model.eval(), std=0.2)
    model.generation_config.eos_token_id = None
    return model
