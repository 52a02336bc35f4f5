"""One configuration that differs from its type's usual one, tiny and random, served beside eager PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from torchax_serve.parity import check as causal
from torchax_serve.parity import check_seq2seq
from torchax_serve.parity.result import Result
from torchax_serve.parity.tiny.configurations import Case, cases
from torchax_serve.parity.tiny_model import FIRST_UNTIED, NUM_SEEDS, clearest, expect, random_model

_MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)


def check(name: str) -> Result:
    """Checks the case `name`; what goes wrong stands in the result."""
    case = cases()[name]
    model_class = class_of(case.model_type)
    make = functools.partial(_model, case, model_class)
    if case.config().is_encoder_decoder:
        return check_seq2seq.checked(name, model_class, make, check_seq2seq.text_inputs)
    seeds = range(FIRST_UNTIED if case.is_tied else NUM_SEEDS)
    return causal.checked(name, model_class.__name__, lambda: clearest(make, expect, seeds))


def class_of(model_type: str) -> type[PreTrainedModel]:
    """The class that generates text for `model_type`, also where its text stands inside of another configuration."""
    names: Any = next(mapping[model_type] for mapping in _MAPPINGS if model_type in mapping)
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _model(case: Case, model_class: type[PreTrainedModel], seed: int) -> PreTrainedModel:
    config: PreTrainedConfig = case.config()
    return random_model(model_class, config, seed)
