"""Shapes of one denoising step's arguments, by the transformer's class in diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by argument of the forward."""
LATENT_PIXELS = 8
"""Pixels along each side that one latent of the autoencoders of Flux and Stable Diffusion 3 stands for."""
FLUX_TEXT_LEN, SD3_TEXT_LEN = 512, 333
"""Tokens of text by default: T5's of Flux; CLIP's and T5's, one after the other, of Stable Diffusion 3."""


def denoiser_inputs(class_name: str, config: Mapping[str, Any], width: int, height: int, dtype: torch.dtype) -> Shapes:
    """Returns the arguments of one step for one image.

    Args:
        class_name: Of the transformer.
        config: Its configuration.
        width: Of the image, in pixels.
        height: Likewise.
        dtype: Of activations.

    Raises:
        UnsupportedModelError: a class without an entry.
        InvalidArgumentError: a size that latents do not divide.
    """
    made = _INPUTS.get(class_name)
    if made is None:
        raise UnsupportedModelError(f"plan: expected one of {', '.join(_INPUTS)}, got {class_name}; plan one of these")
    if width % (2 * LATENT_PIXELS) or height % (2 * LATENT_PIXELS):
        raise InvalidArgumentError(
            f"--image-size: expected multiples of {2 * LATENT_PIXELS} pixels, got {width}x{height}; correct it"
        )
    return made(config, width // LATENT_PIXELS, height // LATENT_PIXELS, dtype)


def _flux(config: Mapping[str, Any], width: int, height: int, dtype: torch.dtype) -> Shapes:
    num_tokens = width * height // 4  # four latents are one token
    shapes: Shapes = {
        "hidden_states": ((1, num_tokens, config["in_channels"]), dtype),
        "encoder_hidden_states": ((1, FLUX_TEXT_LEN, config["joint_attention_dim"]), dtype),
        "pooled_projections": ((1, config["pooled_projection_dim"]), dtype),
        "timestep": ((1,), dtype),
        "img_ids": ((num_tokens, 3), dtype),
        "txt_ids": ((FLUX_TEXT_LEN, 3), dtype),
    }
    return shapes | ({"guidance": ((1,), torch.float32)} if config["guidance_embeds"] else {})


def _sd3(config: Mapping[str, Any], width: int, height: int, dtype: torch.dtype) -> Shapes:
    return {  # two rows: with the prompt and without it
        "hidden_states": ((2, config["in_channels"], height, width), dtype),
        "encoder_hidden_states": ((2, SD3_TEXT_LEN, config["joint_attention_dim"]), dtype),
        "pooled_projections": ((2, config["pooled_projection_dim"]), dtype),
        "timestep": ((2,), torch.float32),
    }


_INPUTS: Mapping[str, Callable[[Mapping[str, Any], int, int, torch.dtype], Shapes]] = {
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
}
