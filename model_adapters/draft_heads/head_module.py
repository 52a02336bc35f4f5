"""What all draft heads have in common as torch modules."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.utils import ModelOutput

from model_adapters.errors import UnsupportedModelError
from model_adapters.program.call_signature import cache_name_of


@dataclasses.dataclass
class HeadOutput(ModelOutput):
    """Result of a draft head.

    `logits` [1, n, vocab] are of the tokens that were asked for, `hidden` [1, n, hidden] is what the head takes in
    place of the model's hidden states for the next token.
    """

    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def cache_argument(function: Any) -> str:
    """Returns the name that a layer of this transformers release gives its cache."""
    name = cache_name_of(inspect.signature(function).parameters)
    assert name is not None
    return name


def causal_mask(config: Any, embeds: torch.Tensor, cache: Any, position_ids: torch.Tensor) -> Any:
    """Returns the mask of a decoder layer, as transformers' models make theirs."""
    arguments = {
        "config": config,
        "inputs_embeds": embeds,
        "attention_mask": None,
        "position_ids": position_ids,
        cache_argument(create_causal_mask): cache,
    }
    return create_causal_mask(**arguments)


def own_base_class(module: PreTrainedModel, base: Any, example: str) -> type[PreTrainedModel]:
    """Returns the base class of a model's own file, by which its head is made.

    Args:
        module: The model, for the error.
        base: Its decoder, whose parts the head has.
        example: Model that is built as is expected.

    Raises:
        UnsupportedModelError: `base` has no layers, norm or rotary_emb.
    """
    lacking = [name for name in ("layers", "norm", "rotary_emb") if not hasattr(base, name)]
    if lacking:
        raise UnsupportedModelError(
            f"method 'mtp': expected a model with layers, norm and rotary_emb as {example} has them, got "
            f"{type(module).__name__} without {lacking[0]}; leave speculative_config out"
        )
    return next(cls for cls in type(base).__mro__ if cls.__name__.endswith("PreTrainedModel"))
