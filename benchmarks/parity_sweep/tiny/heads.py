"""Tiny models with a head for any task of transformers, and their inputs.

`head_overrides` has the values that no rule finds.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from parity_sweep.tiny import audio, head_overrides
from parity_sweep.tiny.config import config_of_two, is_of_two, tiny_config
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import FIRST_PROMPT_ID, PROMPT_IDS_END, random_model

BATCH_SIZE = 2
IMAGE_SIZE = 64
NUM_FRAMES = 4
NUM_TOKENS = 12
NUM_SAMPLES = 4000
NUM_AUDIO_FRAMES = 64
PATTERNS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?(image|img|input)_size", IMAGE_SIZE),
    (r"projection_dim|projection_size|pooler_output_size|classifier_proj_size|xvector_output_dim", 32),
    (r"codevector_dim|proj_codevector_dim|output_hidden_size|fpn_hidden_size|output_channels", 32),
    (r"num_pos_feats", 16),
    (r"pred_num_hidden_layers|num_(spatial|temporal|unimodal|auxiliary)_layers|gnn_layers", 2),
    (r"decoder_num_hidden_layers|memory_attention_num_layers|num_stack_layers|decoder_num_layers", 2),
    (r"num_queries|two_stage_num_proposals", 12),
    (r"num_detection_tokens", 5),
    (r"num_frames|frames_per_clip", NUM_FRAMES),
    (r"(encoder_|decoder_)?dim_feedforward|encoder_feedforward_dim", 48),
)
DEPTHS = re.compile(r"depths?|num_block_repeats|stage_num_blocks|blocks_per_stage|n_attn_blocks|stage_numb_of_layers")
WIDTHS = {"tdnn_dim": 16, "conv_dim": 16}
"""Fields with a width for each layer, which may all be the same."""
GAINS = (1.0, 1.4)
READ_IMAGES_AND_TEXT = ("zero shot", "question answering", "retrieval", "token classification")
"""Parts of the names of tasks whose models read text beside an image."""
BY_SDPA = frozenset({"nemotron_asr_streaming", "nemotron3_5_asr"})
"""Types whose eager attention is wrong: `masked_fill_` of their code takes the zeros of an additive mask for masked."""
VIDEO_TYPES = frozenset({"timesformer", "videomae", "vivit", "videoprism", "videoprism_vision_model", "videomt"})
"""Types whose `pixel_values` are those of several frames."""


def head_config(model_type: str, task: str) -> PreTrainedConfig:
    """Builds a configuration for a tiny model of `model_type` with a head for `task`."""
    if is_of_two(model_type):
        encoder = "vit" if "vision" in model_type else "wav2vec2" if "speech" in model_type else "bert"
        return config_of_two(model_type, tiny_config(encoder, as_decoder=False, patterns=PATTERNS, rule=_short))
    if task == "decision" and model_type != "jev":  # the head of one type, on a model of another
        given = {"start": {"text_config": {"model_type": model_type}}}
        return tiny_config("jev", as_decoder=False, patterns=PATTERNS, rule=_short, overrides=given)
    given = head_overrides.CONFIGS.get(model_type, audio.CONFIGS.get(model_type, {}))
    given = _of_defaults(model_type, given) | head_overrides.FOR_TASKS.get((model_type, task), {})
    return tiny_config(model_type, as_decoder=False, patterns=PATTERNS, rule=_short, overrides=given)


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Cuts lists of depths, widths and sizes."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, (list, tuple)) or not value or not all(type(each) is int for each in value):
            continue
        if DEPTHS.fullmatch(name):
            small[name] = type(value)(min(each, 2 if index == 1 else 1) for index, each in enumerate(value))
        elif name in WIDTHS:
            small[name] = type(value)([WIDTHS[name]] * len(value))
        elif name.endswith("image_size"):
            small[name] = type(value)([IMAGE_SIZE] * len(value))
        elif name == "num_heads":
            small[name] = type(value)([2] * len(value))
    return small


def _of_defaults(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Adds to the overrides `given` the lists, flags and stages of the default configuration.

    A part of a configuration has other values than its type has by default.
    """
    default = CONFIG_MAPPING[model_type](**copy.deepcopy(given.get("start", {})))
    found = _read_stages(default) | given
    for name, part in vars(default).items():
        if not isinstance(part, PreTrainedConfig):
            continue
        usual = type(part)()
        values = {
            field.name: value
            for field in dataclasses.fields(cast("Any", type(part)))
            if not field.name.startswith("_")
            and isinstance(value := getattr(part, field.name, None), (bool, list, tuple))
            and value != getattr(usual, field.name, None)
        }
        if values := values | _short(values) | _read_stages(part):
            found[name] = values | found.get(name, {})
    return found


