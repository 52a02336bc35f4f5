"""Placeholder tokens: a prompt has one for every feature that the model makes of its images."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from model_adapters.errors import InvalidArgumentError

TOKEN_FIELDS = ("image_token_id", "image_token_index")
AUDIO_TOKEN_FIELDS = ("audio_token_id", "audio_token_index")


def image_token_id(config: PreTrainedConfig) -> int | None:
    """The token that stands for a feature of an image, if the configuration names one."""
    return _first(config, TOKEN_FIELDS)


def audio_token_id(config: PreTrainedConfig) -> int | None:
    """The token that stands for a feature of a sound, if the configuration names one."""
    return _first(config, AUDIO_TOKEN_FIELDS)


def _first(config: PreTrainedConfig, fields: Collection[str]) -> int | None:
    return next((value for name in fields if isinstance(value := getattr(config, name, None), int)), None)


BESIDES_TEXT = ("pixel", "image", "video", "patch", "mm_encoder_outputs", "inputs_embeds", "past_key_values")
"""Parts of the names of arguments that images can come by, or have come by before."""


def check_has_images(config: PreTrainedConfig, ids: Any, names: Collection[str]) -> None:
    """Raises InvalidArgumentError for placeholders in `ids`, a tensor or a row, where no argument of `names` is images.

    transformers reads such tokens as words that the model has never learned.
    """
    token = image_token_id(config)
    if token is None or ids is None:
        return
    is_there = bool((ids == token).any()) if isinstance(ids, torch.Tensor) else token in ids
    if is_there and not any(part in name for name in names for part in BESIDES_TEXT):
        raise InvalidArgumentError(
            f"expected images for the placeholder tokens {token} of the prompt, got no argument with pixels; pass all "
            "that the processor returns to generate(), which alone takes images"
        )


def unmet(config: PreTrainedConfig, given: Mapping[str, Any]) -> str:
    """What is wrong with inputs whose values the model's code has checked and found otherwise than it needs them."""
    token, ids = image_token_id(config), given.get("input_ids")
    if token is None or not isinstance(ids, torch.Tensor):
        return "expected inputs that fit each other, got others; make all with one call of the processor"
    count = int((ids == token).sum())
    return (
        f"expected a placeholder token {token} for each feature of the images, got {count} of them, which does not fit "
        "the images given, or an image of zeros alone; make text and images with one call of the model's processor, "
        "each image named once, and batches of prompts with as many images each"
    )
