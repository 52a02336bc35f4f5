"""Encoders of sounds that hear one length alone, such as Whisper's: found by asking them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from model_adapters.program.model_program import CallSpec

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime

FEATURES = "input_features"


def fixed_output_len(encoder: ModelRuntime) -> int | None:
    """The length of every output of `encoder`; None of one that hears sounds of several lengths, or none."""
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
        except Exception:  # whatever model code raises for sounds of another length
            return None

    def ask() -> int | None:
        frames = 2 * length  # Whisper's second convolution takes every other one
        return length if output_len(frames) == length and output_len(frames - 2) is None else None

    return encoder.steps.executables.memoize("length heard", "", ask)
