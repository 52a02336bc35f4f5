"""Requests for the executor of single requests: one row of ``generate`` each.

transformers prepares and checks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.generation.batch_forward import BatchForward
from torchax_serve.generation.call_limits import draw_seed
from torchax_serve.generation.routing import Path, Route
from torchax_serve.generation.sample_call import SampleCall, StaticBatchStart, static_batch_start
from torchax_serve.generation.sequence_steps import ForwardSteps, GenerateSteps, GenerateWatch, torch_seed
from torchax_serve.request_params import (
    ENGINE_OPTIONS,
    PLAN_OPTIONS,
    TIME_TOKENS,
    RequestParams,
    unsupported_options,
)
from torchax_serve.runtime.model_generate import without_model_options
from torchax_serve.sampling.forbidden_tokens import check_tokens_left
from torchax_serve.sampling_params import NO_PARAMS, SamplingParams
from torchax_serve.scheduler import Request

UNLIMITED = 2**30
"""Maximum number of new tokens of a ``generate`` call, which ends by its own limit."""

QUEUE_OPTIONS = frozenset({"priority", "timeout_s", "queue_timeout_s", "cache_salt", "speculate"})
"""Options of `SamplingParams` that concern the queue and not the choice of tokens."""


def single_request(
    model: Any,
    chosen: Route,
    inputs: Mapping[str, torch.Tensor],
    config: GenerationConfig,
    params: SamplingParams | None,
    seed: int | None,
) -> Request:
    """Returns the request that continues one row of ``generate``.

    If a static batch can run what transformers prepares, the request has the engine's sampler; otherwise ``generate``
    chooses the tokens.

    Args:
        model: What `torchax_serve.generation.jax_model.run_on_jax` returned.
        chosen: What `torchax_serve.generation.routing.route` returned for the call.
        inputs: Tensors of one row, by argument of ``generate``.
        config: Options of ``generate``.
        params: Options that only the engine honours.
        seed: Seed of sampling; None: one from torch's global generator.

    Raises:
        UnsupportedArgumentError: `params` has options of the engine's sampler, and ``generate`` chooses the tokens.
    """
    call = None if chosen.path is Path.REPOSITORY else prepared_call(model, inputs, config)
    vocab_size: int = model._jax_runtime.limits.vocab_size
    found = chosen.reason if call is None else _forward_request(model, call, params, seed)
    if isinstance(found, Request):
        return found
    reason = found if chosen.reason is None else chosen.reason
    if params is not None and (unknown := {*params.engine_only()} - QUEUE_OPTIONS):
        raise UnsupportedArgumentError(
            f"{', '.join(sorted(unknown))}: expected a request that the engine takes, and this one is not ({reason}); "
            "leave the option out" + (", or set num_beams=1" if is_beam_search(config) else "")
        )
    run = _own_generate if chosen.path is Path.REPOSITORY else _generate
    steps = GenerateSteps(
        functools.partial(run, model, inputs, config, seed, call),
        vocab_size=vocab_size,
        timeout_s=None if params is None else params.timeout_s,
        check_tokens_left=None if call is None else _tokens_left_check(call, vocab_size),
    )
    prompt_ids = inputs["input_ids"][0].tolist() if "input_ids" in inputs else [0]
    greedy = GenerationConfig(max_new_tokens=UNLIMITED, eos_token_id=config.eos_token_id)
    own = RequestParams.of_generation_config(greedy, params or NO_PARAMS, seed=0)
    return Request.of(prompt_ids, own, request_input=steps)


def _forward_request(model: Any, call: SampleCall, params: SamplingParams | None, seed: int | None) -> Request | str:
    """Returns the request of a call on the compiled forward.

    If ``generate`` chooses the tokens itself, the reason is returned instead.
    """
    start = static_batch_start(model._jax_runtime, call)
    if not isinstance(start, StaticBatchStart):
        return start
    max_length = call.stopping_criteria.max_length
    if max_length is None or (unsupported := unsupported_options(call.config, ENGINE_OPTIONS)):
        return "it has no limit of tokens" if max_length is None else f"{', '.join(unsupported)} is set"
    seed = draw_seed(seed, do_sample=call.config.do_sample)
    prompt_ids = call.input_ids[0].tolist()
    config = loop_options(call.config, max_length, len(prompt_ids))
    steps = ForwardSteps(BatchForward(model._jax_runtime, call, start))
    own = RequestParams.of_generation_config(config, params or NO_PARAMS, seed=seed)
    return Request.of(prompt_ids, own, request_input=steps)


def _tokens_left_check(call: SampleCall, vocab_size: int) -> Callable[[Sequence[int]], None]:
    """Returns a check that raises NoTokenLeftError if `call` forbids every next token."""
    row = RequestParams.of_checked(call.config)
    row.check_ids(vocab_size)
    prompt_ids = call.input_ids[0].tolist()

    def check(new_ids: Sequence[int]) -> None:
        check_tokens_left(row, None, [*prompt_ids, *new_ids], len(prompt_ids), vocab_size=vocab_size)

    return check


def prepared_call(model: Any, inputs: Mapping[str, torch.Tensor], config: GenerationConfig) -> SampleCall | None:
    """Returns the call that ``generate`` prepares.

    None if a class's own ``generate`` ends in no sampling loop.

    Args:
        model: What `torchax_serve.generation.jax_model.run_on_jax` returned.
        inputs: Tensors of one row, by argument of ``generate``.
        config: Options of ``generate``.
    """
    call = model.generate(**inputs, generation_config=config, custom_generate=_capture_sample_call)
    return call if isinstance(call, SampleCall) else None


def loop_options(config: GenerationConfig, max_length: int, prompt_len: int) -> GenerationConfig:
    """Returns the options of `config` that a loop over tokens honours.

    The answer ends at `max_length`.
    """
    options = {name: getattr(config, name) for name in PLAN_OPTIONS}
    made = GenerationConfig(**options | {"max_length": max_length, "max_new_tokens": max_length - prompt_len})
    setattr(made, TIME_TOKENS, getattr(config, TIME_TOKENS, None))
    return made


def is_beam_search(config: GenerationConfig) -> bool:
    """Returns whether `config` asks for several beams.

    With beams no token is final before the last one.
    """
    return (config.num_beams or 1) > 1


def _capture_sample_call(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> SampleCall:
    """Ends transformers' ``generate`` after its preparations and returns them.

    It serves as ``custom_generate``.
    """
    for name in ("synced_gpus", "tokenizer", "assistant_model", "streamer"):
        model_kwargs.pop(name, None)
    config = without_model_options(model, generation_config)
    return SampleCall(input_ids, logits_processor, stopping_criteria, config, None, model_kwargs)


def _generate(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    config: GenerationConfig,
    seed: int | None,
    call: SampleCall | None,
    watch: GenerateWatch,
) -> Iterable[int]:
    """Calls ``generate``; returns the tokens of a beam search, which are known at its end."""
    with torch_seed(seed):
        if call is None or not is_beam_search(call.config):
            model.generate(**inputs, generation_config=config, streamer=watch.streamer())
            return ()
        criteria = StoppingCriteriaList([watch.criterion()])
        output = model.generate(**inputs, generation_config=config, stopping_criteria=criteria)
    sequences: torch.Tensor = getattr(output, "sequences", output)
    return sequences[0, call.input_ids.shape[1] :].tolist()


def _own_generate(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    config: GenerationConfig,
    seed: int | None,
    call: SampleCall | None,
    watch: GenerateWatch,
) -> Iterable[int]:
    """Calls the ``generate`` of a model's repository.

    That may honour neither a streamer nor a criterion.

    Raises:
        UnsupportedModelError: it returns something else than one row of token ids that begins with the prompt.
    """
    input_ids = inputs["input_ids"]
    with torch_seed(seed):
        mask = torch.ones_like(input_ids)
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
    sequences = getattr(output, "sequences", output)
    num_rows, prompt_len = input_ids.shape
    if (
        not isinstance(sequences, torch.Tensor)
        or sequences.ndim != 2
        or len(sequences) != num_rows
        or not torch.equal(sequences[:, :prompt_len], input_ids)
    ):
        got = tuple(sequences.shape) if isinstance(sequences, torch.Tensor) else type(sequences).__name__
        raise UnsupportedModelError(
            f"the repository's own generate: expected token ids [1, length] that begin with the prompt, got {got}; "
            "call generate() for what it returns, or load the model without trust_remote_code"
        )
    return sequences[0, prompt_len:].tolist()
