"""SeamlessM4T's decoder computes the number of real outputs of the speech encoder.

It does so by the encoder's last convolution.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(encoder_mask=("adaptor_stride", "adaptor_kernel_size"))
