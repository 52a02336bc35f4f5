"""Makes noise for a model of images or sound, and a plain module of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading import LoadedModel
from torchax_serve.generation.model_copies import with_values
from torchax_serve.tasks.checkpoint_readers import checkpoint_reader

IMAGE_SIZE = (480, 640)
"""Height and width of an image whose size the processor decides."""
SOUND_S = 1.0
"""Seconds of sound."""
SAMPLING_RATE = 16_000
"""Samples per second where no feature extractor names another number."""
PLAIN_MODEL = "model"
"""Name of the model in its plain module."""
SOUNDS = ("input_values", "input_features")
"""Main inputs of models of sound."""


def plain_module(model: Any, names: Sequence[str]) -> torch.nn.Module:
    """Returns a PyTorch module whose forward takes `names` and returns a dictionary.

    Args:
        model: A `torchax_serve.generation.jax_model.JaxModelMixin`, whose weights are shared.
        names: Names of arguments of its forward.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        fields = getattr(self, PLAIN_MODEL)(**dict(zip(names, args, strict=False)), **kwargs, return_dict=True)
        return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", *names)]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    module: torch.nn.Module = type(type(model).__name__, (torch.nn.Module,), {"forward": forward})()
    setattr(module, PLAIN_MODEL, with_values(model))
    return module


def inputs_of_noise(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Returns arguments of the forward of a model, for one image or recording of noise.

    They are what the checkpoint's processor makes of noise. Without one the sizes are those of the configuration.

    Raises:
        UnsupportedModelError: the model reads something else, nothing says of what size, or a package is missing.
        CheckpointError: the files of the processor are broken.
    """
    name, random = loaded.module.main_input_name, np.random.default_rng(0)
    if name == "pixel_values":
        reader = checkpoint_reader(loaded, "image_processor")
        if reader is not None:
            return _accepted(loaded, reader(random.integers(0, 256, (*IMAGE_SIZE, 3), np.uint8), return_tensors="pt"))
        if (shape := _image_shape(loaded.config)) is not None:
            return {name: torch.from_numpy(random.standard_normal((1, *shape), np.float32))}
    if name in SOUNDS:
        reader = checkpoint_reader(loaded, "feature_extractor")
        rate = getattr(reader, "sampling_rate", SAMPLING_RATE)
        samples = 0.1 * random.standard_normal(int(SOUND_S * rate)).astype(np.float32)
        if reader is not None:
            return _accepted(loaded, reader(samples, sampling_rate=rate, return_tensors="pt"))
        if name == "input_values":
            return {name: torch.from_numpy(samples)[None]}
    raise UnsupportedModelError(
        f"inputs: expected a model that reads tokens, images or sound, with the files of its processor, got "
        f"{type(loaded.module).__name__}, which reads {name}; put them next to the weights, or give inputs in Python"
    )


def _image_shape(config: Any) -> tuple[int, int, int] | None:
    """Returns channels, height and width of the images that a configuration names; or None."""
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width


def _accepted(loaded: LoadedModel, made: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a processor that the forward has arguments for."""
    names = inspect.signature(loaded.module.forward).parameters
    return {name: each for name, each in made.items() if name in names and isinstance(each, torch.Tensor)}
