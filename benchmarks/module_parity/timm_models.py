"""Cases of timm: a small model of each family, transformers of two blocks where they have a depth."""

from __future__ import annotations

import functools

import timm
import torch

from module_parity.compare import Case

FREE = """
test_byobnet mobileone_s0 resnext26ts gernet_s repvgg_a0 halonet26t lambda_resnet26t botnet26t_256 eca_botnext26ts_256
test_convnext test_convnext2 test_convnext3 convnext_atto convnextv2_atto convmixer_768_32 cpubone_nano csatv2
cs3darknet_focus_s cspresnet50 darknet53 cspnext_tiny densenet121 dla46x_c dla34 dpn48b edgenext_xx_small
test_efficientnet test_efficientnet_gn test_efficientnet_ln test_efficientnet_evos mixnet_s mnasnet_small fbnetc_100
spnasnet_100 efficientnet_lite0 efficientnet_b0 efficientnetv2_rw_t tinynet_e tf_efficientnet_b0 mobilenetv2_050
efficientvim_m1 efficientvit_b0 fasternet_t0 ghostnet_050 ghostnetv2_100 hardcorenas_b hgnetv2_b0 hrnet_w18_small
iformer_t inception_next_atto inception_v3 lcnetv2_small lowformer_b0 test_mambaout mambaout_femto
poolformer_s12 poolformerv2_s12 convformer_s18 caformer_s18 mobilenetv3_small_050 tf_mobilenetv3_small_minimal_100
lcnet_035 fbnetv3_b mobilenetv4_conv_small_035 mobilevit_xxs mobilevitv2_050 test_nfnet nf_regnet_b0 nf_resnet26
eca_nfnet_l0 pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002 regnetz_005 regnetv_040 repghostnet_050 repvit_m0_9
res2net50_14w_8s resnest14d resnet10t resnet18 resnet26d seresnet18 ecaresnet26t resnetaa34d resnetblur18
resnetv2_18 resnetv2_50d_frn resnetv2_50d_evos rexnet_100 rexnetr_100 selecsls42 legacy_seresnet18 shvit_s1 skresnet18
starnet_s050 swiftformer_xs tresnet_m ese_vovnet19b_slim_dw vovnet39a legacy_xception xception41 xception41p test_resnet
"""
"""Models of images of any size, which here is 64 pixels."""
FIXED = {
    "beit_base_patch16_224": (64, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "cait_xxs24_224": (64, {"depth": 2}),
    "coat_tiny": (64, {}),
    "convit_tiny": (64, {"depth": 4}),
    "crossvit_tiny_240": (None, {}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1)}),
    "deit_tiny_patch16_224": (64, {"depth": 2}),
    "deit_tiny_distilled_patch16_224": (64, {"depth": 2}),
    "deit3_small_patch16_224": (64, {"depth": 2}),
    "efficientformer_l1": (None, {}),
    "efficientformerv2_s0": (None, {}),
    "efficientvit_m0": (None, {}),
    "eva02_tiny_patch14_224": (56, {"depth": 2}),
    "vit_tiny_patch16_dinov3_qkvb": (64, {"depth": 2}),
    "fastvit_t8": (None, {}),
    "focalnet_tiny_srf": (64, {"depths": (1, 1, 1, 1)}),
    "gcvit_xxtiny": (None, {}),
    "hiera_tiny_224": (None, {}),
    "sam2_hiera_tiny": (256, {}),
    "levit_128s": (None, {}),
    "levit_conv_128s": (None, {}),
    "test_coatnet": (None, {}),
    "test_maxvit": (None, {}),
    "maxxvit_rmlp_nano_rw_256": (None, {}),
    "gmixer_12_224": (64, {}),
    "gmlp_ti16_224": (64, {}),
    "mixer_s16_224": (64, {}),
    "resmlp_12_224": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "mvitv2_tiny": (None, {}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "nest_tiny": (None, {"depths": (1, 1, 1)}),
    "nextvit_small": (64, {}),
    "pit_ti_224": (None, {}),
    "qwen3_vit_88m": (64, {"depth": 2}),
    "sequencer2d_s": (64, {}),
    "swin_tiny_patch4_window7_224": (None, {"depths": (1, 1, 1, 1)}),
    "swin_s3_tiny_224": (None, {"depths": (1, 1, 1, 1)}),
    "swinv2_tiny_window8_256": (None, {"depths": (1, 1, 1, 1)}),
    "swinv2_cr_tiny_224": (None, {"depths": (1, 1, 1, 1)}),
    "tiny_vit_5m_224": (None, {}),
    "tnt_s_patch16_224": (64, {"depth": 2}),
    "twins_pcpvt_small": (64, {"depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"depths": (1, 1, 1, 2)}),
    "visformer_tiny": (None, {}),
    "test_vit": (None, {}),
    "test_vit2": (None, {}),
    "test_vit3": (None, {}),
    "test_vit4": (None, {}),
    "flexivit_small": (60, {"depth": 2}),
    "vit_tiny_patch16_224": (64, {"depth": 2}),
    "vit_small_patch14_dinov2": (56, {"depth": 2}),
    "vit_base_patch16_clip_quickgelu_224": (64, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "vit_base_patch16_siglip_224": (64, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "vit_tiny_r_s16_p8_224": (64, {"depth": 2}),
    "test_vit_relpos": (None, {}),
    "vit_srelpos_small_patch16_224": (64, {"depth": 2}),
    "samvit_base_patch16_224": (64, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "vitamin_small_224": (None, {}),
    "volo_d1_224": (64, {}),
    "xcit_nano_12_p16_224": (None, {"depth": 2}),
}
"""Other models, the size of their images, None for that of their configuration, and options that make them small."""


def _made(name, size, options):
    if size is not None:
        try:
            return timm.create_model(name, img_size=size, num_classes=10, **options)
        except TypeError:  # its layers do not depend on the size
            pass
    return timm.create_model(name, num_classes=10, **options)


def _image(name, size):
    if size is None:
        *_, size = timm.get_pretrained_cfg(name).input_size
    return (torch.randn(1, 3, size, size),)


def cases():
    """Every case by name."""
    known = {name: (64, {}) for name in FREE.split()} | FIXED
    return {
        name: Case(functools.partial(_made, name, size, options), functools.partial(_image, name, size))
        for name, (size, options) in known.items()
    }
