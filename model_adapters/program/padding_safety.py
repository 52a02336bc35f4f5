"""Whether what a model computes of a token is the same whatever stands behind it, or whatever is masked there."""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedModel

ENCODER_CONFIG_VALUES = {"is_decoder": False, "causal": False, "attn_type": "bi"}
"""Values of a configuration that make it an encoder, or a decoder used as one."""
CAUSAL_WITHOUT_MASK = frozenset({"openai-gpt", "rwkv"})
"""Types whose code makes a causal mask, or a recurrence, by itself."""
IMAGE_SHIFTED_MASK = frozenset({"git"})
"""Types that shift the mask of later tokens, by the number of an image's patches: these see what padding on the left
has computed, which is a mean over the whole prompt and whatever pads it on the right."""

MIXES_NEIGHBOURS = frozenset({"mobilebert", "doge"})
"""Types whose code mixes tokens by other means than masked attention: embeddings of neighbours, masks by rank."""

READS_MASK_ON_HOST = frozenset({"led"})
"""Types whose encoder asks on the host what its mask hides: a program knows its mask, and is of one input's length."""


def right_padding_is_safe(module: torch.nn.Module) -> bool:
    """Whether padding on the right of `module`'s input changes nothing before it.

    A model that its configuration does not make an encoder, and whose code makes masks by transformers' function for
    causal ones. Of other code that is not known, and False is answered: exact lengths are slower, never different.
    """
    if not isinstance(module, PreTrainedModel):
        return False
    config = module.config.get_text_config(decoder=True)
    if config.model_type in IMAGE_SHIFTED_MASK or any(
        getattr(config, name, None) == value for name, value in ENCODER_CONFIG_VALUES.items()
    ):
        return False
    makes_masks = any(
        getattr(sys.modules.get(type(child).__module__), "create_causal_mask", None) is not None
        for child in module.modules()
    )
    return makes_masks or config.model_type in CAUSAL_WITHOUT_MASK


def can_batch_padded(module: PreTrainedModel) -> bool:
    """Whether texts of different lengths, padded behind their ends, give what each gives alone."""
    if module.config.get_text_config().model_type in MIXES_NEIGHBOURS:
        return False
    return masked_tokens_are_ignored(module) or right_padding_is_safe(module)


def masked_tokens_are_ignored(module: torch.nn.Module) -> bool:
    """Whether tokens that an attention mask hides, behind the others, change nothing of those that it shows.

    So it is where tokens meet in attention alone, whose masks are made by transformers' functions. Convolutions and
    pooling along the sequence see what is masked, and of other code it is not known: exact lengths are slower, never
    different.
    """
    if getattr(getattr(module, "config", None), "model_type", "") in READS_MASK_ON_HOST:
        return False
    children = list(module.modules())
    own = [child for child in children if type(child).__module__ == type(module).__module__]  # and not an image's tower
    layers = [layer for child in own for layer in child.children()]
    if any(isinstance(layer, _ALONG_THE_SEQUENCE) and _width(layer) > 1 for layer in layers):
        return False
    files = [sys.modules.get(type(child).__module__) for child in children]
    return any(getattr(file, "create_bidirectional_mask", None) is not None for file in files)


_ALONG_THE_SEQUENCE = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.AvgPool1d, torch.nn.MaxPool1d)


def _width(module: torch.nn.Module) -> int:
    size = getattr(module, "kernel_size", 1)
    return max(size) if isinstance(size, tuple) else int(size)
