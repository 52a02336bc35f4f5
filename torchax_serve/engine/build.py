"""From a loaded model to an engine: what its layers keep, how much memory there is for it, what fits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import jax
import numpy as np

from model_adapters.caches import AttentionLayer
from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedModelError
from model_adapters.loading.memory import free_host_bytes
from model_adapters.paged import NotPackableError
from model_adapters.program import CallSpec
from torchax_serve.engine.cache import CachePlan, PagedCache, PageShape
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.packed import PackedModel
from torchax_serve.engine.runner import ModelRunner
from torchax_serve.runtime import Runtime
from torchax_serve.scheduling import Scheduler, SchedulerConfig
from torchax_serve.scheduling.config import check_whole

logger = logging.getLogger("torchax_serve")

HOST_PART = 0.25
"""Part of the free host memory that the cache may take where the host is the device: others live there too."""
DEVICE_PART = 0.9
MAX_LEN = 32768
"""Longest request where nothing else limits it: page tables and masks are that wide."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine is laid out. None: chosen from the model and the memory there is.

    Attributes:
        max_len: prompt and answer of one request, in tokens; the model's own limit if None.
        num_slots: requests that run at once.
        page_len: tokens of a page of the cache.
        kv_cache_bytes: bytes of all pages together.
        token_budget: tokens computed in one step.
        prefix_caching: whether requests share the pages of a common beginning.
        max_num_steps: decode steps sent to the device at once while nothing waits.
    """

    max_len: int | None = None
    num_slots: int = 32
    page_len: int = 16
    kv_cache_bytes: int | None = None
    token_budget: int = 256
    prefix_caching: bool = True
    max_num_steps: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "prefix_caching":
                if value not in (True, False):
                    raise InvalidArgumentError(f"prefix_caching: expected True or False, got {value!r}")
            elif value is not None or field.default is not None:
                check_whole(field.name, value, 1, "None chooses" if field.default is None else "give a positive number")


def build_engine(runtime: Runtime, options: EngineOptions | None = None) -> Engine:
    """An engine for the model of `runtime`; its thread runs until it is closed.

    Raises:
        UnsupportedModelError: the model's forward does not let requests be batched.
        InvalidArgumentError: options that do not fit the model.
        OutOfMemoryError: there is no room for a cache.
    """
    options = options or EngineOptions()
    max_len = _max_len(runtime, options)
    shapes = runtime.steps.cache.remembered("shapes", "", lambda: page_shapes(runtime))
    num_slots = options.num_slots
    token_budget = max(options.token_budget, num_slots + 15)
    budget = options.kv_cache_bytes
    if budget is None:
        budget = _budget_bytes(runtime, shapes, options, max_len, token_budget)
    plan = CachePlan.from_budget(shapes, budget, options.page_len, max_len)
    cache = PagedCache(plan)
    model = PackedModel(
        runtime.program, runtime.weights, cache, runtime.steps.cache, num_slots=num_slots, token_budget=token_budget
    )
    config = SchedulerConfig(
        groups=plan.groups,
        page_len=plan.page_len,
        num_slots=num_slots,
        max_len=max_len,
        token_budget=token_budget,
        prefix_caching=options.prefix_caching,
        max_num_steps=options.max_num_steps,
    )
    logger.info(
        "cache of %.1f MB: %s pages of %d tokens, room for %d tokens; %d requests of %d tokens fit at once",
        plan.num_bytes / 1e6,
        " + ".join(f"{group.num_pages - 1}" for group in plan.groups),
        plan.page_len,
        plan.num_tokens,
        plan.num_requests(max_len),
        max_len,
    )
    runner = ModelRunner(model, cache, num_slots=num_slots, vocab_size=runtime.vocab_size)
    return Engine(Scheduler(config), runner)


def _max_len(runtime: Runtime, options: EngineOptions) -> int:
    limit = runtime.max_positions
    if options.max_len is None:
        return min(MAX_LEN, limit or MAX_LEN)
    if runtime.learned_positions is not None and options.max_len > runtime.learned_positions:
        raise InvalidArgumentError(
            f"max_len: expected at most {runtime.learned_positions}, the positions this model has, got "
            f"{options.max_len}; lower it"
        )
    return options.max_len


def page_shapes(runtime: Runtime) -> tuple[PageShape, ...]:
    """What each layer keeps, found by tracing a prompt.

    Raises:
        NotPackableError: a layer keeps something else than keys and values.
    """
    if not runtime.can_cache or runtime.is_recurrent:
        raise NotPackableError("a layer keeps a recurrent state, or the model has no cache that could be paged")
    cache = runtime.new_cache(16)
    inputs = {"input_ids": jax.ShapeDtypeStruct((1, 16), np.int32)}
    _, states = jax.eval_shape(
        lambda weights, inputs: runtime.program.forward(weights, cache.states, None, inputs, CallSpec()),
        runtime.weights,
        inputs,
    )
    return tuple(_page_shape(layer) for layer in states)


def _page_shape(layer: AttentionLayer) -> PageShape:
    if layer.pool is None:
        raise NotPackableError("a layer of the cache stays empty")
    _, num_heads, _, width = layer.pool.shape
    return PageShape(num_heads, width, np.dtype(layer.pool.dtype), layer.window)


def _budget_bytes(
    runtime: Runtime, shapes: Sequence[PageShape], options: EngineOptions, max_len: int, token_budget: int
) -> int:
    """As much as all slots can use, or as there is: free memory less what the largest step takes beside the cache."""
    per_request = CachePlan.from_budget(shapes, 1 << 60, options.page_len, max_len)
    share = [group.most_pages(max_len, options.page_len) for group in per_request.groups]
    by_window = {group.window: pages for group, pages in zip(per_request.groups, share, strict=True)}
    useful = sum(
        (by_window[shape.window] * options.num_slots + 1) * shape.page_bytes(options.page_len) for shape in shapes
    )
    free = _free_bytes()
    if useful <= free // 8:
        return useful
    temporary = _temporary_bytes(runtime, shapes, options, max_len, token_budget)
    if temporary >= free:
        raise OutOfMemoryError(
            f"expected memory for a step of {token_budget} tokens, which takes {temporary / 1e6:.0f} MB beside the "
            f"weights, got {free / 1e6:.0f} MB; lower token_budget or max_len"
        )
    return min(useful, free - temporary)


def _temporary_bytes(
    runtime: Runtime, shapes: Sequence[PageShape], options: EngineOptions, max_len: int, token_budget: int
) -> int:
    """What the largest step takes beside weights and cache: asked of the compiler, with a cache of few pages."""

    def compile_step() -> int:
        least = CachePlan.from_budget(
            shapes, sum(8 * s.page_bytes(options.page_len) for s in shapes), options.page_len, max_len
        )
        cache = PagedCache(least)
        model = PackedModel(
            runtime.program,
            runtime.weights,
            cache,
            runtime.steps.cache,
            num_slots=options.num_slots,
            token_budget=token_budget,
        )
        return model.temporary_bytes()

    described = f"{options} {max_len} {token_budget}"
    return runtime.steps.cache.remembered("temporary", described, compile_step)


def _free_bytes() -> int:
    """Bytes that the cache may take, weights already there."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return int(free_host_bytes() * HOST_PART)
    return int(stats["bytes_limit"] * DEVICE_PART) - stats["bytes_in_use"]


def why_no_engine(runtime: Runtime) -> str | None:
    """Why the model cannot be served by the engine; None if it can."""
    try:
        page_shapes(runtime)
    except UnsupportedModelError as error:
        return str(error)
    return None
