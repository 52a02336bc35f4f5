"""The encoder among a model's parts: when it runs, and what the decoder sees of its output."""

from __future__ import annotations

import functools
from typing import Any, Generic, Protocol, TypeVar

import jax

from model_adapters.caches.encoder_mask import SourceMask, mask_over_audio
from model_adapters.program.model_program import CallSpec, ModelProgram
from model_adapters.program.padding_safety import masked_tokens_are_ignored
from torchax_serve.runtime.model_generate import overrides_generate
from torchax_serve.runtime.step_functions import StepFunctions

FEATURES, PIXELS = "input_features", "pixel_values"


class SubmoduleRuntime(Protocol):
    """Interface of the compiled encoder's runtime."""

    program: ModelProgram
    steps: StepFunctions

    @property
    def config(self) -> Any:
        """The encoder's transformers config."""

    @property
    def weights(self) -> Any:
        """Arrays by name."""


Runtime = TypeVar("Runtime", bound=SubmoduleRuntime)


class EncoderRuntime(Generic[Runtime]):
    """Encoder of an encoder-decoder model.

    Args:
        program: program of the model that has both.
        runtime: of the encoder alone.
    """

    def __init__(self, program: ModelProgram, runtime: Runtime) -> None:
        self._program, self.runtime = program, runtime

    @property
    def name(self) -> str:
        """Name of the encoder among the model's parts."""
        return self.runtime.program.submodule

    @functools.cached_property
    def is_masked(self) -> bool:
        """Whether the decoder masks positions of the encoder output, as for text."""
        reads_ids = getattr(self.runtime.program.target, "main_input_name", "input_ids") == "input_ids"
        return reads_ids and self._program.accepts("attention_mask")

    @functools.cached_property
    def output_mask(self) -> SourceMask | None:
        """Mask rule of the encoder output in the decoder; None if it attends to all, or if unknown."""
        return SourceMask() if self.is_masked else mask_over_audio(self._program.module)

    @functools.cached_property
    def runs_before_engine(self) -> bool:
        """Whether the encoder has run before a request goes to the engine.

        Its class has a ``generate`` that prepares the rest, or the encoder reads audio or images, or inputs of several
        lengths cannot be padded for it.
        """
        can_pad = self.is_masked and masked_tokens_are_ignored(self.runtime.program.target)
        return not can_pad or overrides_generate(self._program.module)

    @functools.cached_property
    def fixed_output_len(self) -> int | None:
        """The length of every output, of an encoder of audio or images of a fixed size."""
        return find_fixed_output_len(self.runtime) or find_image_output_len(self.runtime)


def find_fixed_output_len(encoder: SubmoduleRuntime) -> int | None:
    """Returns the output length of an audio encoder with a fixed input length (Whisper).

    Found by tracing two lengths; None of an encoder that takes several lengths, or none of audio.
    """
    length, num_bins = (getattr(encoder.config, name, None) for name in ("max_source_positions", "num_mel_bins"))
    if length is None or num_bins is None or not encoder.program.accepts(FEATURES):
        return None
    dtype = str(encoder.program.module.dtype).removeprefix("torch.")

    def output_len(num_frames: int) -> int | None:
        features = jax.ShapeDtypeStruct((1, num_bins, num_frames), dtype)

        def run(weights: Any, features: Any) -> Any:
            return encoder.program.forward(weights, None, None, {FEATURES: features}, CallSpec())[0]

        try:
            return int(jax.eval_shape(run, encoder.weights, features)["last_hidden_state"].shape[1])
        except Exception:  # whatever model code raises for audio of another length
            return None

    def probe() -> int | None:
        frames = 2 * length  # Whisper's second convolution takes every other one
        return length if output_len(frames) == length and output_len(frames - 2) is None else None

    return encoder.steps.executables.memoize("fixed input length", "", probe)


def find_image_output_len(encoder: SubmoduleRuntime) -> int | None:
    """Returns the output length of an image encoder for an image of its configuration's size.

    Found by tracing; None of an encoder that reads more than pixels, or whose configuration has no size.
    """
    size, channels = getattr(encoder.config, "image_size", None), getattr(encoder.config, "num_channels", 3)
    if size is None or getattr(encoder.program.target, "main_input_name", None) != PIXELS:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    dtype = str(encoder.program.module.dtype).removeprefix("torch.")

    def run(weights: Any, pixels: Any) -> Any:
        return encoder.program.forward(weights, None, None, {PIXELS: pixels}, CallSpec())[0]

    def probe() -> int | None:
        pixels = jax.ShapeDtypeStruct((1, channels, height, width), dtype)
        try:
            hidden = jax.eval_shape(run, encoder.weights, pixels).get("last_hidden_state")
        except Exception:  # whatever model code raises for an image of that size
            return None
        return int(hidden.shape[1]) if hidden is not None and hidden.ndim == 3 else None

    return encoder.steps.executables.memoize("image output length", "", probe)
