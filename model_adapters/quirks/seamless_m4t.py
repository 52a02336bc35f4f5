"""SeamlessM4T's decoder computes the number of real outputs of the speech encoder.

It does so by the encoder's last convolution, which pads half of its kernel on both sides.
"""

from __future__ import annotations

from typing import Any

from model_adapters.quirks.quirk import Quirk


def _last_convolution(config: Any) -> tuple[int, int, int]:
    kernel = config.adaptor_kernel_size
    return config.adaptor_stride, kernel, kernel // 2


QUIRK = Quirk(encoder_mask=_last_convolution)
