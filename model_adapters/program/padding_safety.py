"""Whether padding changes the results of real tokens: the general rules and the quirks."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from model_adapters import quirks

# Values of a configuration that make it an encoder, or a decoder used as one.
ENCODER_CONFIG_VALUES = {"is_decoder": False, "causal": False, "attn_type": "bi"}


def right_padding_is_safe(module: torch.nn.Module) -> bool:
    """Tells whether padding on the right of `module`'s input changes nothing on the left of it.

    True for a model whose configuration is not that of an encoder and whose code makes its masks by transformers'
    function for causal masks. Of other code that is not known, so False: exact lengths are slower, never different.
    """
    if not isinstance(module, PreTrainedModel):
        return False
    config = module.config.get_text_config(decoder=True)
    quirk = quirks.of_type(config.model_type)
    if quirk.shifted_mask or any(getattr(config, name, None) == value for name, value in ENCODER_CONFIG_VALUES.items()):
        return False
    if not module.can_generate() and _sees_later_tokens(module):
        return False
    makes_masks = any(
        getattr(sys.modules.get(type(child).__module__), "create_causal_mask", None) is not None
        for child in module.modules()
    )
    return makes_masks or quirk.causal_without_mask


def _sees_later_tokens(module: PreTrainedModel) -> bool:
    """Tells whether attention says that it is not causal.

    Such is the encoder of a file that has a decoder as well.
    """
    file = type(module).__module__
    return any(
        getattr(child, "is_causal", None) is False for child in module.modules() if type(child).__module__ == file
    )


def has_further_logits(fields: Iterable[str]) -> bool:
    """Tells whether outputs of these names have logits of a second head.

    It may read the last token, which is what is padded.
    """
    return any(name.endswith("logits") for name in set(fields) - {"logits", "router_logits"})


def may_have_further_logits(module: torch.nn.Module) -> bool:
    """Tells whether a forward of `module` may return logits of a second head.

    Its annotation says so; for which arguments, it does not say.
    """
    try:
        annotation = typing.get_type_hints(type(module).forward).get("return")
    except Exception:  # names that are imported for type checkers alone
        annotation = None
    kinds = [each for each in (annotation, *typing.get_args(annotation)) if isinstance(each, type)]
    outputs: list[Any] = [kind for kind in kinds if issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind)]
    return has_further_logits(each.name for kind in outputs for each in dataclasses.fields(kind))


def can_batch_padded(module: PreTrainedModel) -> bool:
    """Tells whether a batch padded on the right gives each text the results of a batch of one."""
    if quirks.of_type(module.config.get_text_config().model_type).mixes_neighbours:
        return False
    return masked_tokens_are_ignored(module) or right_padding_is_safe(module)


def masked_tokens_are_ignored(module: torch.nn.Module) -> bool:
    """Tells whether masked tokens on the right change nothing of the unmasked tokens.

    True where only attention mixes tokens and transformers' functions make its masks. Convolutions and pooling along
    the sequence read masked tokens. Of other code it is not known, so False: exact lengths are slower, never different.
    """
    if quirks.of(module).reads_mask_on_host:
        return False
    children = list(module.modules())
    own = [child for child in children if type(child).__module__ == type(module).__module__]  # not the image encoder
    layers = [layer for child in own for layer in child.children()]
    if any(isinstance(layer, _SEQUENCE_LAYERS) and _width(layer) > 1 for layer in layers):
        return False
    files = [sys.modules.get(type(child).__module__) for child in children]
    return any(getattr(file, "create_bidirectional_mask", None) is not None for file in files)


_SEQUENCE_LAYERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.AvgPool1d, torch.nn.MaxPool1d)


def _width(module: torch.nn.Module) -> int:
    size = getattr(module, "kernel_size", 1)
    return max(size) if isinstance(size, tuple) else int(size)
