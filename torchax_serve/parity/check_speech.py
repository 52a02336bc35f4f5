"""One type of speech recognition, tiny and random, served beside eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import UnsupportedModelError
from torchax_serve.parity.check_seq2seq import Inputs, checked, tiny
from torchax_serve.parity.result import Result
from torchax_serve.parity.tiny_model import prompts

NUM_FRAMES = (48, 40)
NUM_SAMPLES = (6000, 4800)

Shape = Callable[[Any, int], tuple[int, ...]]
"""From a configuration and 0 for the longer sound, 1 for the shorter one, to the shape of its features."""


def _frames(width: Callable[[Any], int]) -> Shape:
    return lambda config, which: (NUM_FRAMES[which], width(config))


def _samples(config: Any, which: int) -> tuple[int, ...]:
    return (NUM_SAMPLES[which],)


SHAPES: dict[str, tuple[Shape, bool]] = {
    "whisper": (lambda config, which: (config.num_mel_bins, 2 * config.max_source_positions), False),
    "speech_to_text": (_frames(lambda config: config.input_feat_per_channel), True),
    "seamless_m4t": (_frames(lambda config: config.feature_projection_input_dim), True),
    "seamless_m4t_v2": (_frames(lambda config: config.feature_projection_input_dim), True),
    "canary": (_frames(lambda config: config.encoder_config.num_mel_bins), True),
    "cohere_asr": (_frames(lambda config: config.encoder_config.num_mel_bins), True),
    "moonshine": (_samples, True),
    "moonshine_streaming": (_samples, True),
    "speech-encoder-decoder": (_samples, True),
    "speecht5": (_samples, True),
}
"""The shape of a sound's features, and whether sounds are padded and masked; by model type."""


def check(model_type: str) -> Result:
    """Checks one type; what goes wrong stands in the result."""
    model_class = getattr(transformers, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type])
    make = functools.partial(tiny, model_type, model_class, encoder_type="wav2vec2")
    return checked(model_type, model_class, make, functools.partial(sounds, model_type))


def sounds(model_type: str, model: PreTrainedModel) -> Inputs:
    """Features of two random sounds.

    Raises:
        UnsupportedModelError: the type reads sounds in a way that this harness does not know.
    """
    if model_type in SHAPES:
        shape, has_mask = SHAPES[model_type]
        name = model.get_encoder().main_input_name
        pair = [_random(shape(model.config, which), which) for which in (0, 1)]
        singles = [_masked({name: x[None]}, [x.shape[0]]) if has_mask else {name: x[None]} for x in pair]
        longest = pair[0].shape[0]
        both = torch.stack([torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])]) for x in pair])
        padded = _masked({name: both}, [x.shape[0] for x in pair]) if has_mask else {name: both}
        return {"first": singles[0], "second": singles[1], "padded": padded}
    return _among_words(model)


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))


def _masked(given: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    (features,) = given.values()
    mask = torch.arange(features.shape[1])[None] < torch.tensor(lengths)[:, None]
    return {**given, "attention_mask": mask.long()}


def _among_words(model: Any) -> Inputs:
    """Sounds for a decoder that reads them among its words: as many markers as the sound's embeddings, then text."""
    config = model.config
    marker = next((getattr(config, n) for n in ("audio_token_id", "audio_token_index") if hasattr(config, n)), None)
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
    if marker is None or audio is None or not hasattr(model, "get_audio_features"):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads codes or sounds in a way of its own, for which this harness has no inputs"
        )
    width = next(
        (getattr(audio, n) for n in ("num_mel_bins", "input_dim", "input_size", "num_mels") if hasattr(audio, n)), 80
    )
    last = getattr(audio, "max_source_positions", None)
    singles = []
    for which in (0, 1):
        shape = (width, 2 * last) if last else (NUM_FRAMES[which], width)
        features = _random(shape, which)[None]
        given: dict[str, Any] = {"input_features": features}
        if "input_features_mask" in model.forward.__code__.co_varnames:
            given["input_features_mask"] = torch.ones(1, features.shape[2] if last else features.shape[1]).long()
        with torch.no_grad():
            embedded = model.get_audio_features(**given, return_dict=True).pooler_output
        count = (embedded[0] if isinstance(embedded, (list, tuple)) else embedded).reshape(-1, embedded[0].shape[-1])
        ids = torch.cat([torch.full((1, count.shape[0]), marker), prompts()[which]], 1)
        singles.append({**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return {"first": singles[0], "second": singles[1], "padded": _stacked(singles)}


def _stacked(singles: list[dict[str, Any]]) -> dict[str, Any]:
    """Both in one batch, the shorter prompt padded on the left."""
    longest = max(one["input_ids"].shape[1] for one in singles)
    padded: dict[str, list[torch.Tensor]] = {}
    for one in singles:
        for name, value in one.items():
            missing = longest - value.shape[1] if name in ("input_ids", "attention_mask") else 0
            padded.setdefault(name, []).append(torch.nn.functional.pad(value, (missing, 0)) if missing else value)
    shapes = {name: {tuple(x.shape[1:]) for x in values} for name, values in padded.items()}
    if any(len(found) > 1 for found in shapes.values()):
        first = singles[0]
        return {name: torch.cat([value, value]) for name, value in first.items()}
    return {name: torch.cat(values) for name, values in padded.items()}
