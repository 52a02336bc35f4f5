"""Builds prompts with images or audio: a placeholder token for every feature.

The number of features is not computed here: the model's own encoder is called, and the features it returns are
counted.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from parity_sweep.tiny.config import PROMPT_IDS_END
from parity_sweep.tiny.models import FIRST_PROMPT_ID

Inputs = dict[str, Any]
"""Arguments of ``forward`` and ``generate``."""

BEFORE, AFTER = (4, 5), (5, 3)
"""Numbers of text tokens before and after the placeholders, by prompt."""


def prompt_around(placeholders: list[int], index: int, generator: torch.Generator) -> Inputs:
    """Returns token ids int64[1, len] of prompt `index`, 0 or 1, and their mask.

    A prompt is text, placeholders, text.
    """
    before, after = (
        torch.randint(FIRST_PROMPT_ID, PROMPT_IDS_END, (n[index],), generator=generator) for n in (BEFORE, AFTER)
    )
    ids = torch.cat([before, torch.tensor(placeholders, dtype=torch.long), after])[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def num_features(model: PreTrainedModel, modality: str, given: Inputs) -> int:
    """Counts the features that the model's encoder computes from `given`.

    This is the number of placeholder tokens.

    Args:
        model: Model in eager PyTorch.
        modality: "image" or "audio".
        given: Arguments, of which the encoder gets those that it takes.
    """
    name = f"get_{modality}_features"
    encode: Any = getattr(model.base_model, name, None) or getattr(model, name)
    accepted = inspect.signature(encode).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    taken = {name: value for name, value in given.items() if name in accepted or takes_any}
    output = encode(**copy.deepcopy(taken), return_dict=True)
    features = getattr(output, "pooler_output", None)
    if features is None and getattr(output, "deepstack_features", None):
        features = output.deepstack_features[0][1]
    features = output.last_hidden_state if features is None else features
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return sum(part.numel() // part.shape[-1] for part in parts)


def batched(inputs: list[Inputs]) -> Inputs:
    """Joins several inputs into one batch.

    Text is padded on the left, everything else is concatenated.
    """
    length = max((one["input_ids"].shape[1] for one in inputs if "input_ids" in one), default=0)
    joined: Inputs = {}
    for name, value in inputs[0].items():
        parts = [one[name] for one in inputs]
        if not isinstance(value, torch.Tensor):
            joined[name] = value
            continue
        if length and value.shape[:2] == inputs[0]["input_ids"].shape:
            parts = [_padded(part, length) for part in parts]
        joined[name] = torch.cat(parts)
    return joined


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([part.new_zeros(part.shape[0], length - part.shape[1], *part.shape[2:]), part], 1)
