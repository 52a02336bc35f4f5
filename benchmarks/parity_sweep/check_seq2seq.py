"""Check of a tiny random sequence-to-sequence model against eager PyTorch.

Compared are logits, and the tokens of ``generate``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import UnsupportedModelError
from parity_sweep.check_causal import TOLERANCE, cache_kinds, described
from parity_sweep.check_engine import engine_options, on_engine
from parity_sweep.tiny.audio import audio_inputs, audio_model, is_audio_type
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import NUM_NEW, Expected, clearest, greedy, padded_batch, prompts, rounding_error
from torchax_serve.entrypoints.serve import serve
from torchax_serve.parity.result import PASSED, STATIC, TRANSFORMERS_LOOP, ProbeResults, Result, error_line
from torchax_serve.runtime.model_runtime import ModelRuntime

NUM_DECODER_IDS = 5
SEEDS = (*range(3), *range(9, 18), *range(3, 9))
"""Seeds of models, in the order in which they are tried; those that amplify rounding most come last."""

ParityInputs = dict[str, Inputs]
"""Arguments of ``generate``: for the "first" and the "second" input, and for both in one batch, "padded". "forward" has
those of a forward where they differ from "first"."""


def check(model_type: str) -> Result:
    """Checks one model type; errors are stored in the result."""
    name = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type]
    model_class = getattr(transformers, name)
    inputs_of = functools.partial(audio_inputs, model_type) if is_audio_type(model_type) else text_inputs
    return checked(model_type, model_class, functools.partial(audio_model, model_type, model_class), inputs_of)


def checked(
    model_type: str,
    model_class: type[PreTrainedModel],
    make: Callable[[int], PreTrainedModel],
    inputs_of: Callable[[PreTrainedModel], ParityInputs],
) -> Result:
    """Checks a model that `make` builds from a seed, on its `inputs_of`."""
    began = time.monotonic()
    result = Result(model_type, model_class.__name__)
    try:
        model, expected = clearest(make, lambda model: expect(model, inputs_of(model)), SEEDS)
        inputs = inputs_of(model)
    except UnsupportedModelError as error:
        return dataclasses.replace(result, status="impossible", error=str(error))
    result = compared(described(result, model, expected), model, inputs, expected)
    return dataclasses.replace(result, total_s=round(time.monotonic() - began, 2))


def text_inputs(model: PreTrainedModel) -> ParityInputs:
    """Returns token ids int64[batch, len] of two texts, the shorter one padded.

    Padding is on the right for an encoder, else on the left.
    """
    ids, mask = padded_batch()
    if model.config.is_encoder_decoder:
        ids, mask = (_padding_last(x, mask) for x in (ids, mask))
    first, second = ({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts())
    return {"first": first, "second": second, "padded": {"input_ids": ids, "attention_mask": mask}}


def _padding_last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = [torch.roll(row, int(m.sum())) for row, m in zip(x, mask, strict=True)]
    return torch.stack(rows)


@torch.no_grad()
def expect(model: PreTrainedModel, inputs: ParityInputs) -> Expected:
    """Computes the outputs of eager PyTorch.

    Raises:
        UnsupportedModelError: the model fails in PyTorch itself; with PyTorch's own error.
    """
    try:
        logits = forward(copy.deepcopy(model), _of_forward(inputs))
        assert torch.isfinite(logits).all(), "logits that are no numbers"
        found = [greedy(model, None, None, inputs[name]) for name in ("first", "second", "padded")]
    except Exception as error:
        raise UnsupportedModelError(f"{type(model).__name__} fails in PyTorch itself: {error_line(error)}") from error
    (first, _), (second, _), (padded, _) = found
    rounding = rounding_error(model, lambda exact: forward(exact, _in_float64(_of_forward(inputs))), logits)
    return Expected(logits, padded, (first, second), min(gap for _, gap in found), {}, (), rounding)


def _of_forward(inputs: ParityInputs) -> Inputs:
    return inputs.get("forward", inputs["first"])


def _in_float64(given: dict[str, Any]) -> dict[str, Any]:
    is_float = {name: isinstance(x, torch.Tensor) and x.is_floating_point() for name, x in given.items()}
    return {name: x.double() if is_float[name] else x for name, x in given.items()}


def forward(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Returns the decoder's logits for a few tokens.

    A model without an encoder returns those of all tokens.
    """
    given = dict(inputs)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = prompts()[1][:, :NUM_DECODER_IDS]
    return model(**given).logits


def compared(result: Result, model: PreTrainedModel, inputs: ParityInputs, expected: Expected) -> Result:
    """Serves `model` and returns `result` with the comparison."""
    tried = ProbeResults()
    wanted = {"first": expected.unbatched[0], "second": expected.unbatched[1], "padded": expected.padded}
    singles = [inputs["first"], inputs["second"]]
    is_decoder = not model.config.is_encoder_decoder
    prompt_lens = [one["input_ids"].shape[1] for one in singles if is_decoder and "input_ids" in one]
    with serve(model, engine=engine_options(prompt_lens)) as served:
        ours: Any = served.torch_model
        runtime: ModelRuntime = ours._jax_runtime

        logits = tried("forward", forward, ours, _of_forward(inputs))
        difference = None if logits is None else float((logits - expected.logits).abs().max())
        same = {}
        for name, want in wanted.items():
            tokens = tried(name, _generate, ours, inputs[name])
            same[name] = tokens is not None and want is not None and torch.equal(tokens, want)
        executor = STATIC if runtime.steps.num_traces["decode"] else TRANSFORMERS_LOOP
        kinds = cache_kinds(runtime)
        executor, reason, answers = on_engine(served, singles, executor, tried)
        engine_same = None if answers is None else answers == [row[0].tolist() for row in expected.unbatched]
    if not expected.prompts_differ:
        tried.errors.append("harness: the inputs have one answer")
    passed = difference is not None and difference <= TOLERANCE and all(same.values()) and not tried.errors
    passed = passed and engine_same is not False
    return dataclasses.replace(
        result,
        status=PASSED if passed else "failed",
        executor=executor,
        fallback_reason=reason,
        forward_difference=difference,
        padded_equal=same["padded"],
        unbatched_equal=same["first"] and same["second"],
        engine_equal=engine_same,
        cache_kinds=kinds,
        error="; ".join(tried.errors) or None,
    )


def _generate(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    tokens = model.generate(**inputs, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)
    return tokens[:, -NUM_NEW:]
