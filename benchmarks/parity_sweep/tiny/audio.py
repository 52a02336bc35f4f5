"""Tiny audio models and their inputs.

Audio is the input of an encoder, or comes among the tokens of a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from model_adapters.errors import UnsupportedModelError
from parity_sweep.tiny.config import (
    FIRST_MARKER,
    PROMPT_IDS_END,
    VOCAB_SIZE,
    config_of_two,
    is_of_two,
    tiny_config,
)
from parity_sweep.tiny.media_prompts import Inputs, batched, num_features, prompt_around
from parity_sweep.tiny.models import FIRST_PROMPT_ID, NUM_NEW, random_model
from torchax_serve.multimodal.placeholders import audio_token_id

NUM_FRAMES = (48, 40)
"""Number of feature frames of the longer and the shorter input, for encoders that take any number."""
NUM_SAMPLES = (6000, 4800)
HIDDEN = 32

_GROUPS_OF_FOUR = {"audio_config": {"intermediate_size": 4 * HIDDEN}}
_GRANITE = {"window_size": 15, "projector_config": {"encoder_hidden_size": HIDDEN}}
_UNGROUPED = {"num_key_value_heads": 4}
_SEAMLESS = {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 48}
_CODEC = {"downsampling_ratios": [2, 4], "depths": [1, 1, 1], "num_filters": 4}
MIMI = {
    "hidden_size": HIDDEN,
    "upsample_groups": HIDDEN,
    "num_key_value_heads": 4,
    "codebook_size": 64,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "glmasr": _GROUPS_OF_FOUR,
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codebook_vocab_size": 65,
        "audio_bos_token_id": 64,
        "audio_pad_token_id": VOCAB_SIZE + 4 * 65,
        "codec_config": MIMI,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": _UNGROUPED,
            "diarization_config": {
                "audio_config": _UNGROUPED,
                "head_config": {"audio_hidden_size": HIDDEN, "hidden_size": HIDDEN},
            },
        },
        "word_timestamp_config": _UNGROUPED,
    },
    "qwen3_asr": {"audio_config": {"n_window": 50, "n_window_infer": 100, "output_dim": HIDDEN}},
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _CODEC, "semantic_tokenizer_encoder_config": _CODEC},
    "voxtral": {"audio_token_id": FIRST_MARKER} | _GROUPS_OF_FOUR,
}
"""Values of configurations by model type; those of a sub-configuration stand under its name."""

Shape = Callable[[Any, int], tuple[int, ...]]
"""Function of a configuration and of 0 for the longer input or 1 for the shorter one; returns the feature shape."""


def _frames(width: Callable[[Any], int]) -> Shape:
    return lambda config, which: (NUM_FRAMES[which], width(config))


def _samples(config: Any, which: int) -> tuple[int, ...]:
    return (NUM_SAMPLES[which],)


def _fixed_len(part: Callable[[Any], Any]) -> Shape:
    """Returns the feature shape of an encoder with a fixed input length, such as Whisper's."""
    return lambda config, which: (part(config).num_mel_bins, 2 * part(config).max_source_positions)


