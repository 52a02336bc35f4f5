"""Makes noise for a model of images or sound, and a plain module of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import UnsupportedModelError
from torchax_serve.generation.model_copies import with_values
from torchax_serve.tasks.checkpoint_readers import CheckpointFiles, checkpoint_reader

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


def inputs_of_noise(
    module: torch.nn.Module, files: CheckpointFiles, image_size: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """Returns arguments of the forward of a model, for one image or recording of noise.

    They are what the checkpoint's processor makes of noise. Without one the sizes are those of the configuration.

    Args:
        module: The model, of transformers.
        files: Of it.
        image_size: Height and width of the image; None: `IMAGE_SIZE`, or that of the configuration.

    Raises:
        UnsupportedModelError: the model reads something else, nothing says of what size, or a package is missing.
        CheckpointError: the files of the processor are broken.
    """
    model: Any = module
    name, random = model.main_input_name, np.random.default_rng(0)
    if name == "pixel_values":
        reader = checkpoint_reader(files, "image_processor")
        if reader is not None:
            size = IMAGE_SIZE if image_size is None else image_size
            return _accepted(model, reader(random.integers(0, 256, (*size, 3), np.uint8), return_tensors="pt"))
        if (shape := _image_shape(model.config, image_size)) is not None:
            return {name: torch.from_numpy(random.standard_normal((1, *shape), np.float32))}
    if name in SOUNDS:
        reader = checkpoint_reader(files, "feature_extractor")
        rate = getattr(reader, "sampling_rate", SAMPLING_RATE)
        samples = 0.1 * random.standard_normal(int(SOUND_S * rate)).astype(np.float32)
        if reader is not None:
            return _accepted(model, reader(samples, sampling_rate=rate, return_tensors="pt"))
        if name == "input_values":
            return {name: torch.from_numpy(samples)[None]}
    raise UnsupportedModelError(
        f"inputs: expected a model that reads tokens, images or sound, with the files of its processor, got "
        f"{type(model).__name__}, which reads {name}; put them next to the weights, or give inputs in Python"
    )


def _image_shape(config: Any, given: tuple[int, int] | None) -> tuple[int, int, int] | None:
    """Returns channels, height and width of images as given or configured; or None."""
    size = getattr(config, "image_size", None) if given is None else given
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width


def _accepted(model: Any, made: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a processor that the forward has arguments for."""
    names = inspect.signature(model.forward).parameters
    return {name: each for name, each in made.items() if name in names and isinstance(each, torch.Tensor)}
