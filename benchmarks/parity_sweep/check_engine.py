"""Runs prompts of a tiny model on the engine, all in one batch."""

from __future__ import annotations

import concurrent.futures
import copy
from typing import Any

from transformers import GenerationConfig

from model_adapters.errors import UnsupportedModelError
from parity_sweep.check_causal import executor_of
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import NUM_NEW
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.generation.engine_rows import prompt_call
from torchax_serve.generation.media_requests import media_request
from torchax_serve.generation.routing import EngineFacts, ModelCapabilities, route
from torchax_serve.parity.result import ProbeResults, why_not_batched
from torchax_serve.runtime.model_generate import overrides_generate
from torchax_serve.scheduler import Request

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "page_size": 4, "kv_cache_memory_bytes": 1 << 20}


def engine_options(prompt_lens: list[int], budget: int | None = None) -> EngineOptions:
    """Returns an engine whose steps have no room for the longest prompt, so that it is cut.

    Args:
        prompt_lens: Numbers of tokens of the decoder's prompts; none where an encoder reads what is given.
        budget: Tokens of a step, in place of that.
    """
    longest = max(prompt_lens, default=NUM_NEW)
    budget = max(8, 2 * longest // 3) if budget is None else budget
    return EngineOptions(**OPTIONS, max_model_len=NUM_NEW + longest, max_num_batched_tokens=budget)


def on_engine(
    served: ServedModel, inputs: list[Inputs], other: str, tried: ProbeResults
) -> tuple[str, str | None, list[list[int]] | None]:
    """Returns the engine's executor, why it is no faster one, and new tokens of all prompts.

    They run in one batch, each with its image, sound or text. If the engine does not take them, the executor is
    `other`, and there are no tokens.
    """
    config = copy.deepcopy(served.generation_config)
    config.update(max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)
    model = served.torch_model if served.torch_model.can_generate() else served._generator()
    encoder = model._jax_runtime.encoder
    if encoder is not None and not encoder.is_masked and overrides_generate(model):
        answers = tried("engine", _of_calls, served, inputs)
        if (reason := _unsupported_reason(served)) is not None or not served.engine.stats().num_steps:
            return other, reason or "its generate does more than it prepares for the loop over tokens", None
    else:
        if set(inputs[0]) <= {"input_ids", "attention_mask"}:  # nothing but text
            prompts: list[dict[str, Any]] = [{"prompt_ids": one["input_ids"][0].tolist()} for one in inputs]
            reason = tried("engine", _why_no_prompt, served, model, prompts[0]["prompt_ids"], config)
        else:
            prompts = [{"prompt_ids": (), "inputs": one} for one in inputs]
            found = tried("engine", media_request, model, lambda: served.engine, inputs[0], config, None, 0)
            reason = None if isinstance(found, Request) else found
        if reason is not None or tried.errors:
            return other, reason, None
        streams = [served.iter_tokens(generation_config=config, **prompt) for prompt in prompts]
        answers = tried("engine", lambda: [list(stream) for stream in streams])
    executor, reason = executor_of(served)
    return executor, reason, answers or []


def _of_calls(served: ServedModel, inputs: list[Inputs]) -> list[list[int]]:
    """Returns the new tokens of calls of a class's own ``generate``, in a thread each."""

    def call(one: Inputs) -> list[int]:
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
        tokens: list[int] = served.generate(**copy.deepcopy(one), **options)[0, -NUM_NEW:].tolist()
        return tokens

    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(call, inputs))


def _unsupported_reason(served: ServedModel) -> str | None:
    """Returns why a model has no engine; None if it has one."""
    try:
        assert served.engine
    except UnsupportedModelError as error:
        return why_not_batched(error)
    return None


def _why_no_prompt(served: ServedModel, model: Any, prompt_ids: list[int], config: GenerationConfig) -> str | None:
    """Returns why the engine does not take a prompt of text; None if it does."""

    def facts() -> EngineFacts:
        reason = _unsupported_reason(served)
        return EngineFacts(reason) if reason is not None else EngineFacts.of(served.engine)

    return route(ModelCapabilities.of(model._jax_runtime), prompt_call(model, prompt_ids, config, facts)).reason
