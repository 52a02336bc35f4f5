"""Tiny models of images and text and their inputs.

The inputs have pixels, grids, and a placeholder token for every feature. `image_overrides` has the values that no rule
finds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from parity_sweep.tiny.config import FIRST_MARKER, PROMPT_IDS_END, config_of_two, is_of_two, tiny_config
from parity_sweep.tiny.image_overrides import CONFIGS, PIXELS, TOKENS, UNMARKED, WRAPPED
from parity_sweep.tiny.media_prompts import Inputs, num_features, prompt_around
from parity_sweep.tiny.models import random_model
from torchax_serve.multimodal.placeholders import TOKEN_FIELDS, image_token_id

IMAGE_SIZE = 16
PATCH_SIZE = 4
ENCODER_OF_TWO = "vit"
"""Encoder of types that combine any encoder with any decoder."""
GRID = (1, 4, 4)
"""Numbers of patches of an image: frames, rows, columns."""
PATTERNS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?(image|img)_size", IMAGE_SIZE),
    (r"patch_size", PATCH_SIZE),
    (r"out_hidden_size|projection_dim|projector_hidden_size|output_dim|visual_hidden_size|text_dim", 32),
    (r"vision_output_dim|projector_(in|out)put_dim|embed_dims?|mlp_hidden_dim|intermediate_hidden_size", 32),
    (r"num_position_embeddings|max_num_patches|position_embedding_size", 16),
    (r"num_patches", 16),
    (r"num_query_tokens|num_queries|num_image_tokens|query_num|image_seq_length", 4),
    (r"window_size", 16),
    (r"patch_embed_hidden_size", 3 * PATCH_SIZE**2),
    (r"pooling_kernel_size", 2),
    (r"latent_query_num|resampler_n_latents", 4),
    (r"resampler_head_dim", 8),
    (r"resampler_n_heads", 4),
    (r"resampler_depth", 2),
    (r"num_global_layers", 1),
    (r"mm_tokens_per_image", 4),
    (r"encoder_hidden_size|mm_hidden_size|qformer_hidden_size", 32),
    (r"encoder_ffn_dim|encoder_intermediate_size|expert_ffn_hidden_size", 48),
)
GAINS = (1.0, 1.4)
"""Gains of products, smaller than for text: images pass two models, and their amplifications of rounding multiply."""


def image_text_class(model_type: str) -> type[PreTrainedModel]:
    """Returns the class that transformers maps `model_type` to as a model of images and text."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def image_config(model_type: str) -> PreTrainedConfig:
    """Builds a configuration for a tiny model of `model_type`.

    Its images have `IMAGE_SIZE` pixels a side.
    """
    if is_of_two(model_type):
        return config_of_two(model_type, tiny_config(ENCODER_OF_TWO, patterns=PATTERNS, as_decoder=False))
    return tiny_config(model_type, patterns=PATTERNS, rule=_split_rotary, overrides=CONFIGS.get(model_type, {}))


def _split_rotary(values: dict[str, Any]) -> dict[str, Any]:
    """Splits rotated dimensions among position axes, and sets placeholders.

    No prompt contains a placeholder by chance.
    """
    rope = values.get("rope_parameters")
    small = {name: FIRST_MARKER for name in TOKEN_FIELDS if (values.get(name) or FIRST_MARKER) < PROMPT_IDS_END}
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return small
    return small | {"rope_parameters": {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}}


def image_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Builds a tiny random model of `model_type`.

    See `parity_sweep.tiny.models.random_model`.
    """
    return random_model(image_text_class(model_type), image_config(model_type), seed, GAINS)


def inputs_of(model: PreTrainedModel, model_type: str, index: int) -> Inputs:
    """Returns arguments of ``forward`` and ``generate`` for prompt `index`, 0 or 1.

    Each prompt has an image of its own.
    """
    generator = torch.Generator().manual_seed(index + 10)
    make: Callable[..., Inputs] = PIXELS.get(model_type) or _pixels
    images = make(model.config, generator)
    parameters = inspect.signature(type(model).forward).parameters
    token = TOKENS.get(model_type) or image_token_id(model.config)
    special = images.pop("tokens", None)  # where they cannot be counted
    if special is None:
        special = [token] * num_features(model, "image", images) if token is not None else []
    first, last = WRAPPED.get(model_type, ([], []))
    special = [*first, *special, *last]
    given = prompt_around(special, index, generator)
    ids = given["input_ids"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in parameters:
            marked = -1 if token is None or model_type in UNMARKED else token
            given[name] = torch.eq(ids, marked).long()
    if "input_ids" not in parameters:  # there is nothing to read but the image
        given = {}
    return given | {name: value(ids) if callable(value) else value for name, value in images.items()}


def _vision(config: PreTrainedConfig) -> Any:
    return next(
        (part for name in ("vision_config", "vit_config", "encoder") if (part := getattr(config, name, None))), config
    )


def _pixels(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
    """Returns the pixels of an image, in patches if the model takes a grid."""
    vision = _vision(config)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    parameters = inspect.signature(image_text_class(config.model_type).forward).parameters
    if "image_grid_thw" in parameters:
        width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        count = GRID[0] * GRID[1] * GRID[2]
        return {
            "pixel_values": torch.randn(count, width, generator=generator),
            "image_grid_thw": torch.tensor([GRID]),
        }
    size = getattr(vision, "image_size", IMAGE_SIZE)
    size = size[0] if isinstance(size, (list, tuple)) else size
    return {"pixel_values": torch.randn(1, channels, size, size, generator=generator)}
