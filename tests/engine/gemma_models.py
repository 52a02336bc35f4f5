"""Tiny models of Gemma 4 and their assistants."""

import torch
import transformers
from weights import draw_matrices

VOCAB, WINDOW, NUM_NEW = 12, 8, 40
PROMPTS = [[3, 5, 7], [2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, 0]]
TEXT = {
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}


def target_model(kind="Gemma4"):
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"] * 2
    own = {"hidden_size": 32, "num_hidden_layers": 4, "layer_types": layers, "tie_word_embeddings": False}
    config = getattr(transformers, f"{kind}TextConfig")(**TEXT, **own)
    return drawn(getattr(transformers, f"{kind}ForCausalLM")(config))


def assistant_model(kind="Gemma4", *, backbone=32, **settings):
    torch.manual_seed(1)
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"hidden_size": 16, "num_hidden_layers": 3, "layer_types": layers}
    text = getattr(transformers, f"{kind}TextConfig")(**{**TEXT, **own, **settings})
    is_ordered = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}
    ordered = is_ordered if kind == "Gemma4Unified" else {}
    config = getattr(transformers, f"{kind}AssistantConfig")(text_config=text, backbone_hidden_size=backbone, **ordered)
    model = drawn(getattr(transformers, f"{kind}AssistantForCausalLM")(config))
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


def drawn(model):
    draw_matrices(model.eval(), std=0.4)
    return model


def generated(target, prompt):
    ids = torch.tensor([prompt])  # 0 is a token like others, not padding
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    return output[0].tolist()
