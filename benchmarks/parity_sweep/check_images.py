"""Check of a tiny random model of images and text against eager PyTorch.

Compared are logits, and the tokens of ``generate``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from model_adapters.errors import UnsupportedModelError
from parity_sweep.check_causal import TOLERANCE, cache_kinds, compile_seconds, described
from parity_sweep.check_engine import engine_options, on_engine
from parity_sweep.tiny.images import image_model, image_text_class, inputs_of
from parity_sweep.tiny.media_prompts import Inputs, batched
from parity_sweep.tiny.models import NUM_NEW, Expected, clearest, greedy
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.serve import serve
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.parity.result import PASSED, STATIC, TRANSFORMERS_LOOP, ProbeResults, Result, error_line

DECODER_IDS = torch.tensor([[1, 7, 5]])
"""First decoder tokens of encoder-decoder models, int64[1, 3]."""
MIN_LOGIT_CHANGE = 1e-3
"""Smallest change of some logit when the image is replaced, for a model that looks at its image."""


def check(model_type: str) -> Result:
    """Checks one model type; errors are stored in the result."""
    began = time.monotonic()
    result = Result(model_type, image_text_class(model_type).__name__)
    with compile_seconds() as seconds:
        try:
            model, expected = clearest(
                functools.partial(image_model, model_type), functools.partial(expect, model_type=model_type)
            )
        except UnsupportedModelError as error:
            return dataclasses.replace(result, status="impossible", error=str(error))
        result = _compared(described(result, model, expected), model, expected, model_type)
    return dataclasses.replace(result, compile_s=round(sum(seconds), 2), total_s=round(time.monotonic() - began, 2))


@torch.no_grad()
def expect(model: PreTrainedModel, model_type: str) -> Expected:
    """Computes the outputs of eager PyTorch, each on a copy of the model.

    Raises:
        UnsupportedModelError: the model fails in PyTorch itself, or does not look at images; with the reason.
    """
    name = type(model).__name__
    try:
        inputs = [inputs_of(model, model_type, index) for index in range(2)]
        logits = _forward(copy.deepcopy(model), inputs[0])
        others = {key: inputs[1][key] for key in inputs[0] if "pixel" in key or "patches" in key}
        changed = _forward(copy.deepcopy(model), {**inputs[0], **others})
        assert torch.isfinite(logits).all(), "logits that are no numbers"
        unbatched = [greedy(model, None, None, copy.deepcopy(one)) for one in inputs]
    except Exception as error:
        raise UnsupportedModelError(f"{name} fails in PyTorch itself: {error_line(error)}") from error
    if others and float((changed - logits).abs().max()) < MIN_LOGIT_CHANGE:
        raise UnsupportedModelError(f"{name} gives the same logits for another image")
    notes, gaps, padded = [], [gap for _, gap in unbatched], None
    try:
        padded, gap = greedy(model, None, None, batched(inputs))
        gaps.append(gap)
    except Exception as error:
        notes.append(f"eager generate on a padded batch raises {error_line(error)}; not compared")
    return Expected(logits, padded, tuple(tokens for tokens, _ in unbatched), min(gaps), {}, tuple(notes))


def _forward(model: Any, inputs: Inputs) -> torch.Tensor:
    decoder = {"decoder_input_ids": DECODER_IDS} if model.config.is_encoder_decoder else {}
    return model(**copy.deepcopy(inputs), **decoder).logits


def _compared(result: Result, model: PreTrainedModel, expected: Expected, model_type: str) -> Result:
    """Serves `model` and returns `result` with the comparison."""
    tried = ProbeResults()
    inputs = [inputs_of(model, model_type, index) for index in range(2)]

    with serve(model, engine=options_of(inputs)) as served:
        kinds = cache_kinds(served.torch_model._jax_runtime)
        logits = tried("forward", _forward, served.torch_model, inputs[0])
        difference = None if logits is None else float((logits - expected.logits).abs().max())
        answers = [tried(f"prompt {index}", _generated, served, one) for index, one in enumerate(inputs)]
        unbatched_same = all(
            ours is not None and torch.equal(ours, theirs)
            for ours, theirs in zip(answers, expected.unbatched, strict=True)
        )
        padded_same = None
        if expected.padded is not None:
            padded = tried("padded", _generated, served, batched(inputs))
            padded_same = padded is not None and torch.equal(padded, expected.padded)
        executor = STATIC if served.torch_model._jax_runtime.steps.num_traces["decode"] else TRANSFORMERS_LOOP
        executor, reason, engine_answers = on_engine(served, inputs, executor, tried)
        engine_same = (
            None if engine_answers is None else engine_answers == [row[0].tolist() for row in expected.unbatched]
        )
    if not expected.prompts_differ:
        tried.errors.append("harness: the prompts have one answer")
    passed = difference is not None and difference <= TOLERANCE and unbatched_same
    passed = passed and padded_same is not False and engine_same is not False
    return dataclasses.replace(
        result,
        status=PASSED if passed and not tried.errors else "failed",
        executor=executor,
        fallback_reason=reason,
        engine_equal=engine_same,
        cache_kinds=kinds,
        forward_difference=difference,
        padded_equal=padded_same,
        unbatched_equal=unbatched_same,
        error="; ".join(tried.errors) or None,
    )


def options_of(inputs: list[Inputs]) -> EngineOptions:
    """Returns an engine whose steps have no room for both prompts, so that one is cut.

    A prompt whose tokens see each other has room.
    """
    prompt_lens = [one["input_ids"].shape[1] for one in inputs if "input_ids" in one]
    return engine_options(prompt_lens, 32 if "token_type_ids" in inputs[0] else 19)


def _generated(served: ServedModel, inputs: Inputs) -> torch.Tensor:
    tokens = served.generate(**copy.deepcopy(inputs), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)
    return tokens[:, -NUM_NEW:]
