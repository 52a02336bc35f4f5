"""A decoder behind any speech encoder computes the number of that one's real outputs.

It asks the encoder's `_get_feature_vector_attention_mask`, which wav2vec 2.0 and its relatives have: by their
convolutions, and behind these by an adapter's, of kernel size 1.
"""

from __future__ import annotations

from typing import Any

from model_adapters.quirks.quirk import Quirk
from model_adapters.quirks.speecht5 import as_one_convolution


def _convolutions(config: Any) -> tuple[int, int, int] | None:
    encoder = config.encoder
    if not hasattr(encoder, "conv_kernel"):
        return None
    num_adapters = encoder.num_adapter_layers if getattr(encoder, "add_adapter", False) else 0
    strides = [*encoder.conv_stride, *([encoder.adapter_stride] if num_adapters else []) * num_adapters]
    return as_one_convolution([*encoder.conv_kernel, *[1] * num_adapters], strides)


QUIRK = Quirk(encoder_mask=_convolutions)
