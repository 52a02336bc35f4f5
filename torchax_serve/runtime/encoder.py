"""The encoder among a model's parts: when it runs, and what the decoder sees of its output."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from model_adapters.caches.encoder_mask import SourceMask, mask_over_sounds
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.padding_safety import masked_tokens_are_ignored
from torchax_serve.runtime.encoder_length import fixed_output_len
from torchax_serve.runtime.model_generate import overrides_generate

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


class EncoderRuntime:
    """The encoder beside a decoder.

    Args:
        whole: program of the model that has both.
        runtime: of the encoder alone.
    """

    def __init__(self, whole: ModelProgram, runtime: ModelRuntime) -> None:
        self._whole, self.runtime = whole, runtime

    @property
    def name(self) -> str:
        """Of the encoder among the model's parts."""
        return self.runtime.program.submodule

    @functools.cached_property
    def is_masked(self) -> bool:
        """Whether the decoder masks positions of the encoder's output, as it does for an encoder of texts."""
        reads_ids = getattr(self.runtime.program.target, "main_input_name", "input_ids") == "input_ids"
        return reads_ids and self._whole.accepts("attention_mask")

    @functools.cached_property
    def output_mask(self) -> SourceMask | None:
        """How the decoder is told what to see of the encoder's output; None where it sees all, or it is not known."""
        return SourceMask() if self.is_masked else mask_over_sounds(self._whole.module)

    @functools.cached_property
    def runs_before_engine(self) -> bool:
        """Whether the encoder has run before a request goes to the engine.

        Its class has a ``generate`` that prepares the rest, or it hears, or inputs of several lengths cannot be padded
        for it.
        """
        can_pad = self.is_masked and masked_tokens_are_ignored(self.runtime.program.target)
        return not can_pad or overrides_generate(self._whole.module)

    @functools.cached_property
    def fixed_output_len(self) -> int | None:
        """The length of every output, where it hears sounds of one length alone."""
        return fixed_output_len(self.runtime)