FOR_ENCODERS: dict[str, tuple[Shape, bool]] = {
    "whisper": (_fixed_len(lambda config: config), False),
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
"""Feature shape, and whether inputs are padded and masked, by model type with an audio encoder."""

_FIXED_LEN = _fixed_len(lambda config: config.audio_config)
IN_PROMPT: dict[str, Shape] = {
    **dict.fromkeys(
        ("audioflamingo3", "musicflamingo", "qwen2_audio", "voxtral", "moss_transcribe_diarize"), _FIXED_LEN
    ),
    "glmasr": lambda config, which: (config.audio_config.num_mel_bins, NUM_FRAMES[which]),
    "qwen3_asr": lambda config, which: (config.audio_config.num_mel_bins, (200, 100)[which]),
    "fun_asr_nano": _frames(lambda config: config.audio_config.input_size),
    "granite_speech": _frames(lambda config: config.encoder_config.input_dim),
    "granite_speech_plus": _frames(lambda config: config.encoder_config.input_dim),
    "nemo_speechlm": _frames(lambda config: config.audio_config.asr_config.num_mel_bins),
    "vibevoice_asr": lambda config, which: (1, (480, 400)[which]),
}
FRAMES_FIRST = frozenset({"fun_asr_nano", "granite_speech", "granite_speech_plus", "nemo_speechlm"})
"""Types whose features are [frames, mel_bins]; those of the others are [mel_bins, frames] or [1, samples]."""
COUNTED_BY_LENGTH = frozenset({"musicflamingo", "qwen2_audio"})
"""Types whose encoder cannot be called by itself to count its output features."""
MASKED_BEHIND = frozenset({"granite_speech", "granite_speech_plus"})
"""Types whose mask covers the encoder's output, not its input."""
BY_SDPA = frozenset({"seamless_m4t_v2"})
"""Types whose eager attention is wrong: it adds the boolean mask that their code passes to the scores, as ones."""
MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")
"""Arguments that mask the frames or samples of padding."""


def audio_model(
    model_type: str, model_class: type[PreTrainedModel], seed: int, *, encoder_type: str = "bert"
) -> PreTrainedModel:
    """Builds a tiny random model.

    `encoder_type` is for types that combine any encoder with any decoder.
    """
    model = random_model(model_class, _config(model_type, encoder_type), seed)
    if hasattr(model, "codec_model"):
        _fill_codebooks(model.codec_model, seed)
    if model_type in BY_SDPA:
        model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
def _fill_codebooks(codec: Any, seed: int) -> None:
    """Fills codebooks with codes as large as the latents.

    They are zero at first, and then rounding would choose the codes.
    """
    size = codec.encoder(_random((1, 1, NUM_NEW * codec.config.frame_size), 0)).latents.std()
    for index, (name, buffer) in enumerate(codec.named_buffers()):
        if name.endswith("codebook.embed_sum"):
            buffer.copy_(size * _random(tuple(buffer.shape), 1000 * seed + index))


def _config(model_type: str, encoder_type: str) -> PreTrainedConfig:
    if is_of_two(model_type):
        return config_of_two(model_type, tiny_config(encoder_type, as_decoder=False))
    return tiny_config(model_type, as_decoder=False, overrides=CONFIGS.get(model_type, {}))


def audio_inputs(model_type: str, model: PreTrainedModel) -> dict[str, Inputs]:
    """Returns arguments of ``generate`` for two random audio inputs.

    Keys: "first", "second", and "padded" with both. For types that read audio while they generate, "forward" has the
    arguments of a forward.

    Raises:
        UnsupportedModelError: The harness has no inputs for this type.
    """
    if model_type in FOR_ENCODERS:
        return _for_encoder(model_type, model)
    if model_type in STREAMED:
        return STREAMED[model_type](model)
    if model_type not in IN_PROMPT:
        raise UnsupportedModelError(
            f"{type(model).__name__} reads codes or audio in a way of its own, for which this harness has no inputs"
        )
    singles = [_in_prompt(model_type, model, which) for which in (0, 1)]
    return {"first": singles[0], "second": singles[1], "padded": batched(_padded_to_one_length(singles))}


def is_audio_type(model_type: str) -> bool:
    """Returns whether the decoder reads audio, in its prompt or while it generates."""
    return model_type in IN_PROMPT or model_type in STREAMED


def _for_encoder(model_type: str, model: PreTrainedModel) -> dict[str, Inputs]:
    shape, has_mask = FOR_ENCODERS[model_type]
    name = model.get_encoder().main_input_name
    pair = [_random(shape(model.config, which), which) for which in (0, 1)]
    singles = [_masked({name: x[None]}, [x.shape[0]]) if has_mask else {name: x[None]} for x in pair]
    longest = pair[0].shape[0]
    both = torch.stack([torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])]) for x in pair])
    padded = _masked({name: both}, [x.shape[0] for x in pair]) if has_mask else {name: both}
    return {"first": singles[0], "second": singles[1], "padded": padded}


def _masked(given: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    (features,) = given.values()
    mask = torch.arange(features.shape[1])[None] < torch.tensor(lengths)[:, None]
    return {**given, "attention_mask": mask.long()}


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))


