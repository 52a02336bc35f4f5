"""Speech2Text's decoder computes the number of real outputs of the encoder.

Each of its convolutions keeps every other frame, the first one included
(`Speech2TextPreTrainedModel._get_feat_extract_output_lengths`).
"""

from __future__ import annotations

from typing import Any

from model_adapters.quirks.quirk import Quirk


def _convolutions(config: Any) -> tuple[int, int, int]:
    return 2**config.num_conv_layers, 1, 0


QUIRK = Quirk(encoder_mask=_convolutions)
