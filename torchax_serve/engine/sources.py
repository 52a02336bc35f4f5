"""The encoder beside a decoder: each request has an input of its own, which is encoded when the request begins.

The decoder's first forward makes keys and values of the encoder's output, which are kept by slot; of the input nothing
but its length is needed from then on. A request that had to make room is encoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from transformers.modeling_outputs import MoEModelOutput

from model_adapters.arrays import from_host
from model_adapters.causality import ignores_masked
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.program import CallSpec
from torchax_serve.buckets import ladder
from torchax_serve.request import SamplingParams
from torchax_serve.runtime import Runtime

if TYPE_CHECKING:
    from transformers import GenerationConfig

SMALLEST_SOURCE_LEN = 32
HIDDEN = "encoder_outputs"
MASK = "attention_mask"


class Sources:
    """The inputs of the encoder, by slot.

    Args:
        runtime: of the whole model.
        max_len: tokens of an input at the most.

    Raises:
        UnsupportedModelError: the encoder sees what its mask hides, or reads no tokens: inputs cannot be padded.
    """

    def __init__(self, runtime: Runtime, max_len: int) -> None:
        assert runtime.encoder_part is not None
        self._runtime = runtime.part(runtime.encoder_part)
        if not runtime.masks_encoder or not ignores_masked(self._runtime.program.called):
            raise UnsupportedModelError(
                "expected an encoder of texts that does not see what its mask hides, so that inputs may be padded, got "
                f"{type(self._runtime.program.called).__name__}; generate runs it, one batch at a time"
            )
        self.max_len = max_len
        self.rungs = ladder(max_len, 4, SMALLEST_SOURCE_LEN)
        self._ids: dict[int, tuple[int, ...]] = {}

    @property
    def trial(self) -> tuple[int, ...]:
        """An input to try the model with."""
        return tuple(np.random.default_rng(1).integers(1, self._runtime.vocab_size, min(8, self.max_len)).tolist())

    @property
    def num_programs(self) -> int:
        """Compiled programs of the encoder."""
        return self._runtime.steps.forward.num_programs

    def check(self, name: str, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError, naming `name`, for an input that the encoder cannot have."""
        if not 1 <= len(ids) <= self.max_len:
            raise InvalidArgumentError(
                f"{name}: expected an input of 1 to {self.max_len} tokens for the encoder, got {len(ids)}; shorten it, "
                "or raise EngineOptions(max_source_len=...) where the model has the positions"
            )
        self._runtime.limits.check_ids(torch.tensor(ids), name)

    def take(self, slot: int, ids: Sequence[int]) -> None:
        """Gives `slot` to a request with this input."""
        self._ids[slot] = tuple(ids)

    def length(self, slot: int) -> int:
        """Tokens of the input in `slot`; 0 for nobody's."""
        return len(self._ids.get(slot, ()))

    def encoded(self, slot: int, padded_len: int) -> jax.Array:
        """The encoder's output ``[1, padded_len, width]`` for the input in `slot`; left on the device."""
        ids = self._ids[slot]
        arrays = np.zeros((2, 1, padded_len), np.int32)
        arrays[0, 0, : len(ids)], arrays[1, 0, : len(ids)] = ids, 1
        return self._output(from_host(arrays[0], np.int32), from_host(arrays[1], np.int32))

    def blank(self, padded_len: int) -> jax.Array:
        """The output for nobody's input, to compile with."""
        return self._output(*(from_host(np.full((1, padded_len), n), np.int32) for n in (0, 1)))

    def _output(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        given = {"input_ids": ids, MASK: mask}
        fields, _ = self._runtime.steps.forward(self._runtime.weights, None, None, given, spec=CallSpec())
        hidden: jax.Array = fields["last_hidden_state"]
        return hidden


def decoder_prompt(config: GenerationConfig, params: SamplingParams | None) -> list[int]:
    """What a decoder begins with where the caller's tokens are the encoder's, as transformers' ``generate`` begins.

    Raises:
        InvalidArgumentError: the configuration does not say it.
        UnsupportedArgumentError: `params` ask for log-probabilities of the prompt, which no decoder has computed.
    """
    if params is not None and params.prompt_logprobs is not None:
        raise UnsupportedArgumentError(
            "prompt_logprobs: expected None for an encoder-decoder model, whose prompt is read by the encoder and has "
            f"no probabilities, got {params.prompt_logprobs}; leave it out"
        )
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    if not isinstance(start, int):
        raise InvalidArgumentError(
            f"decoder_start_token_id: expected a token id in the model's generation config, got {start!r}; set it"
        )
    return [start]


def context(hidden: Any, mask: Any) -> dict[str, Any]:
    """Arguments of a decoder's forward: the encoder's output ``[1, len, width]``, and int32[1, len], 1 where real."""
    return {HIDDEN: MoEModelOutput(last_hidden_state=hidden), MASK: mask}
