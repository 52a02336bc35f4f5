"""Arguments of the forwards of a call with media.

In a static batch each later step gets the newest token only.

transformers decides for each architecture which arguments its forward gets, for the prompt and for later steps
(``prepare_inputs_for_generation``). Here that method runs for the first step after the prompt, before the prefill.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from model_adapters.program.static_tensors import StaticTensor, can_be_static

MEDIA_ARGUMENTS = re.compile(
    r"(image|video|pixel|spatial|aspect|target|patch|num)_.*|.*_grid_(thw|hw)|(mm|moe_mm)_token_type_ids|second_per_grid_ts"
    r"|input_features_mask|feature_attention_mask|padding_mask|sample"
)
"""Arguments that describe pixels, audio samples or positions of images; a step without media does not read them.

``sample`` is VibeVoice's: whether its audio encoder draws noise."""
TIMES = frozenset({"second_per_grid_ts"})
"""Floats among these: seconds between frames, of which the positions of a prompt are made."""


def in_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns what a processor has made, with features (float32 of every processor) in `dtype`.

    As in transformers' pipelines: not every encoder converts them to the dtype of its weights.
    """
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in TIMES
        else value
        for name, value in inputs.items()
    }


@dataclasses.dataclass(frozen=True)
class PreparedSteps:
    """Arguments of the forwards of a call.

    Attributes:
        first: Arguments of the prompt's forward by name.
        position_ids: int64[..., batch, 1], positions of the step after the prompt; None if the forward gets none.
        constants: Further arguments of every later step, equal in all of them.
    """

    first: Mapping[str, Any]
    position_ids: torch.Tensor | None
    constants: tuple[tuple[str, StaticTensor | bool | int | str], ...]

    @classmethod
    def of(
        cls, model: Any, input_ids: torch.Tensor, kwargs: Mapping[str, Any], cache_name: str, known: frozenset[str]
    ) -> PreparedSteps | str:
        """Returns the arguments that transformers prepares for `model`.

        If a static batch cannot run the model, the reason is returned instead.

        Args:
            model: the transformers model.
            input_ids: int64[batch, prompt_len].
            kwargs: further arguments of the loop, with a fresh cache.
            cache_name: name of the cache argument.
            known: names of the arguments that the loop computes itself.
        """
        length, cache = input_ids.shape[1], kwargs[cache_name]
        first = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=length, is_first_iteration=True, **kwargs
        )
        later = model._update_model_kwargs_for_generation(ModelOutput(), dict(kwargs), is_encoder_decoder=False)
        cache.length = length  # a handle; only its length is read
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
            if is_tensor and value.is_floating_point() and name not in TIMES:
                return f"every step gets {name}"
            if MEDIA_ARGUMENTS.fullmatch(name):
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
