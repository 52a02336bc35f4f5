"""Images of a batch that models of the Idefics family leave out where they are padding: pixels that are all zero.

How many are left is known after the step alone. The program is made for images that all count, and answers whether they
did; a processor pads where the prompts of a batch have different numbers of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def image_features(
    model: Any,
    pixel_values: torch.Tensor,
    pixel_attention_mask: torch.Tensor | None,
    is_real_patch: Callable[[torch.Tensor, int], torch.Tensor],
    connect: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    **kwargs: Any,
) -> Any:
    """What ``get_image_features`` of such a model returns.

    Args:
        model: the base model.
        pixel_values: float[batch, images, channels, height, width].
        pixel_attention_mask: int[batch, images, height, width]; None: all pixels are real.
        is_real_patch: bool from the number of real pixels of a patch and the number that it has.
        connect: features of the text's width, from those of the encoder and the mask of patches.
    """
    batch, num_images = pixel_values.shape[:2]
    pixels = pixel_values.to(dtype=model.dtype).reshape(batch * num_images, *pixel_values.shape[2:])
    torch._check_tensor_all((pixels != 0.0).flatten(1).any(1))
    if pixel_attention_mask is None:
        mask = torch.ones(pixels.shape[0], *pixels.shape[2:], dtype=torch.bool, device=pixels.device)
    else:
        mask = pixel_attention_mask.reshape(batch * num_images, *pixel_attention_mask.shape[2:])
    size = model.config.vision_config.patch_size
    rows, columns = mask.shape[1] // size, mask.shape[2] // size
    cut = mask[:, : rows * size, : columns * size].reshape(-1, rows, size, columns, size)
    patches = is_real_patch(cut.sum(dim=(2, 4)), size * size)
    outputs = model.vision_model(pixel_values=pixels, patch_attention_mask=patches, return_dict=True, **kwargs)
    features = connect(outputs.last_hidden_state, patches)
    features = features.reshape(batch, -1, features.shape[-1])
    outputs.pooler_output = [features[row] for row in range(batch)]
    return outputs
