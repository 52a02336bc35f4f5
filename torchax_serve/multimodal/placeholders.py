"""Placeholder tokens: a prompt has one for each feature of its images and audio."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.call_signature import cache_name_of

TOKEN_FIELDS = ("image_token_id", "image_token_index")
VIDEO_TOKEN_FIELDS = ("video_token_id", "video_token_index")
AUDIO_TOKEN_FIELDS = ("audio_token_id", "audio_token_index")


def image_token_id(config: PreTrainedConfig) -> int | None:
    """Returns the placeholder token of image features; None if the configuration names none."""
    return _first(config, TOKEN_FIELDS)


def audio_token_id(config: PreTrainedConfig) -> int | None:
    """Returns the placeholder token of audio features; None if the configuration names none."""
    return _first(config, AUDIO_TOKEN_FIELDS)


def _first(config: PreTrainedConfig, fields: Collection[str]) -> int | None:
    return next((value for name in fields if isinstance(value := getattr(config, name, None), int)), None)


@dataclasses.dataclass(frozen=True)
class Modality:
    """A kind of media in prompts.

    Attributes:
        name: Name for errors.
        token_fields: Fields of configurations that have the placeholder token.
        arguments: Substrings of the names of the arguments that bring the media.
    """

    name: str
    token_fields: tuple[str, ...]
    arguments: tuple[str, ...]


MODALITIES = (
    Modality("images", TOKEN_FIELDS, ("pixel", "image", "video", "patch")),
    Modality("videos", VIDEO_TOKEN_FIELDS, ("video",)),
    Modality("audio", AUDIO_TOKEN_FIELDS, ("input_features", "input_values", "audio")),
)
EITHER = ("mm_encoder_outputs", "inputs_embeds")
"""Substrings of the names of arguments that bring precomputed features; a cache may bring them, too."""


def placeholder_ids(config: PreTrainedConfig) -> frozenset[int]:
    """Returns the placeholder tokens of all kinds of media."""
    found = (_first(config, modality.token_fields) for modality in MODALITIES)
    return frozenset(token for token in found if token is not None)


def check_has_media(config: PreTrainedConfig, ids: Any, names: Collection[str]) -> None:
    """Raises InvalidArgumentError for placeholders in `ids` without their media.

    The media come with an argument of `names`. Without them transformers would embed such tokens as words that the
    model was not trained on. Some models have one token for images and videos: either will do.
    """
    if ids is None or cache_name_of(names) or any(part in name for name in names for part in EITHER):
        return
    for modality in MODALITIES:
        token = _first(config, modality.token_fields)
        if token is None:
            continue
        is_there = bool((ids == token).any()) if isinstance(ids, torch.Tensor) else token in ids
        # A model of videos alone may name its argument for pixels as those of images do (InstructBlipVideo).
        shared = (token, None) if modality.name == "videos" else (token,)
        sharing = [each for each in MODALITIES[:2] if _first(config, each.token_fields) in shared]
        arguments = [part for each in (modality, *sharing) for part in each.arguments]
        if is_there and not any(part in name for name in names for part in arguments):
            raise InvalidArgumentError(
                f"expected {modality.name} for the placeholder tokens {token} of the prompt, got no argument with "
                f"{'samples' if modality.name == 'audio' else 'pixels'}; pass all that the processor returns to "
                f"generate(), the only method that takes {modality.name}"
            )


def unmet(config: PreTrainedConfig, given: Mapping[str, Any]) -> str:
    """Returns the error text for inputs whose values failed a check in the model's code."""
    ids = given.get("input_ids")
    for modality in MODALITIES:
        token = _first(config, modality.token_fields)
        is_given = any(part in name for name in given for part in (*modality.arguments, "mm_encoder_outputs"))
        if token is None or not isinstance(ids, torch.Tensor) or not is_given:
            continue
        count = int((ids == token).sum())
        return (
            f"expected a placeholder token {token} for each feature of the {modality.name}, got {count} of them, which "
            f"does not fit the {modality.name} given, or one of zeros alone; make text and {modality.name} with one "
            f"call of the model's processor, each named once, and batches of prompts with as many {modality.name} each"
        )
    return "expected inputs that fit each other, got others; make all with one call of the processor"
