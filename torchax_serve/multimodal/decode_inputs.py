"""What images leave to the steps behind a prompt: on the fast loop a step gets the newest token, and nothing new.

transformers decides for every architecture which arguments its forward gets, at first and later on
(``prepare_inputs_for_generation``). It is asked here about the step after the prompt, before there is one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from model_adapters.program.static_tensors import StaticTensor, can_be_static

READ_BESIDE_PIXELS = re.compile(
    r"(image|video|pixel|spatial|aspect|target|patch|num)_.*|.*_grid_(thw|hw)|(mm|moe_mm)_token_type_ids|second_per_grid_ts"
    r"|input_features_mask|feature_attention_mask|padding_mask"
)
"""Arguments that say something about pixels or samples, or about places of images: without these nobody reads them."""


@dataclasses.dataclass(frozen=True)
class PreparedSteps:
    """Arguments of a request's forwards.

    Attributes:
        first: of the prompt's, by name.
        position_ids: int64[..., batch, 1] of the step after it, if the forward takes them.
        constants: further arguments of every later step, the same each time.
    """

    first: Mapping[str, Any]
    position_ids: torch.Tensor | None
    constants: tuple[tuple[str, StaticTensor | bool | int | str], ...]

    @classmethod
    def of(
        cls, model: Any, input_ids: torch.Tensor, kwargs: Mapping[str, Any], cache_name: str, known: frozenset[str]
    ) -> PreparedSteps | str:
        """What transformers prepares for `model`, or why the fast loop cannot take it.

        Args:
            model: the transformers model.
            input_ids: int64[batch, prompt_len].
            kwargs: further arguments of the loop, with a fresh cache.
            cache_name: of the argument that is the cache.
            known: names of arguments that the loop takes care of.
        """
        length, cache = input_ids.shape[1], kwargs[cache_name]
        first = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=length, is_first_iteration=True, **kwargs
        )
        later = model._update_model_kwargs_for_generation(ModelOutput(), dict(kwargs), is_encoder_decoder=False)
        cache.length = length  # a handle, which knows of nothing else
        try:
            longer = torch.cat([input_ids, input_ids[:, -1:]], 1)
            second = model.prepare_inputs_for_generation(longer, next_sequence_length=1, **later)
        finally:
            cache.length = 0
        if getattr(second.get("input_ids"), "shape", None) not in (None, (input_ids.shape[0], 1)):
            return "every step gets more than a token"
        rest = {name: value for name, value in second.items() if value is not None and name not in known}
        constants: dict[str, Any] = {}
        for name, value in rest.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.is_floating_point():
                return f"every step gets {name}"
            if READ_BESIDE_PIXELS.fullmatch(name):
                continue
            if isinstance(value, (bool, int, str)):
                constants[name] = value
                continue
            if not (is_tensor and can_be_static(value) and value.shape == (input_ids.shape[0], 1)):
                return f"every step gets {name}"
            constants[name] = StaticTensor.of(value)
        without = known - {"position_ids"}
        given = {name: value for name, value in first.items() if value is not None and name not in without}
        return cls({**given, "input_ids": input_ids}, second.get("position_ids"), tuple(sorted(constants.items())))
