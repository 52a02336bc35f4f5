"""Factory of a loaded model's engine.

It resolves the options and configures the scheduler for the executor.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.engine.adapters import Adapters
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.kv_events import KVEventPublisher, KVEventsConfig
from torchax_serve.engine.model_runner import NO_ADAPTERS, ModelRunner
from torchax_serve.engine.options import MAX_DECODER_LEN, MAX_DISPATCH_S, MAX_ENCODER_LEN, MAX_MODEL_LEN, EngineOptions
from torchax_serve.executors.base import ExecutorChoice
from torchax_serve.executors.choice import choose_executor
from torchax_serve.executors.dense.single_request import SingleRequestExecutor
from torchax_serve.kv_cache.host_pools import HostPools, least_host_bytes
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.sampling.sampler import tables_bytes
from torchax_serve.sampling.types import columns_for
from torchax_serve.scheduler import (
    BlockEventLog,
    RequestId,
    Scheduler,
    SchedulerConfig,
    SnapshotGroup,
    SpeculativeConfig,
)
from torchax_serve.scheduler.speculative_config import refuse_drafts
from torchax_serve.validation.argument_checks import MAX_INT

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime

logger = logging.getLogger("torchax_serve")

SHARES_NO_BATCH = "this request shares no batch (images, audio, beam search, a model that cannot be batched)"
"""Why a single request cannot have an adapter."""


def build_engine(
    runtime: ModelRuntime,
    options: EngineOptions | None = None,
    ids: Iterator[RequestId] | None = None,
    adapters: Adapters | None = None,
    rank: int = 0,
) -> Engine:
    """Builds an engine for the model of `runtime`; its thread runs until it is closed.

    Args:
        runtime: The model.
        options: Sizes and policies.
        ids: Ids of the requests to come.
        adapters: Adapters that requests can name, for which `runtime` has the matrices; None: none.
        rank: Number of the replica in this process.

    Raises:
        UnsupportedModelError: requests of this model cannot be batched.
        InvalidArgumentError: options do not fit the model.
        OutOfMemoryError: the cache does not fit.
    """
    options = options or EngineOptions()
    sizes = memory_budget(runtime, options)
    choice = choose_executor(runtime, sizes)
    host = _host_pools(runtime, options, choice)
    logger.info("%s", choice)
    runner = ModelRunner(
        choice.executor,
        vocab_size=runtime.limits.vocab_size,
        max_model_len=sizes.max_model_len,
        background=runtime.steps.executables.background,
        rules=runtime.sampling_rules,
        host_pools=host,
        adapters=adapters or NO_ADAPTERS,
        max_logprobs=options.max_logprobs,
    )
    runner.weights_version = runtime.weights_version
    config = _scheduler_config(runtime, options, sizes, choice, host)
    events = None
    if options.kv_events is not None:
        if not config.enable_prefix_caching:
            refuse_events(options.kv_events, "a model whose requests share no prefixes")
        events = KVEventPublisher(options.kv_events, config.groups, config.page_size, rank)
    log = None if events is None else BlockEventLog(config.groups, config.page_size)
    limits = options.max_num_waiting, options.max_num_waiting_tokens
    return Engine(Scheduler(config, events=log), runner, str(choice), ids, *limits, events)


def no_engine(reason: str, options: EngineOptions | None) -> UnsupportedModelError:
    """Returns the error of a model whose requests cannot be batched.

    Raises:
        UnsupportedArgumentError: `options` ask for what only a batch has.
    """
    refuse_drafts(None if options is None else options.speculative, f"this model ({reason})")
    refuse_events(None if options is None else options.kv_events, f"this model ({reason})")
    return UnsupportedModelError(reason)


def refuse_events(events: KVEventsConfig | None, where: str) -> None:
    """Raises UnsupportedArgumentError, naming `where`, if there are `events`."""
    if events is not None:
        raise UnsupportedArgumentError(f"kv_events_config: expected None for {where}, got one; leave it out")


def memory_budget(runtime: ModelRuntime, options: EngineOptions) -> MemoryBudget:
    """Returns the engine's options resolved for a model.

    Raises:
        InvalidArgumentError: options do not fit the model.
    """
    return MemoryBudget(
        max_model_len=_max_model_len(runtime, options),
        max_num_seqs=options.max_num_seqs,
        page_size=options.page_size,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs + 15),
        max_num_steps=options.max_num_steps,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        batch_invariant=options.batch_invariant,
        kv_cache_dtype=options.kv_cache_dtype,
        speculative=SpeculativeConfig.parse(options.speculative),
        sampler_table_bytes=tables_bytes(
            options.max_num_seqs, runtime.limits.vocab_size, _max_model_len(runtime, options)
        ),
        max_encoder_len=_max_encoder_len(runtime, options),
        encoder_len_is_default=options.max_encoder_len is None,
        source_len=None if runtime.encoder is None else runtime.encoder.fixed_output_len,
        enable_prefix_caching=options.enable_prefix_caching,
        num_top=columns_for(options.max_logprobs, runtime.limits.vocab_size),
    )


def build_single_engine(runtime: ModelRuntime, options: EngineOptions | None = None) -> Engine:
    """Builds an engine that runs one request at a time, with steps and caches of the requests.

    Args:
        runtime: The model.
        options: Of these, the limits of waiting requests.

    Raises:
        InvalidArgumentError: `options` ask for a cache in int8; a request that shares no batch brings its own.
    """
    options = options or EngineOptions()
    if options.kv_cache_dtype is not None:
        raise InvalidArgumentError(
            f"kv_cache_dtype: expected None for requests that share no batch (images, audio, beam search, models that "
            f"cannot be batched), whose caches are in the model's dtype, got {options.kv_cache_dtype!r}; leave it out"
        )
    config = SchedulerConfig(
        groups=(),
        page_size=options.page_size,
        max_num_seqs=1,
        max_model_len=MAX_INT,
        max_num_batched_tokens=MAX_INT,
        enable_prefix_caching=False,
        batches_prefill=False,
    )
    runner = ModelRunner(SingleRequestExecutor(), vocab_size=runtime.limits.vocab_size, adapters=SHARES_NO_BATCH)
    runner.weights_version = runtime.weights_version
    description = "single requests: one at a time, each with its own cache"
    return Engine(
        Scheduler(config),
        runner,
        description,
        max_num_waiting=options.max_num_waiting,
        max_num_waiting_tokens=options.max_num_waiting_tokens,
    )


def _host_pools(runtime: ModelRuntime, options: EngineOptions, choice: ExecutorChoice) -> HostPools | None:
    """Returns the pools in host memory for evicted prefixes; None if there are none.

    Raises:
        InvalidArgumentError: the model's requests share no prefixes, several hosts share it, or no page fits.
    """
    num_bytes, cache = options.kv_offloading_bytes, choice.executor.cache
    if not num_bytes:
        return None
    if not choice.executor.limits.shares_prefixes:
        reason = "for a model whose requests share no prefixes, because pages do not hold all of their state"
    elif runtime.steps.executables.launcher is not None:
        reason = "for a model on several hosts"
    elif num_bytes < (least := least_host_bytes(cache)):
        reason = f"or at least {least}, two pages of each layer" + " and a recurrent state" * cache.layout.has_states
    else:
        return HostPools.of_budget(cache, num_bytes)
    raise InvalidArgumentError(f"kv_offloading_bytes: expected 0 {reason}, got {num_bytes}; leave it out")


def _scheduler_config(
    runtime: ModelRuntime,
    options: EngineOptions,
    sizes: MemoryBudget,
    choice: ExecutorChoice,
    host: HostPools | None,
) -> SchedulerConfig:
    """Returns the scheduler's configuration.

    It has the engine's options within the limits of the executor.
    """
    limits, groups = choice.executor.limits, choice.executor.cache.plan.groups
    if host is not None:
        pairs = zip(groups, host.plan.groups, strict=True)
        groups = tuple(dataclasses.replace(group, num_host_pages=there.num_pages) for group, there in pairs)
    snapshots = None
    if limits.num_snapshots and sizes.speculative is not None:
        num_behind = sizes.speculative.num_speculative_tokens
        groups = tuple(dataclasses.replace(group, num_behind=num_behind) for group in groups)
    if limits.num_snapshots:
        snapshots = SnapshotGroup(limits.num_snapshots, 1 if host is None else host.num_snapshots)
    ttft_s = _seconds(options.ttft_target_ms)
    return SchedulerConfig(
        groups=groups,
        page_size=sizes.page_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching and limits.shares_prefixes,
        snapshots=snapshots,
        max_num_steps=max(1, limits.max_num_steps),
        max_fused_decode_s=min(MAX_DISPATCH_S, (ttft_s or math.inf) / 4),
        allowed_chunk_sizes=limits.chunk_sizes,
        batches_prefill=limits.batches_prefill,
        max_decode_slowdown=options.max_decode_slowdown,
        tpot_target_s=_seconds(options.tpot_target_ms),
        ttft_target_s=ttft_s,
        speculative=sizes.speculative,
        token_buckets=limits.token_buckets,
        rope=None if runtime.program.rope is None else runtime.program.rope.lengths,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _max_encoder_len(runtime: ModelRuntime, options: EngineOptions) -> int:
    asked, encoder = options.max_encoder_len, runtime.encoder
    if encoder is None:
        if asked is not None:
            raise InvalidArgumentError(
                f"max_encoder_len: expected None for a model without an encoder, got {asked}; max_model_len limits its "
                "requests"
            )
        return 0
    if encoder.fixed_output_len is not None:
        if asked is not None:
            raise InvalidArgumentError(
                f"max_encoder_len: expected None for a model whose encoder has a fixed input length, got {asked}; "
                "leave it out"
            )
        return encoder.fixed_output_len
    limits = encoder.runtime.limits
    if asked is None:
        return min(MAX_ENCODER_LEN, limits.learned_positions or limits.max_positions or MAX_ENCODER_LEN // 2)
    if limits.learned_positions is not None and asked > limits.learned_positions:
        raise InvalidArgumentError(
            f"max_encoder_len: expected at most {limits.learned_positions}, the positions of this model's encoder, got "
            f"{asked}; lower it"
        )
    return asked


def _max_model_len(runtime: ModelRuntime, options: EngineOptions) -> int:
    limits = runtime.limits
    limit = limits.max_positions or getattr(runtime.text_config, "max_target_positions", None)
    if options.max_model_len is None:
        most = MAX_MODEL_LEN if runtime.encoder is None else MAX_DECODER_LEN
        return min(most, limit or most)
    end = limits.learned_positions if limits.max_positions else limit
    if end is not None and options.max_model_len > end:
        raise InvalidArgumentError(
            f"max_model_len: expected at most {end}, the positions of this model, got {options.max_model_len}; lower it"
        )
    return options.max_model_len
