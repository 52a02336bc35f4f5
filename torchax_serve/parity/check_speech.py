"""One type of speech recognition, tiny and random, served beside eager PyTorch."""

from __future__ import annotations

import functools

import transformers
from transformers.models.auto import modeling_auto

from torchax_serve.parity.check_seq2seq import checked
from torchax_serve.parity.result import Result
from torchax_serve.parity.tiny.audio import sound_model, sounds


def check(model_type: str) -> Result:
    """Checks one type; what goes wrong stands in the result."""
    model_class = getattr(transformers, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type])
    make = functools.partial(sound_model, model_type, model_class, encoder_type="wav2vec2")
    return checked(model_type, model_class, make, functools.partial(sounds, model_type))
