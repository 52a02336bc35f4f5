"""`EncoderModel`: embeds, classifies and ranks texts.

`serve` returns it for a model that does not generate.
"""

from __future__ import annotations

from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.entrypoints.text_methods import LabelsTexts


class EncoderModel(LabelsTexts, ServedModel):
    """Text model that returns embeddings (`embed`), labels or scores; made by `serve`.

    It does not generate.
    """

    writes_text = False
