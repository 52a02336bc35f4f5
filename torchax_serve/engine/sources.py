"""The encoder beside a decoder: each request has an input of its own, which is encoded when the request begins.

The decoder's first forward makes keys and values of the encoder's output, which are kept by slot; of the input nothing
but its length is needed from then on. A request that had to make room is encoded anew. An encoder of sounds that hears
one length alone has run before the request comes, which brings its output along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
import torch
from transformers.modeling_outputs import MoEModelOutput

from model_adapters.arrays import from_host
from model_adapters.causality import ignores_masked
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.program import CallSpec
from torchax_serve.buckets import ladder
from torchax_serve.engine.request import Source
from torchax_serve.request import SamplingParams
from torchax_serve.runtime import Runtime

if TYPE_CHECKING:
    from transformers import GenerationConfig

SMALLEST_SOURCE_LEN = 32
HIDDEN = "encoder_outputs"
MASK = "attention_mask"


class Sources(Protocol):
    """What decoders attend to beside their own tokens, by slot."""

    max_len: int  # of an encoder's output
    rungs: tuple[int, ...]  # that outputs are padded to, ascending

    @property
    def trial(self) -> Source:
        """One to try the model with."""

    @property
    def num_programs(self) -> int:
        """Compiled programs of the encoder."""

    def check(self, name: str, source: Source) -> None:
        """Raises InvalidArgumentError, naming `name`, for what the decoder cannot have."""

    def take(self, slot: int, source: Source) -> None:
        """Gives `slot` to a request with this source."""

    def length(self, slot: int) -> int:
        """Of the encoder's output for `slot`; 0 for nobody's."""

    def encoded(self, slot: int, padded_len: int) -> jax.Array:
        """The encoder's output ``[1, padded_len, width]`` for `slot`; left on the device."""

    def blank(self, padded_len: int) -> jax.Array:
        """An output for nobody, to compile with."""


class Texts:
    """Inputs of an encoder of texts.

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
                "expected an encoder of texts that does not see what its mask hides, so that inputs may be padded, or "
                "one of sounds of a single length, got "
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

    def check(self, name: str, ids: Source) -> None:
        """Raises InvalidArgumentError, naming `name`, for an input that the encoder cannot have."""
        if isinstance(ids, np.ndarray):
            raise InvalidArgumentError(f"{name}: expected token ids for the encoder, got its output; give source_ids")
        if not 1 <= len(ids) <= self.max_len:
            raise InvalidArgumentError(
                f"{name}: expected an input of 1 to {self.max_len} tokens for the encoder, got {len(ids)}; shorten it, "
                "or raise EngineOptions(max_source_len=...) where the model has the positions"
            )
        self._runtime.limits.check_ids(torch.tensor(ids), name)

    def take(self, slot: int, ids: Source) -> None:
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


class Sounds:
    """Outputs of an encoder of sounds that hears one length alone, made before their requests come.

    Args:
        runtime: of the whole model.
        length: of every output.
    """

    @property
    def num_programs(self) -> int:
        """None: the encoder has run before."""
        return 0

    def __init__(self, runtime: Runtime, length: int) -> None:
        hidden: Any = runtime.trial_context()[HIDDEN][0]  # a shape
        self.max_len = length
        self.rungs: tuple[int, ...] = (length,)
        self._shape, self._dtype = (1, length, hidden.shape[2]), hidden.dtype
        self._outputs: dict[int, np.ndarray] = {}

    @property
    def trial(self) -> np.ndarray:
        """Noise, of the size of what a normalised output has."""
        return np.random.default_rng(1).standard_normal(self._shape).astype(self._dtype)

    def check(self, name: str, source: Source) -> None:
        """Raises InvalidArgumentError, naming `name`, for anything but an output of the encoder."""
        got = source.shape if isinstance(source, np.ndarray) else f"{len(source)} token ids"
        if got != self._shape:
            raise InvalidArgumentError(
                f"{name}: expected the output {list(self._shape)} of the encoder of sounds, got {got}; call "
                "transcribe(), or generate() with features"
            )

    def take(self, slot: int, source: Source) -> None:
        """Gives `slot` to a request with this output."""
        assert isinstance(source, np.ndarray)
        self._outputs[slot] = source

    def length(self, slot: int) -> int:
        """Of the output in `slot`; 0 for nobody's."""
        return self.max_len if slot in self._outputs else 0

    def encoded(self, slot: int, padded_len: int) -> jax.Array:
        """The output in `slot`, on the device."""
        return from_host(self._outputs[slot], self._dtype)

    def blank(self, padded_len: int) -> jax.Array:
        """The output for nobody's sound, to compile with."""
        return from_host(np.zeros(self._shape), self._dtype)


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
