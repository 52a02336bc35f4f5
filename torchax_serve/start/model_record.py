"""`ModelRecord`: what requests need of a model besides programs and values of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchax_serve.start.recorded_objects import TokenizerRecord
from torchax_serve.start.weights_file import TensorNames


@dataclasses.dataclass(frozen=True)
class ModelRecord:
    """What requests need of a model that runs packed, without torch and transformers.

    Attributes:
        weights: Names of the tensors of each weight in the file of weights.
        tokenizer: The tokenizer; None if the model has none.
        config: Attributes of the configuration.
        config_absent: Names that the configuration does not have.
        generation_config: Attributes of the model's generation config.
        generation_defaults: Values that transformers' ``generate`` fills in.
        sampling_rules: Fields of `torchax_serve.sampling.transformers_behaviour.TransformersBehaviour`.
        limits: Fields of `torchax_serve.runtime.input_limits.InputLimits`.
        quantization: The load report's line on quantized weights.
        requantized: Its line on what weights lost that were quantized again.
        described: Class, type and dtype of the model.
    """

    weights: TensorNames
    tokenizer: TokenizerRecord | None
    config: dict[str, Any]
    config_absent: tuple[str, ...]
    generation_config: dict[str, Any]
    generation_defaults: dict[str, Any]
    sampling_rules: dict[str, bool]
    limits: dict[str, Any]
    quantization: str
    requantized: str
    described: tuple[str, str, str]
