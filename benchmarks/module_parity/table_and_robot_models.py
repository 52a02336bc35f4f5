"""Cases of TabPFN's models of tables and of lerobot's policies."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path

import torch

from module_parity.compare import Case

TABLE_SIZES = {"emsize": 48, "nlayers": 2, "nhead": 4}
SIZES_OF_3 = {
    "embed_dim": 32, "nlayers": 2, "dist_embed_num_blocks": 1, "dist_embed_num_heads": 4,
    "dist_embed_num_inducing_points": 8, "feat_agg_num_blocks": 1, "feat_agg_num_heads": 4, "icl_num_heads": 4,
    "decoder_head_dim": 8, "decoder_num_heads": 2,
}  # fmt: skip
TABLE_MODELS = {
    "v2": TABLE_SIZES,
    "v2_5": TABLE_SIZES | {"num_thinking_rows": 4},
    "v2_6": TABLE_SIZES | {"num_thinking_rows": 4},
    "v3": SIZES_OF_3,
}


def of_tabpfn():
    """Cases of tabpfn: its models for classes and for numbers, and blocks of them."""
    _without_init("tabpfn")

    def made(name, sizes, kind):
        module = importlib.import_module(f"tabpfn.architectures.tabpfn_{name}")
        config, _ = module.parse_config(sizes | kind)
        return module.get_architecture(config)

    def classes():
        return torch.randn(12, 2, 5), torch.randint(0, 3, (8, 2)).float()

    def numbers():
        return torch.randn(12, 2, 5), torch.randn(8, 2)

    found = {}
    for name, sizes in TABLE_MODELS.items():
        makes = functools.partial(made, name, sizes)
        found[f"{name}, classes"] = Case(functools.partial(makes, {"max_num_classes": 10}), classes)
        found[f"{name}, numbers"] = Case(functools.partial(makes, {"max_num_classes": 0, "num_buckets": 16}), numbers)
    return found


def of_lerobot():
    """Cases of lerobot: networks of its policies."""
    _without_init("lerobot.policies")
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACT
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionConditionalUnet1d, DiffusionRgbEncoder
    from lerobot.policies.tdmpc.configuration_tdmpc import TDMPCConfig
    from lerobot.policies.tdmpc.modeling_tdmpc import TDMPCObservationEncoder
    from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig
    from lerobot.policies.vqbet.vqbet_utils import GPT

    state, image = PolicyFeature(FeatureType.STATE, (6,)), PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    features = {
        "input_features": {"observation.state": state, "observation.images.top": image},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (4,))},
        "device": "cpu",
    }

    def act(**options):
        config = ACTConfig(
            **features, pretrained_backbone_weights=None, chunk_size=8, n_action_steps=8, dim_model=32, n_heads=4,
            dim_feedforward=48, n_encoder_layers=2, n_vae_encoder_layers=1, latent_dim=8, **options,
        )  # fmt: skip
        return ACT(config)

    def seen():
        return ({"observation.state": torch.randn(2, 6), "observation.images": [torch.rand(2, 3, 64, 64)]},)

    diffusion = functools.partial(
        DiffusionConfig, **features, crop_shape=(56, 56), down_dims=(32, 64), n_groups=4, diffusion_step_embed_dim=16
    )
    return {
        "ACT": Case(act, seen),
        "ACT, no VAE": Case(functools.partial(act, use_vae=False), seen),
        "ACT, norms before": Case(functools.partial(act, pre_norm=True), seen),
        "DiffusionConditionalUnet1d": Case(
            lambda: DiffusionConditionalUnet1d(diffusion(), 10),
            lambda: (torch.randn(2, 16, 4), torch.tensor([3, 40]), torch.randn(2, 10)),
        ),
        "DiffusionConditionalUnet1d, no scales": Case(
            lambda: DiffusionConditionalUnet1d(diffusion(use_film_scale_modulation=False), 10),
            lambda: (torch.randn(2, 16, 4), torch.tensor([3, 40]), torch.randn(2, 10)),
        ),
        "DiffusionRgbEncoder": Case(
            lambda: DiffusionRgbEncoder(diffusion(crop_is_random=False)), lambda: (torch.rand(2, 3, 64, 64),)
        ),
        "TDMPCObservationEncoder": Case(
            lambda: TDMPCObservationEncoder(TDMPCConfig(**features)),
            lambda: ({"observation.state": torch.randn(2, 6), "observation.images.top": torch.rand(2, 3, 64, 64)},),
        ),
        "VQ-BeT GPT": Case(
            lambda: GPT(VQBeTConfig(**features, gpt_input_dim=16, gpt_output_dim=12, gpt_hidden_dim=32, gpt_n_layer=2)),
            lambda: (torch.randn(2, 7, 16),),
        ),
    }


def _without_init(name):
    """Makes a package whose own imports, of parts that no case needs, are left out."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(name)
        package = types.ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules[name] = package
