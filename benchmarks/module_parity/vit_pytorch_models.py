"""Cases of vit-pytorch: its vision transformers, small."""

from __future__ import annotations

import importlib

import torch

from module_parity.compare import Case

_IMAGE = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
_HEADS = _IMAGE | {"dim_head": 16}
_CLASSES = {"num_classes": 5}
PLAIN = {
    "vit": "ViT",
    "simple_vit": "SimpleViT",
    "deepvit": "DeepViT",
    "parallel_vit": "ViT",
    "rvt": "RvT",
    "simple_uvit": "SimpleUViT",
    "normalized_vit": "nViT",
    "simple_vit_with_qk_norm": "SimpleViT",
    "simple_vit_with_register_tokens": "SimpleViT",
    "simple_vit_with_value_residual": "SimpleViT",
    "simple_flash_attn_vit": "SimpleViT",
    "vit_for_small_dataset": "ViT",
    "vit_with_patch_merger": "ViT",
    "vit_with_keel_post_ln": "ViT",
    "vit_5": "ViT",
}
"""Class of each module that has the plain arguments."""
OTHERS = {
    "cait": ("CaiT", _HEADS | {"cls_depth": 1}, (3, 32, 32)),
    "xcit": ("XCiT", _HEADS | {"cls_depth": 1}, (3, 32, 32)),
    "pit": ("PiT", _HEADS | {"depth": (1, 1)}, (3, 32, 32)),
    "levit": (
        "LeViT",
        _CLASSES | {"image_size": 64, "dim": (32, 48, 64), "depth": 1, "heads": (2, 2, 2), "mlp_mult": 2},
        (3, 64, 64),
    ),
    "cct": (
        "CCT",
        {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2, "num_classes": 5},
        (3, 32, 32),
    ),
    "cvt": (
        "CvT",
        _CLASSES | {"s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s2_depth": 1, "s3_depth": 1},
        (3, 64, 64),
    ),
    "crossformer": (
        "CrossFormer",
        _CLASSES
        | {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "global_window_size": (4, 2, 2, 1), "local_window_size": 1},
        (3, 64, 64),
    ),
    "twins_svt": (
        "TwinsSVT",
        _CLASSES
        | {f"s{at}_emb_dim": 16 for at in range(1, 5)}
        | {"s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2, "s4_local_patch_size": 1}
        | {"s3_depth": 1, "s4_depth": 1, "s1_global_k": 4, "s2_global_k": 4, "s3_global_k": 2, "s4_global_k": 1},
        (3, 64, 64),
    ),
    "mobile_vit": (
        "MobileViT",
        {
            "image_size": (64, 64),
            "dims": [24, 32, 40],
            "channels": [8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 32],
            "num_classes": 5,
        },
        (3, 64, 64),
    ),
    "max_vit": ("MaxViT", _CLASSES | {"dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4}, (3, 64, 64)),
    "sep_vit": ("SepViT", _CLASSES | {"dim": 16, "depth": (1, 1), "heads": (1, 2), "dim_head": 8}, (3, 56, 56)),
    "scalable_vit": (
        "ScalableViT",
        _CLASSES | {"dim": 16, "depth": (1, 1), "heads": (1, 2), "reduction_factor": (2, 1), "window_size": (4, None)},
        (3, 32, 32),
    ),
    "nest": (
        "NesT",
        _CLASSES
        | {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)},
        (3, 32, 32),
    ),
    "cross_vit": (
        "CrossViT",
        _CLASSES
        | {
            "image_size": 32,
            "sm_dim": 16,
            "lg_dim": 24,
            "sm_patch_size": 4,
            "lg_patch_size": 8,
            "lg_enc_depth": 1,
            "depth": 1,
        }
        | {"sm_enc_mlp_dim": 32, "lg_enc_mlp_dim": 48, "sm_enc_heads": 2, "lg_enc_heads": 2, "cross_attn_heads": 2},
        (3, 32, 32),
    ),
    "t2t": ("T2TViT", _CLASSES | {"image_size": 32, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 32}, (3, 32, 32)),
    "vit_1d": (
        "ViT",
        _CLASSES | {"seq_len": 32, "patch_size": 4, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64},
        (3, 32),
    ),
    "vit_3d": (
        "ViT",
        _CLASSES
        | {
            "image_size": 16,
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
            "dim": 32,
            "depth": 2,
            "heads": 2,
        }
        | {"mlp_dim": 64},
        (3, 4, 16, 16),
    ),
    "vivit": (
        "ViViT",
        _CLASSES
        | {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "dim": 32, "spatial_depth": 1}
        | {"temporal_depth": 1, "heads": 2, "mlp_dim": 64},
        (3, 4, 16, 16),
    ),
    "look_vit": (
        "LookViT",
        _CLASSES
        | {
            "image_size": 32,
            "dim": 32,
            "depth": 1,
            "patch_size": 8,
            "highres_patch_size": 4,
            "heads": 2,
            "cross_attn_heads": 2,
        },
        (3, 32, 32),
    ),
}
"""Class, arguments and shape of the input of the other modules."""


def cases():
    """Every case by name."""
    found = {}

    def made(module, name, options):
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**options)

    known = {module: (name, _IMAGE, (3, 32, 32)) for module, name in PLAIN.items()} | OTHERS
    for module, (name, options, shape) in known.items():
        found[module] = Case(
            lambda module=module, name=name, options=options: made(module, name, options),
            lambda shape=shape: (torch.randn(2, *shape),),
        )
    return found
