"""Check of a configuration that differs from the default of its type, against eager PyTorch.

The model is tiny and random.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.model_class import find_class, load_config
from parity_sweep import check_causal as causal
from parity_sweep import check_seq2seq
from parity_sweep.check_encoder import checked_classifier, checked_encoder
from parity_sweep.tiny.audio import audio_inputs, is_audio_type
from parity_sweep.tiny.configurations import ConfigurationCase, cases
from parity_sweep.tiny.models import FIRST_UNTIED, NUM_SEEDS, clearest, expect, random_model
from torchax_serve.parity.result import Result, error_line

_MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)


def check(name: str) -> Result:
    """Checks the case `name`; errors are stored in the result."""
    case = cases()[name]
    model_class = class_of(case.model_type)
    make = functools.partial(_model, case, model_class)
    if case.config().is_encoder_decoder:
        return check_seq2seq.checked(name, model_class, make, check_seq2seq.text_inputs)
    seeds = range(FIRST_UNTIED if case.is_tied else NUM_SEEDS)
    return causal.checked(name, model_class.__name__, lambda: clearest(make, expect, seeds))


def check_file(path: str) -> Result:
    """Checks the configuration in a small ``config.json``.

    The model is served under the class that `serve` takes for it.
    """
    file = Path(path)
    try:
        model_class, config = find_class(
            load_config(file, trust_remote_code=False), folder=None, trust_remote_code=False
        )
        return dataclasses.replace(_checked_as(file.stem, model_class, config), model_type=file.stem)
    except (CheckpointError, UnsupportedModelError) as error:
        return Result(file.stem, "", status="impossible", error=error_line(error))


def _checked_as(name: str, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Result:
    def fresh() -> PreTrainedConfig:
        return copy.deepcopy(config)

    if not model_class.can_generate():
        is_classifier = model_class.__name__.endswith("ForSequenceClassification")
        return (checked_classifier if is_classifier else checked_encoder)(name, _base_of(model_class), fresh)

    def make(seed: int) -> PreTrainedModel:
        return random_model(model_class, fresh(), seed)

    if is_audio_type(config.model_type):
        return check_seq2seq.checked(name, model_class, make, functools.partial(audio_inputs, config.model_type))
    if config.is_encoder_decoder:
        return check_seq2seq.checked(name, model_class, make, check_seq2seq.text_inputs)
    return causal.checked(name, model_class.__name__, lambda: clearest(make, expect, range(FIRST_UNTIED)))


def _base_of(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns the base model's class of a masked language model, any other class unchanged."""
    if not model_class.__name__.endswith(("ForMaskedLM", "ForPreTraining")):
        return model_class
    config_class: Any = model_class.config_class
    name: Any = modeling_auto.MODEL_MAPPING_NAMES[config_class.model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def class_of(model_type: str) -> type[PreTrainedModel]:
    """Returns the class that generates text for `model_type`.

    It is also found if the text part is a sub-configuration.
    """
    names: Any = next(mapping[model_type] for mapping in _MAPPINGS if model_type in mapping)
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _model(case: ConfigurationCase, model_class: type[PreTrainedModel], seed: int) -> PreTrainedModel:
    config: PreTrainedConfig = case.config()
    return random_model(model_class, config, seed)
