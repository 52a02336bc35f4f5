"""Check of a tiny random causal model against eager PyTorch.

Compared are logits, and the tokens of ``generate`` and the engine.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from model_adapters.caches.compressed_layer import CompressedLayer
from model_adapters.caches.device_cache import AttentionLayer
from model_adapters.errors import UnsupportedModelError
from model_adapters.ops import registry
from parity_sweep.pool_copies import check_pools
from parity_sweep.tiny.models import (
    NUM_NEW,
    Expected,
    causal_class,
    model_with_margins,
    padded_batch,
    prompts,
    rows_of,
)
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.serve import serve
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.parity.result import (
    PACKED,
    PASSED,
    PER_SEQUENCE,
    STATIC,
    ProbeResults,
    Result,
    error_line,
    why_not_batched,
)
from torchax_serve.runtime.model_runtime import ModelRuntime

TOLERANCE = 1e-4
ENGINE = EngineOptions(
    max_model_len=48, max_num_seqs=4, page_size=4, max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20
)
COMPILE_EVENTS = ("/jax/core/compile/",)


def check(model_type: str) -> Result:
    """Checks one model type; errors are stored in the result."""
    return checked(model_type, causal_class(model_type).__name__, lambda: model_with_margins(model_type))


def checked(name: str, class_name: str, find: Callable[[], tuple[PreTrainedModel, Expected]]) -> Result:
    """Returns the result, called `name`, of the check of a model against its expected outputs.

    `find` returns the model and those outputs.
    """
    began = time.monotonic()
    result = Result(name, class_name)
    with compile_seconds() as seconds, registry.record_calls() as kernels:
        try:
            model, expected = find()
        except UnsupportedModelError as error:
            return dataclasses.replace(result, status="impossible", error=str(error))
        result = _compared(described(result, model, expected), model, expected)
    used = sorted({f"{op} ({name})" for op, name in kernels if name != registry.REFERENCE})
    return dataclasses.replace(
        result, kernels=used, compile_s=round(sum(seconds), 2), total_s=round(time.monotonic() - began, 2)
    )


def described(result: Result, model: PreTrainedModel, expected: Expected) -> Result:
    """Returns `result` with the facts that are known before the model is served."""
    return dataclasses.replace(
        result,
        class_name=type(model).__name__,
        smallest_gap=round(expected.smallest_gap, 6),
        num_distinct=expected.num_distinct,
        notes=list(expected.notes),
        has_tp_plan=bool(getattr(model.config.get_text_config(), "base_model_tp_plan", None)),
        packages=packages_of(model),
    )


def packages_of(model: torch.nn.Module) -> list[str]:
    """Returns the packages that define modules of `model`, with their versions.

    torch and transformers are left out.
    """
    names = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "transformers"}
    return [f"{name} {importlib.metadata.version(name)}" for name in sorted(names)]


def _compared(result: Result, model: PreTrainedModel, expected: Expected) -> Result:
    """Serves `model` and returns `result` with the comparison."""
    tried = ProbeResults()

    with serve(model, engine=ENGINE) as served:
        runtime: ModelRuntime = served.torch_model._jax_runtime
        result = dataclasses.replace(result, cache_kinds=cache_kinds(runtime))
        logits = tried("forward", _logits, served)
        difference = None if logits is None else float((logits - expected.logits).abs().max())
        padded_same = None
        if expected.padded is not None:
            padded = tried("padded", _generate, served, *padded_batch(), expected.options)
            padded_same = padded is not None and torch.equal(padded, expected.padded)
        first = rows_of(model, prompts()[0])
        unbatched = tried("unbatched", _generate, served, first, torch.ones_like(first), expected.options)
        unbatched_same = unbatched is not None and torch.equal(unbatched, expected.unbatched[0])
        try:
            executor, reason = executor_of(served)
        except Exception as error:
            executor, reason = STATIC, why_not_batched(error)
            tried.errors.append(f"engine: {error_line(error)}")
        engine_same = None
        if executor != STATIC or len(first) == 1:  # models of codebooks have several rows for a prompt
            batched = tried("engine", _engine_tokens, served)
            engine_same = batched is not None and all(
                torch.equal(ours, theirs[0]) for ours, theirs in zip(batched, expected.unbatched, strict=False)
            )
        if executor == PACKED:
            tried("pools", check_pools, served)
    parts = [padded_same, unbatched_same, engine_same]
    if not expected.prompts_differ:
        tried.errors.append("harness: the prompts have one answer")
    passed = difference is not None and difference <= TOLERANCE and False not in parts and not tried.errors
    return dataclasses.replace(
        result,
        status=PASSED if passed else "failed",
        executor=executor,
        fallback_reason=reason,
        forward_difference=difference,
        padded_equal=padded_same,
        unbatched_equal=unbatched_same,
        engine_equal=engine_same,
        error="; ".join(tried.errors) or None,
    )


def _logits(served: ServedModel) -> torch.Tensor:
    model: Any = served.torch_model
    return model(input_ids=rows_of(model, prompts()[0])).logits


def _generate(served: ServedModel, ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    model: Any = served.torch_model
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, **options)
    return tokens[..., -NUM_NEW:]


def executor_of(served: ServedModel) -> tuple[str, str | None]:
    """Returns the name of the engine's executor, and why it is not a faster one."""
    try:
        description = served.engine.description
    except UnsupportedModelError as error:
        return STATIC, why_not_batched(error)
    _, not_packed, reason = description.partition(", not packed: ")
    return (PER_SEQUENCE, reason) if not_packed else (PACKED, None)


def _engine_tokens(served: ServedModel) -> list[torch.Tensor]:
    """Returns the new tokens of both prompts on the engine.

    They are batched with sampled requests of other lengths.
    """

    def config(**options: Any) -> GenerationConfig:
        found = copy.deepcopy(served.generation_config)  # with options that the type sets itself, such as forced tokens
        found.update(**options)
        return found

    greedy, sampled = config(max_new_tokens=NUM_NEW, do_sample=False), config(max_new_tokens=5, do_sample=True)
    first, second = (prompt[0].tolist() for prompt in prompts())
    requests = [(first, greedy, None), (second[:3], sampled, 1), (second, greedy, None), (first[5:], sampled, 2)]
    streams = [served.iter_tokens(prompt, wanted, seed=seed) for prompt, wanted, seed in requests]
    answers = [torch.tensor(list(stream)) for stream in streams]
    return [answers[0], answers[2]]


def cache_kinds(runtime: ModelRuntime) -> list[str]:
    """Lists the kinds of the model's cache layers, each once."""
    if not runtime.cache_support.is_supported:
        return []
    kinds = []
    for layer in runtime.cache_support.new(16).states:
        if isinstance(layer, AttentionLayer):
            kinds.append("full" if layer.window is None else "window")
        if isinstance(layer, CompressedLayer):
            kinds.append("compressed")
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds.append("state")
    return sorted(set(kinds))


@contextmanager
def compile_seconds() -> Iterator[list[float]]:
    """Yields a list that collects the seconds JAX spends on compilation in this context.

    Tracing and lowering count, too.
    """
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILE_EVENTS):
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
