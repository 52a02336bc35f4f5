"""Idefics2, Idefics3 and SmolVLM skip images of zeros, which only the host could count."""

from __future__ import annotations

from model_adapters.quirks.padded_images import any_pixel_counts, image_features_by
from model_adapters.quirks.quirk import Quirk

_idefics2_features = image_features_by(
    lambda count, size: count == size,
    lambda model, features, patches: model.connector(features, attention_mask=patches.flatten(1)),
)

QUIRK = Quirk(
    methods={
        "Idefics2Model.get_image_features": _idefics2_features,
        "Idefics3Model.get_image_features": any_pixel_counts,
        "SmolVLMModel.get_image_features": any_pixel_counts,
    }
)
