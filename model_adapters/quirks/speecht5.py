"""Decoders behind convolutions over samples compute how many real outputs these leave.

SpeechT5 and wav2vec 2.0 do so by kernel sizes and strides without padding
(`SpeechT5SpeechEncoderPrenet._get_feat_extract_output_lengths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_adapters.quirks.quirk import Quirk


def as_one_convolution(kernels: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Returns stride, kernel size and padding of one convolution in place of many in turn."""
    stride, kernel = 1, 1
    for each_kernel, each_stride in zip(kernels, strides, strict=True):
        kernel += (each_kernel - 1) * stride
        stride *= each_stride
    return stride, kernel, 0


def _convolutions(config: Any) -> tuple[int, int, int]:
    return as_one_convolution(config.conv_kernel, config.conv_stride)


QUIRK = Quirk(encoder_mask=_convolutions)
