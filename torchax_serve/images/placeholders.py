"""Placeholder tokens: a prompt has one for every feature that the model makes of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

TOKEN_FIELDS = ("image_token_id", "image_token_index")


def image_token_id(config: PreTrainedConfig) -> int | None:
    """The token that stands for a feature of an image, if the configuration names one."""
    for name in TOKEN_FIELDS:
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


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