def _read_stages(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the stages of a backbone whose features are read, and as many layers."""
    indices = list(getattr(config, "_out_indices", None) or ())
    if len(indices) < 2:
        return {}
    if isinstance(getattr(config, "num_hidden_layers", None), int) and not hasattr(config, "depths"):
        return {"num_hidden_layers": len(indices), "out_indices": list(range(1, len(indices) + 1))}
    return {"out_indices": indices}


def head_model(model_type: str, task: str, model_class: type[PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Builds a tiny random model; see `parity_sweep.tiny.models.random_model`."""
    model = random_model(model_class, head_config(model_type, task), seed, GAINS).float()  # some code makes float64
    if model_type in BY_SDPA:
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd) and not isinstance(module, torch.nn.Conv1d):
                weight = module.weight  # products of all that a kernel covers
                weight.mul_((weight.shape[-1] / weight[0].numel()) ** 0.5)
    return model


def head_inputs(model: PreTrainedModel, model_type: str, task: str) -> Inputs:
    """Returns arguments of the forward of `model`, by the names in its signature."""
    generator = torch.Generator().manual_seed(5)
    if (make := head_overrides.INPUTS.get(model_type)) is not None and (given := make(model, generator, task)):
        return given
    parameters = inspect.signature(type(model).forward).parameters
    given = _pixels(model, model_type, parameters, generator)
    if "input_ids" in parameters and (not given or any(part in task for part in READ_IMAGES_AND_TEXT)):
        given |= _text(model, task, parameters, generator)
    given |= _series(model, parameters, generator)
    return given


def _pixels(model: PreTrainedModel, model_type: str, parameters: Any, generator: torch.Generator) -> Inputs:
    name = next((name for name in ("pixel_values_videos", "pixel_values") if name in parameters), None)
    if name is None:
        return {}
    size = _find(model.config, "image_size") or IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _find(model.config, "num_channels", "in_channels") or 3
    is_video = name == "pixel_values_videos" or model_type in VIDEO_TYPES
    frames = [_find(model.config, "num_frames", "frames_per_clip") or NUM_FRAMES] if is_video else []
    return {name: torch.randn(BATCH_SIZE, *frames, channels, height, width, generator=generator)}


def _text(model: PreTrainedModel, task: str, parameters: Any, generator: torch.Generator) -> Inputs:
    """Returns token ids, for choices [batch, choices, len].

    They end with the token that some heads look for.
    """
    config: Any = model.config.get_text_config()
    shape = (BATCH_SIZE, 2, NUM_TOKENS) if task == "multiple choice" else (BATCH_SIZE, NUM_TOKENS)
    end = min(PROMPT_IDS_END, (_find(config, "vocab_size") or PROMPT_IDS_END) - 1)
    # Each token of a row once: the order of equal values is undefined.
    count = BATCH_SIZE * (2 if len(shape) == 3 else 1)
    rows = [torch.randperm(end - FIRST_PROMPT_ID, generator=generator)[:NUM_TOKENS] for _ in range(count)]
    ids = torch.stack(rows).reshape(shape) + FIRST_PROMPT_ID
    if isinstance(eos := getattr(config, "eos_token_id", None), int):
        ids[..., -1] = eos
    given: Inputs = {"input_ids": ids}
    if "attention_mask" in parameters:
        given["attention_mask"] = torch.ones_like(ids)
    if "bbox" in parameters:
        corners = torch.randint(0, 100, (*shape, 2, 2), generator=generator).sort(-2).values
        given["bbox"] = corners.flatten(-2)
    return given


def _series(model: PreTrainedModel, parameters: Any, generator: torch.Generator) -> Inputs:
    """Returns samples or frames of audio, or a series of values."""
    given: Inputs = {}
    if "input_values" in parameters:
        given["input_values"] = torch.randn(BATCH_SIZE, NUM_SAMPLES, generator=generator)
    if "input_features" in parameters:
        names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
        width = _find(model.config, *names) or 80
        given["input_features"] = torch.randn(BATCH_SIZE, NUM_AUDIO_FRAMES, width, generator=generator)
    if "past_values" in parameters:
        shape = _find(model.config, "context_length"), _find(model.config, "num_input_channels") or 1
        given["past_values"] = torch.randn(BATCH_SIZE, *shape, generator=generator)
    return given


def _find(config: PreTrainedConfig, *names: str) -> Any:
    """Returns the first of `names` that the configuration or a part of it has; None if none has."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return next((value for part in parts if (value := _find(part, *names)) is not None), None)
