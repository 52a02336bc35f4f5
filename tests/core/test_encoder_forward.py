"""Forwards in which a token sees what stands behind it: nothing may be padded there."""

import copy

import pytest
import torch
import transformers

from torchax_serve import to_jax

CONFIGS = {
    "bert": {"is_decoder": False},  # a causal language model by name, run as an encoder
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # causal by a mask of its own
}
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HEADS = {"layers": 1, "attention_heads": 4, "ffn_dim": 37}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("model_type", CONFIGS)
def test_logits_at_a_length_between_rungs(model_type):
    known = transformers.AutoConfig.for_model(model_type).to_dict().keys() | CONFIGS[model_type].keys()
    options = {name: value for name, value in COMMON.items() if name in known} | CONFIGS[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 64, (2, 11))
    with torch.no_grad():
        expected = eager(input_ids=ids).logits
    found = to_jax(copy.deepcopy(eager))(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_masks_of_a_detector_behind_a_backbone():
    """MaskFormer: a backbone of images, a decoder of queries, and masks at the size of the features."""
    swin = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    heads = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in HEADS.items()}
    detr = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32, num_queries=6, **heads,
        backbone_config=transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]),
    )  # fmt: skip
    sizes = {"fpn_feature_size": 32, "mask_feature_size": 32}
    torch.manual_seed(0)
    config = transformers.MaskFormerConfig(**sizes, backbone_config=swin, decoder_config=detr)
    eager = transformers.MaskFormerForInstanceSegmentation(config).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = eager(pixel_values=images)
    found = to_jax(copy.deepcopy(eager))(pixel_values=images)
    for name in ("masks_queries_logits", "class_queries_logits"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-4)
