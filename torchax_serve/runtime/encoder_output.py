"""Encoder output for a decoder's steps, padded to a bucket so that few lengths compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from transformers.modeling_outputs import MoEModelOutput
from transformers.utils import ModelOutput

from model_adapters.bridge.views import to_jax_array
from model_adapters.caches.encoder_mask import SourceMask
from model_adapters.device_arrays import to_device
from torchax_serve.buckets import next_bucket

ENCODER_ARGUMENTS = ("encoder_outputs", "attention_mask")
"""Arguments of a decoder's step that are the same from step to step."""


@dataclasses.dataclass
class MaskedOutput(MoEModelOutput):
    """An encoder's output with the mask of it that some decoders of audio read there.

    Attributes:
        attention_mask: int[batch, len], as the decoder's argument of that name.
    """

    attention_mask: Any = None


def output_of(hidden: Any, mask: Any, rule: SourceMask | None) -> MoEModelOutput:
    """Returns the output ``[1, len, width]`` of an encoder.

    It has the mask int32[1, len] if `rule` says that the decoder reads it there.
    """
    if rule is not None and rule.is_in_output:
        return MaskedOutput(last_hidden_state=hidden, attention_mask=mask)
    return MoEModelOutput(last_hidden_state=hidden)


@dataclasses.dataclass(frozen=True)
class EncoderOutput:
    """An encoder's output as arguments of the forward.

    Attributes:
        arguments: arrays by the forward's argument names.
        length: of the output before padding.
    """

    arguments: Mapping[str, Any]
    length: int

    def own_mask(self) -> np.ndarray | None:
        """Returns the mask bool[batch, len] that the encoder has made of its output, or None."""
        mask = getattr(self.arguments[ENCODER_ARGUMENTS[0]], "attention_mask", None)
        return None if mask is None else np.asarray(mask) != 0

    @classmethod
    def of(cls, given: Mapping[str, Any], *, is_masked: bool) -> EncoderOutput | None:
        """Returns the encoder output in `given`.

        None if the encoder has not run or returned no array.

        Args:
            given: Arguments of a forward, torch tensors by name.
            is_masked: Whether the decoder masks keys of the output by ``attention_mask``, as text models do. The mask
                of audio is over samples, and some decoders ignore their mask; such outputs are not padded.
        """
        outputs, mask = given.get("encoder_outputs"), given.get("attention_mask")
        hidden = outputs[0] if outputs is not None and len(outputs) else None
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            return None
        batch, length = hidden.shape[:2]
        if mask is None and is_masked:
            mask = torch.ones(batch, length, dtype=torch.long)
        fits = is_masked and mask is not None and tuple(mask.shape) == (batch, length)
        padded_len = next_bucket(length) if fits else length
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, padded_len - length))
        arguments: dict[str, Any] = {"encoder_outputs": _replaced(outputs, to_jax_array(padded), replaces_all=not fits)}
        if mask is not None:
            right = padded_len - mask.shape[1] if fits else 0
            arguments["attention_mask"] = to_device(np.pad(mask.numpy(), ((0, 0), (0, right))), np.int32)
        return cls(arguments, length)


def _replaced(outputs: Any, hidden: jax.Array, *, replaces_all: bool) -> Any:
    """Returns `outputs` with `hidden`, in the same class."""
    if not isinstance(outputs, ModelOutput):
        return (hidden,)
    first, *others = outputs
    kept = {
        name: to_jax_array(outputs[name]) for name in others if isinstance(outputs[name], torch.Tensor) and replaces_all
    }
    return type(outputs)(**{first: hidden, **kept})
