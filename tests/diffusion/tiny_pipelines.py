"""Pipelines of diffusers with tiny random models, and a tokenizer of letters."""

import copy
import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

PROMPT = "a red fox"


def tokenizer(folder):
    """A CLIP tokenizer of single letters, with its files in `folder`."""
    folder = Path(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{each}</w>" for each in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def text_encoder(cls=CLIPTextModel):
    config = CLIPTextConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=32,
        max_position_embeddings=16,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return cls(config).eval()


def autoencoder(latent_channels=4, **options):
    return AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=32,
        **options,
    ).eval()


def unet():
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    ).eval()


def stable_diffusion(folder):
    torch.manual_seed(0)
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    return StableDiffusionPipeline(
        unet=unet(),
        vae=autoencoder(),
        scheduler=scheduler,
        text_encoder=text_encoder(),
        tokenizer=tokenizer(folder),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def dit(folder):
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
    ).eval()
    return DiTPipeline(transformer=transformer, vae=autoencoder(), scheduler=DDIMScheduler())


def flux_transformer(num_heads=8):
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=num_heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(2, 2, 4),
    ).eval()


def flux(folder):
    torch.manual_seed(0)
    from transformers import T5Config, T5EncoderModel

    t5 = T5Config(vocab_size=520, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(latent_channels=4, shift_factor=0.0, scaling_factor=1.0),
        text_encoder=text_encoder(),
        tokenizer=tokenizer(folder),
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=tokenizer(folder),
        transformer=flux_transformer(),
    )


def sd3_transformer():
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=8,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
    ).eval()


def sd3(folder):
    torch.manual_seed(0)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.0, scaling_factor=1.0),
        text_encoder=text_encoder(CLIPTextModelWithProjection),
        tokenizer=tokenizer(folder),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer(folder),
        text_encoder_3=None,
        tokenizer_3=None,
        transformer=sd3_transformer(),
    )


PIPELINES = {"stable diffusion": stable_diffusion, "dit": dit, "flux": flux, "sd3": sd3}


def copied(pipeline):
    """The same pipeline with components of its own."""
    made = type(pipeline)(**{**copy.deepcopy(pipeline.components), **_flags(pipeline)})
    made.set_progress_bar_config(disable=True)
    return made


def _flags(pipeline):
    return {"requires_safety_checker": False} if isinstance(pipeline, StableDiffusionPipeline) else {}


def call(pipeline, prompt=PROMPT, steps=2, seed=3, **options):
    """Images of a call, float32[batch, height, width, 3] from 0 to 1."""
    asked = (
        {"class_labels": [1]} if isinstance(pipeline, DiTPipeline) else {"prompt": prompt, "height": 32, "width": 32}
    )
    if isinstance(pipeline, FluxPipeline):
        asked["max_sequence_length"] = 16
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipeline(**asked, num_inference_steps=steps, generator=generator, output_type="np", **options).images