def _in_prompt(model_type: str, model: Any, which: int) -> Inputs:
    """Returns an input for a decoder that reads audio in its prompt."""
    features = _random(IN_PROMPT[model_type](model.config, which), which)[None]
    length = features.shape[1 if model_type in FRAMES_FIRST else 2]
    accepted = inspect.signature(type(model).forward).parameters
    given: Inputs = {("input_values" if "input_values" in accepted else "input_features"): features}
    mask = torch.ones(1, length, dtype=torch.long)
    if which and IN_PROMPT[model_type] is _FIXED_LEN:
        mask[:, length * 3 // 4 :] = 0  # a shorter input, padded
    given |= {name: mask for name in MASKS if name in accepted}
    if "sample" in accepted:
        given["sample"] = False  # else the encoder draws noise from torch's own stream
    if model_type in MASKED_BEHIND:
        del given["input_features_mask"]
        count = num_features(model, "audio", given)
        given["input_features_mask"] = torch.ones(1, count, dtype=torch.bool)
    elif model_type in COUNTED_BY_LENGTH:
        count = int(model.base_model.audio_tower._get_feat_extract_output_lengths(mask.sum())[1])
    else:
        count = num_features(model, "audio", given)
    token = audio_token_id(model.config)
    assert token is not None
    return prompt_around([token] * count, which, torch.Generator().manual_seed(which + 10)) | given


def _voxtral_realtime(model: Any) -> dict[str, Inputs]:
    """Returns inputs with `audio_length_per_tok` frames for each token of prompt and answer."""
    each, num_bins = model.config.audio_length_per_tok, model.config.audio_config.num_mel_bins
    num_tokens = [STREAMED_PROMPT_LEN + NUM_NEW + more for more in (2, 0)]
    singles: list[Inputs] = []
    for which, generator in enumerate(torch.Generator().manual_seed(seed) for seed in (10, 11)):
        ids = torch.randint(FIRST_PROMPT_ID, PROMPT_IDS_END, (1, STREAMED_PROMPT_LEN), generator=generator)
        features = _random((1, num_bins, each * num_tokens[which]), which)
        mask = torch.ones_like(ids)
        singles.append({"input_ids": ids, "attention_mask": mask, "input_features": features, "num_delay_tokens": 3})
    of_prompt = singles[0]["input_features"][..., : each * STREAMED_PROMPT_LEN]
    both = batched(_padded_to_one_length(singles))
    forward = singles[0] | {"input_features": of_prompt}
    return {"first": singles[0], "second": singles[1], "padded": both, "forward": forward}


def _kyutai_speech_to_text(model: Any) -> dict[str, Inputs]:
    """Returns inputs with one codec frame for each new token.

    A forward reads tokens and codes as one array.
    """
    num_samples = (NUM_NEW + 2) * model.config.frame_size
    pair = [_random((1, 1, num_samples), which) for which in (0, 1)]
    generator = torch.Generator().manual_seed(10)
    tokens = torch.randint(FIRST_PROMPT_ID, PROMPT_IDS_END, (1, STREAMED_PROMPT_LEN, 1), generator=generator)
    shape = (1, STREAMED_PROMPT_LEN, model.config.num_codebooks)
    codes = torch.randint(0, model.config.codec_config.codebook_size, shape, generator=generator)
    forward = {"input_ids": torch.cat([tokens, codes], 2)}
    first, second, both = ({"input_values": x} for x in (*pair, torch.cat(pair)))
    return {"first": first, "second": second, "padded": both, "forward": forward}


STREAMED_PROMPT_LEN = 7
STREAMED = {"voxtral_realtime": _voxtral_realtime, "kyutai_speech_to_text": _kyutai_speech_to_text}
"""Inputs of types that read a frame of audio with every token that they generate."""


def _padded_to_one_length(singles: list[Inputs]) -> list[Inputs]:
    """Pads features and their masks on the right with zeros to one length."""

    def filled(name: str, value: torch.Tensor) -> torch.Tensor:
        sizes = [max(one[name].shape[axis] for one in singles) for axis in range(value.ndim)]
        pad = [n for size, has in zip(reversed(sizes), reversed(value.shape), strict=True) for n in (0, size - has)]
        return torch.nn.functional.pad(value, pad)

    padded = {"input_features", "input_values", *MASKS}
    return [{name: filled(name, value) if name in padded else value for name, value in one.items()} for one in singles]
