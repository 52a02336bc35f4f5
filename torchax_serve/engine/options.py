"""`EngineOptions`: sizes and policies of an engine.

They have the names that vLLM gives them, where it has one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from model_adapters.errors import InvalidArgumentError
from torchax_serve.engine.kv_events import KVEventsConfig
from torchax_serve.sampling_params import MAX_LOGPROBS
from torchax_serve.scheduler.config import check_int
from torchax_serve.scheduler.speculative_config import SpeculativeConfig
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES
from torchax_serve.validation.argument_hints import fields_refuse_unknown

MAX_NUM_WAITING = 8192
"""Default limit of the requests that wait for a slot."""

MAX_NUM_WAITING_TOKENS = 1 << 22
"""Default limit of the tokens of waiting prompts; as Python numbers they take about 150 MB."""

MAX_MODEL_LEN = 32768
"""Default limit of prompt and answer together, in tokens: page tables and attention masks have that width."""


MAX_DISPATCH_S = 0.1
"""Longest dispatch of several decode steps, in seconds: a request that arrives meanwhile waits for its end."""


MAX_ENCODER_LEN = 1024
"""Default limit of the encoder input of an encoder-decoder model, in tokens."""


MAX_DECODER_LEN = 4096
"""Default limit of the decoder tokens of an encoder-decoder model: each slot also stores encoder keys and values."""


_POSITIVE = (
    "max_num_seqs",
    "page_size",
    "max_num_batched_tokens",
    "max_num_steps",
    "max_num_waiting",
    "max_num_waiting_tokens",
)


@fields_refuse_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of an engine. None: chosen from the model and the free memory.

    Attributes:
        max_model_len: Prompt and answer of one request, in tokens; None: the model's own limit.
        max_num_seqs: Number of requests that run at once. An audio encoder-decoder model gets fewer where encoder keys
            and values of that many requests would take more than half of the memory.
        page_size: Tokens of a page of the cache.
        max_encoder_len: Encoder input of one request, in tokens; every slot reserves memory for its keys and values.
            None: the positions of the encoder, at most 1024, and less where that would take more than half of the
            memory. A model whose encoder has a fixed input length takes None only.
        kv_cache_memory_bytes: Bytes of all pages together.
        kv_offloading_bytes: Bytes of host memory for pages of prefixes that the device has to evict, all replicas of
            this process together; they are loaded when a prompt begins with them. 0: such prefixes are computed again.
        max_num_batched_tokens: Tokens computed in one step, all requests together.
        enable_prefix_caching: Whether requests share the pages of a common prefix.
        max_num_waiting: Requests that may wait for a slot; one more is refused with `QueueFullError`. `generate_batch`
            queues longer lists by itself.
        max_num_waiting_tokens: Tokens of the prompts that wait for a slot, those of each answer counted; a request that
            would bring more is refused with `QueueTokensError`.
        max_logprobs: Likeliest tokens whose log-probabilities a request may ask for; -1: all of the vocabulary. Above
            20, programs that compute log-probabilities return so many of each token, which takes memory for each.
        max_num_steps: Decode steps in one dispatch, at most, while no request waits. Fewer are sent where they would
            take more than 0.1 s, 0.05 s just after a request has arrived, or a quarter of `ttft_target_ms`, since a
            request that arrives meanwhile waits for the dispatch.
        max_decode_slowdown: Factor by which prompts of new requests may lengthen the time per token of running
            requests. A larger factor shortens the time to first token; a small one keeps the pace of running requests
            in a flood of prompts, which then waits.
        tpot_target_ms: Milliseconds per token of running requests that prompts of new requests may lengthen it to, in
            place of `max_decode_slowdown`. Where a token takes longer without any, prompts get a tenth of the time.
        ttft_target_ms: Milliseconds from a request's arrival to its first token. Its prompt is computed as slowly as
            this allows, in favour of running requests; where it does not, as fast as the two options above allow.
            None: always as fast as that.
        kv_cache_dtype: "int8" or "fp8" (float8_e4m3fn, where the chip has it) stores keys and values in 8 bits, so that
            twice as many tokens of a 16-bit model fit; a scale for each layer and head is calibrated at the start with
            a prompt of random tokens. None: the model's dtype.
        batch_invariant: Whether a request's results are bit-equal for any other requests in the batch; float32 on a
            CPU always has that. In bfloat16 and float16 batches of up to four requests then lose about a quarter of
            their tokens per second, as they go without a faster order of summation.
        speculative: How decode steps speculate, such as ``{"method": "ngram", "num_speculative_tokens": 4}``: the keys
            are those of vLLM's `speculative_config`. Tokens stay the same. None: they do not.
        kv_events_config: Which prefixes enter and leave the cache, published over ZeroMQ, such as
            ``{"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}``: the keys are vLLM's. None: nowhere.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    page_size: int = 16
    kv_cache_memory_bytes: int | None = None
    kv_offloading_bytes: int = 0
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    max_num_steps: int = 16
    max_decode_slowdown: float = 8.0
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    batch_invariant: bool = False
    kv_cache_dtype: str | None = None
    max_encoder_len: int | None = None
    speculative: SpeculativeConfig | Mapping[str, Any] | None = None
    max_num_waiting: int = MAX_NUM_WAITING
    max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    max_logprobs: int = MAX_LOGPROBS
    kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative", SpeculativeConfig.parse(self.speculative))
        object.__setattr__(self, "kv_events_config", KVEventsConfig.parse(self.kv_events_config))
        if self.kv_events is not None and self.enable_prefix_caching is False:
            raise InvalidArgumentError(
                "kv_events_config: expected None with enable_prefix_caching=False, as events are about prefixes, got "
                "one; leave one of them out"
            )
        for name in _POSITIVE:
            check_int(name, getattr(self, name), 1, "give a positive number")
        for name in ("max_model_len", "kv_cache_memory_bytes", "max_encoder_len"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, "None chooses")
        check_int("kv_offloading_bytes", self.kv_offloading_bytes, 0, "0 is none")
        check_int("max_logprobs", self.max_logprobs, -1, "-1 is the whole vocabulary, 20 is usual")
        if self.speculative is not None and not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise InvalidArgumentError(
                f"max_logprobs: expected 0 to {MAX_LOGPROBS} next to speculative decoding, whose steps return those of "
                f"all drafts, got {self.max_logprobs}; leave one of them out"
            )
        if self.kv_offloading_bytes and self.enable_prefix_caching is False:
            raise InvalidArgumentError(
                f"kv_offloading_bytes: expected 0 with enable_prefix_caching=False, as it stores prefixes, got "
                f"{self.kv_offloading_bytes}; leave one of them out"
            )
        for name in ("enable_prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            names = ", ".join(repr(name) for name in KV_CACHE_DTYPES)
            raise InvalidArgumentError(f"kv_cache_dtype: expected {names} or None, got {self.kv_cache_dtype!r}")
        slowdown = self.max_decode_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 < slowdown < math.inf:
            raise InvalidArgumentError(f"max_decode_slowdown: expected a number above 1, got {slowdown!r}")
        for name in ("tpot_target_ms", "ttft_target_ms"):
            target = getattr(self, name)
            is_number = isinstance(target, int | float) and not isinstance(target, bool)
            if target is not None and not (is_number and 0 < target < math.inf):
                raise InvalidArgumentError(f"{name}: expected milliseconds above 0 or None, got {target!r}")

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """What is published of the prefix cache; None: nothing."""
        config = KVEventsConfig.parse(self.kv_events_config)
        return config if config is not None and config.publishes else None

    @property
    def has_draft_model(self) -> bool:
        """Whether another model or a head drafts."""
        config = SpeculativeConfig.parse(self.speculative)
        return config is not None and not config.looks_up

    def with_speculative(self, config: Mapping[str, Any]) -> Self:
        """Returns the options with `speculative`, given as `serve` takes it.

        Raises:
            InvalidArgumentError: both are given, or the config is none.
            UnsupportedArgumentError: its method is not supported.
        """
        if self.speculative is not None:
            raise InvalidArgumentError(
                "speculative_config: expected it once, got it in EngineOptions(speculative=...), too; leave one out"
            )
        return dataclasses.replace(self, speculative=config)
