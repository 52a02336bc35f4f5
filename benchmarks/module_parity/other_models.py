"""Cases of libraries of a few models each: proteins, text, segmentation, time series."""

from __future__ import annotations

import functools

import torch

from module_parity.compare import Case


def _tokens(count, *shape):
    return (torch.randint(4, count, shape),)


def of_esm():
    """Cases of fair-esm."""
    from esm.axial_attention import ColumnSelfAttention, RowSelfAttention
    from esm.model.esm2 import ESM2
    from esm.modules import ContactPredictionHead, RobertaLMHead

    makes = {
        "ESM2": lambda: ESM2(num_layers=2, embed_dim=64, attention_heads=4, alphabet="ESM-1b"),
        "ESM2, one layer": lambda: ESM2(num_layers=1, embed_dim=32, attention_heads=2, alphabet="ESM-1b"),
    }
    found = {name: Case(make, lambda: _tokens(24, 2, 12)) for name, make in makes.items()}

    def rows():
        return (torch.randn(3, 5, 1, 16),)

    found["RowSelfAttention"] = Case(lambda: RowSelfAttention(16, 2), rows)
    found["ColumnSelfAttention"] = Case(lambda: ColumnSelfAttention(16, 2), rows)
    found["RobertaLMHead"] = Case(
        lambda: RobertaLMHead(16, 9, torch.nn.Parameter(torch.randn(9, 16))), lambda: (torch.randn(2, 5, 16),)
    )
    found["ContactPredictionHead"] = Case(
        lambda: ContactPredictionHead(8, False, False), lambda: (torch.randint(0, 9, (1, 6)), torch.rand(1, 2, 4, 6, 6))
    )
    return found


def of_x_transformers():
    """Cases of x-transformers: options of its attention and feed-forward layers."""
    from x_transformers import (
        ContinuousTransformerWrapper,
        Decoder,
        Encoder,
        TransformerWrapper,
        ViTransformerWrapper,
        XTransformer,
    )

    options = {
        "rotary": {"rotary_pos_emb": True},
        "alibi": {"alibi_pos_bias": True},
        "relative": {"rel_pos_bias": True},
        "swiglu": {"ff_glu": True, "ff_swish": True},
        "rmsnorm": {"use_rmsnorm": True},
        "scalenorm": {"use_scalenorm": True},
        "sandwich norm": {"sandwich_norm": True},
        "query-key norm": {"attn_qk_norm": True},
        "one key-value head": {"attn_one_kv_head": True},
        "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
        "memory of keys": {"attn_num_mem_kv": 4},
        "gated values": {"attn_gate_values": True},
        "macaron": {"macaron": True},
        "shifted tokens": {"shift_tokens": 1},
        "top-k": {"attn_sparse_topk": 3},
        "gated residual": {"gate_residual": True},
    }

    def wrapped(layers, options):
        made = layers(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=made)

    found = {}
    for name, own in options.items():
        layers = Encoder if name in ("macaron", "talking heads") else Decoder
        found[f"{layers.__name__}, {name}"] = Case(functools.partial(wrapped, layers, own), lambda: _tokens(100, 2, 12))
    small = {"dim": 32, "depth": 1, "heads": 2}
    found["ContinuousTransformerWrapper"] = Case(
        lambda: ContinuousTransformerWrapper(dim_in=4, dim_out=3, max_seq_len=16, attn_layers=Encoder(**small)),
        lambda: (torch.randn(2, 9, 4),),
    )
    found["ViTransformerWrapper"] = Case(
        lambda: ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=Encoder(**small)),
        lambda: (torch.randn(2, 3, 32, 32),),
    )
    sides = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in (("depth", 1), ("heads", 2))}
    found["XTransformer"] = Case(
        lambda: XTransformer(
            dim=32, enc_num_tokens=50, enc_max_seq_len=16, dec_num_tokens=50, dec_max_seq_len=16, **sides
        ),
        lambda: (*_tokens(50, 2, 9), *_tokens(50, 2, 7)),
    )
    return found


def of_segmentation():
    """Cases of segmentation-models-pytorch: its decoders over a small encoder."""
    import segmentation_models_pytorch as smp

    names = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet Segformer"

    def made(name):
        return getattr(smp, name)("resnet18", encoder_weights=None, classes=2)

    return {name: Case(functools.partial(made, name), lambda: (torch.randn(2, 3, 64, 64),)) for name in names.split()}


def of_chronos():
    """Cases of chronos-forecasting."""
    from chronos.chronos_bolt import ChronosBoltModelForForecasting, InstanceNorm, Patch, ResidualBlock
    from transformers import T5Config

    def bolt():
        settings = {
            "context_length": 32,
            "prediction_length": 8,
            "input_patch_size": 4,
            "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9],
            "use_reg_token": True,
        }
        config = T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=2, decoder_start_token_id=0
        )
        config.chronos_config = settings
        config.is_gated_act, config.dense_act_fn = False, "relu"
        return ChronosBoltModelForForecasting(config)

    def series():
        return (torch.randn(2, 32).cumsum(-1),)

    return {
        "ChronosBolt": Case(bolt, series),
        "Patch": Case(lambda: Patch(4, 4), lambda: (torch.randn(2, 30),)),
        "InstanceNorm": Case(lambda: InstanceNorm(use_arcsinh=True), series),
        "ResidualBlock": Case(
            lambda: ResidualBlock(8, 16, 4, "relu", use_layer_norm=True), lambda: (torch.randn(2, 8),)
        ),
    }


def of_timesfm():
    """Cases of timesfm: the layers of its model, whose size is fixed at 200 million weights."""
    from timesfm import configs
    from timesfm.torch.dense import RandomFourierFeatures, ResidualBlock
    from timesfm.torch.normalization import RMSNorm
    from timesfm.torch.transformer import MultiHeadAttention, Transformer

    block = configs.ResidualBlockConfig(input_dims=8, hidden_dims=16, output_dims=4, use_bias=True, activation="swish")
    layer = configs.TransformerConfig(
        model_dims=32,
        hidden_dims=64,
        num_heads=4,
        attention_norm="rms",
        feedforward_norm="rms",
        qk_norm="rms",
        use_bias=False,
        use_rotary_position_embeddings=True,
        ff_activation="swish",
        fuse_qkv=True,
    )

    def inputs():
        return (torch.randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool))

    return {
        "ResidualBlock": Case(lambda: ResidualBlock(block), lambda: (torch.randn(2, 8),)),
        "RMSNorm": Case(lambda: RMSNorm(8), lambda: (torch.randn(2, 8),)),
        "Transformer": Case(lambda: Transformer(layer), inputs),
        "MultiHeadAttention": Case(
            lambda: MultiHeadAttention(4, 32, use_rotary_position_embeddings=True), lambda: (torch.randn(2, 6, 32),)
        ),
        "RandomFourierFeatures": Case(
            lambda: RandomFourierFeatures(
                configs.RandomFourierFeaturesConfig(input_dims=4, output_dims=16, projection_stddev=1.0, use_bias=True)
            ),
            lambda: (torch.randn(2, 4),),
        ),
    }
