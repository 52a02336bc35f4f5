"""Encoder inputs of encoder-decoder models, by slot.

The input of a request is encoded when the request starts. The decoder's first forward computes keys and values of the
encoder's output and stores them by slot; later steps need only the length of the input. A preempted request is encoded
again. Where inputs cannot be padded, or the model's class prepares more than tokens, the encoder runs before the
request is submitted, and the request carries the encoder's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
import torch

from model_adapters.caches.encoder_mask import SourceMask
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.program.model_program import CallSpec
from torchax_serve.buckets import bucket_sizes
from torchax_serve.executors.request_input import RequestInput
from torchax_serve.runtime.encoder_output import output_of
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig

SMALLEST_SOURCE_LEN = 32
"""Smallest bucket of encoder lengths, in tokens: fewer tokens cost the same time."""
HIDDEN = "encoder_outputs"
MASK = "attention_mask"


class EncoderInputs(Protocol):
    """The encoder inputs of the requests in all slots."""

    max_len: int  # maximum length of an encoder output
    buckets: tuple[int, ...]  # lengths that outputs are padded to for later steps, ascending
    first_buckets: tuple[int, ...]  # the same for the encoder and the first step, which pay for padding

    @property
    def probe_input(self) -> RequestInput:
        """An input for probes of the model."""

    @property
    def num_programs(self) -> int:
        """Compiled programs of the encoder."""

    def check(self, name: str, request_input: RequestInput) -> None:
        """Raises InvalidArgumentError, naming `name`, for an input that the model cannot take."""

    def assign(self, slot: int, request_input: RequestInput) -> None:
        """Assigns `slot` to a request with this input."""

    def length(self, slot: int) -> int:
        """Returns the length of the encoder output of `slot`; 0 for an empty slot."""

    def encoder_output(self, slots: Sequence[int], padded_len: int) -> jax.Array:
        """Returns the encoder outputs of `slots`, ``[S, padded_len, width]`` on the device."""

    def dummy(self, padded_len: int, num_rows: int = 1) -> jax.Array:
        """Returns outputs [num_rows, padded_len, width] for compilation."""


class TokenEncoderInputs:
    """Token ids as inputs of a text encoder.

    Args:
        runtime: Runtime of the encoder.
        max_len: Maximum number of tokens of an input.
    """

    def __init__(self, runtime: ModelRuntime, max_len: int) -> None:
        self._runtime = runtime
        self.max_len = max_len
        self.buckets, self.first_buckets = encoder_buckets(max_len), encoder_buckets(max_len, 2)
        self._ids: dict[int, tuple[int, ...]] = {}

    @property
    def probe_input(self) -> tuple[int, ...]:
        """An input for probes of the model."""
        return tuple(
            np.random.default_rng(1).integers(1, self._runtime.limits.vocab_size, min(8, self.max_len)).tolist()
        )

    @property
    def num_programs(self) -> int:
        """Compiled programs of the encoder."""
        return self._runtime.steps.forward.num_programs

    def check(self, name: str, ids: RequestInput) -> None:
        """Implements `EncoderInputs.check`."""
        if not isinstance(ids, tuple):
            raise InvalidArgumentError(f"{name}: expected token ids for the encoder, got its output; give source_ids")
        if not 1 <= len(ids) <= self.max_len:
            raise InvalidArgumentError(
                f"{name}: expected an input of 1 to {self.max_len} tokens for the encoder, got {len(ids)}; shorten it, "
                "or raise EngineOptions(max_encoder_len=...) where the model has the positions"
            )
        self._runtime.limits.check_ids(torch.tensor(ids), name)

    def assign(self, slot: int, ids: RequestInput) -> None:
        """Implements `EncoderInputs.assign`."""
        assert isinstance(ids, tuple)
        self._ids[slot] = ids

    def length(self, slot: int) -> int:
        """Implements `EncoderInputs.length`."""
        return len(self._ids.get(slot, ()))

    def encoder_output(self, slots: Sequence[int], padded_len: int) -> jax.Array:
        """Implements `EncoderInputs.encoder_output`: one batch, whose masks hide the padding."""
        arrays = np.zeros((2, len(slots), padded_len), np.int32)
        for row, slot in enumerate(slots):
            ids = self._ids[slot]
            arrays[0, row, : len(ids)], arrays[1, row, : len(ids)] = ids, 1
        return self._output(to_device(arrays[0], np.int32), to_device(arrays[1], np.int32))

    def dummy(self, padded_len: int, num_rows: int = 1) -> jax.Array:
        """Implements `EncoderInputs.dummy`."""
        return self._output(*(to_device(np.full((num_rows, padded_len), n), np.int32) for n in (0, 1)))

    def _output(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        given = {"input_ids": ids, MASK: mask}
        fields, _ = self._runtime.steps.forward(self._runtime.weights, None, None, given, spec=CallSpec())
        hidden: jax.Array = fields["last_hidden_state"]
        return hidden


class PrecomputedEncoderOutputs:
    """Outputs of an encoder, made before their requests come.

    Args:
        runtime: of the whole model.
        buckets: Lengths that outputs are padded to, ascending; one length for audio encoders with a fixed input length.

    Raises:
        UnsupportedModelError: it is not known how the decoder is told what is padded.
    """

    @property
    def num_programs(self) -> int:
        """None: the encoder has run before."""
        return 0

    def __init__(self, runtime: ModelRuntime, buckets: tuple[int, ...]) -> None:
        encoder = runtime.encoder
        assert encoder is not None
        if encoder.output_mask is None and encoder.fixed_output_len is None:
            raise UnsupportedModelError(
                "expected a decoder that is known to see no more of its encoder's output than a mask says, or an "
                f"encoder of audio of a fixed length, got {type(runtime.program.module).__name__}; generate runs it, "
                "one batch at a time"
            )
        hidden: Any = runtime.cache_support.abstract_encoder_output()[HIDDEN][0]  # a shape
        self.max_len, self.buckets, self.first_buckets = buckets[-1], buckets, buckets
        self._shortest = buckets[-1] if encoder.fixed_output_len is not None else 1
        self._width, self._dtype = hidden.shape[2], hidden.dtype
        self._outputs: dict[int, np.ndarray] = {}

    @property
    def probe_input(self) -> np.ndarray:
        """Noise, of the size of what a normalised output has."""
        shape = (1, max(self._shortest, min(8, self.max_len)), self._width)
        return np.random.default_rng(1).standard_normal(shape).astype(self._dtype)

    def check(self, name: str, request_input: RequestInput) -> None:
        """Raises InvalidArgumentError, naming `name`, for anything but an output of the encoder."""
        lens = f"{self._shortest} to {self.max_len}" if self._shortest < self.max_len else f"{self.max_len}"
        wanted = f"{name}: expected the output [1, {lens}, {self._width}] of the encoder"
        if not isinstance(request_input, np.ndarray):
            given = type(request_input).__name__
            if isinstance(request_input, tuple):
                given = f"{len(request_input)} token ids"
            raise InvalidArgumentError(f"{wanted}, got {given}; call transcribe() or generate()")
        fitting = min(max(request_input.shape[1], self._shortest), self.max_len) if request_input.ndim == 3 else 0
        if request_input.shape != (1, fitting, self._width):
            raise InvalidArgumentError(f"{wanted}, got {list(request_input.shape)}; call transcribe() or generate()")

    def assign(self, slot: int, request_input: RequestInput) -> None:
        """Gives `slot` to a request with this output."""
        assert isinstance(request_input, np.ndarray)
        self._outputs[slot] = request_input

    def length(self, slot: int) -> int:
        """Returns the length of the output in `slot`; 0 for an unused slot."""
        return self._outputs[slot].shape[1] if slot in self._outputs else 0

    def encoder_output(self, slots: Sequence[int], padded_len: int) -> jax.Array:
        """Implements `EncoderInputs.encoder_output`."""
        outputs = np.zeros((len(slots), padded_len, self._width), self._dtype)
        for row, slot in enumerate(slots):
            output = self._outputs[slot][0]
            outputs[row, : len(output)] = output
        return to_device(outputs, self._dtype)

    def dummy(self, padded_len: int, num_rows: int = 1) -> jax.Array:
        """Implements `EncoderInputs.dummy`."""
        return to_device(np.zeros((num_rows, padded_len, self._width)), self._dtype)


def encoder_buckets(max_len: int, growth: int = 4) -> tuple[int, ...]:
    """Lengths that outputs of at most `max_len` are padded to, ascending."""
    return tuple(bucket_sizes(max_len, growth, SMALLEST_SOURCE_LEN))


def decoder_start_ids(config: GenerationConfig, params: SamplingParams | None) -> list[int]:
    """Returns the first tokens of a decoder whose prompt goes to the encoder (``generate``).

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


def context(hidden: Any, source_len: Any, mask: SourceMask) -> dict[str, Any]:
    """Returns the encoder arguments of a decoder, of which `source_len` outputs are seen.

    They are the output ``[1, len, width]`` and the mask int32[1, num_inputs].
    """
    padded_len = hidden.shape[1]
    seen = SourceMask().argument(padded_len, source_len)
    return {HIDDEN: output_of(hidden, seen, mask), MASK: mask.argument(padded_len, source_len)}
