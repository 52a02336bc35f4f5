"""Checks a tiny random speech recognition model against eager PyTorch."""

from __future__ import annotations

import functools

import transformers
from transformers.models.auto import modeling_auto

from parity_sweep.check_seq2seq import checked
from parity_sweep.tiny.audio import audio_inputs, audio_model
from torchax_serve.parity.result import Result


def check(model_type: str) -> Result:
    """Checks one model type; errors are stored in the result."""
    model_class = getattr(transformers, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type])
    make = functools.partial(audio_model, model_type, model_class, encoder_type="wav2vec2")
    return checked(model_type, model_class, make, functools.partial(audio_inputs, model_type))
