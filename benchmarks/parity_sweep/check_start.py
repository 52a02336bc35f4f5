"""Checks that a second process has the tokens of the first, from what that left on disk."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import UnsupportedModelError
from parity_sweep import check_causal, check_seq2seq
from parity_sweep.check_engine import engine_options
from parity_sweep.starts import Start, StartProcesses
from parity_sweep.tiny.audio import audio_inputs, audio_model, is_audio_type
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import Expected, clearest, model_with_margins, prompts
from torchax_serve.engine.options import EngineOptions
from torchax_serve.parity.result import PACKED, PASSED, PER_SEQUENCE, Result, error_line
from torchax_serve.parity.tasks import CAUSAL

SEPARATOR = ":"
"""Between the task and the type in a name, of which causal types have the type alone."""
Case = tuple[PreTrainedModel, Expected, list[Inputs], EngineOptions]
"""A model, its outputs in eager PyTorch, inputs of which each has one answer, and options of the engine."""


def names() -> list[str]:
    """Lists the types that the engine takes: ``llama``, ``seq2seq:bart``, ``speech:whisper``."""
    from torchax_serve.parity.tasks import shipped

    found = []
    for task in CASES:
        _, results = shipped(task, transformers.__version__)
        taken = [name for name, each in results.items() if each.executor in (PACKED, PER_SEQUENCE)]
        found += [name if task == CAUSAL else f"{task}{SEPARATOR}{name}" for name in sorted(taken)]
    return found


def check(name: str) -> Result:
    """Checks one type; errors are stored in the result."""
    began = time.monotonic()
    task, _, model_type = name.rpartition(SEPARATOR)
    try:
        model, expected, inputs, engine = CASES[task or CAUSAL](model_type)
    except UnsupportedModelError as error:
        return Result(name, "", status="impossible", error=error_line(error))
    result = Result(name, type(model).__name__, smallest_gap=round(expected.smallest_gap, 6))
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "model"
        try:
            model.save_pretrained(folder)
            first = _processes().start(folder, inputs, engine)
            wanted = [row[0].tolist() for row in expected.unbatched]
            result = dataclasses.replace(result, executor=first.executor, engine_equal=first.tokens == wanted)
            second = _processes().start(folder, inputs, engine)
            result = _compared(result, first, second)
        except Exception as error:
            status = "crashed" if "ended with status" in str(error) else "failed"
            result = dataclasses.replace(result, status=status, error=error_line(error))
    return dataclasses.replace(result, total_s=round(time.monotonic() - began, 2))


def _compared(result: Result, first: Start, second: Start) -> Result:
    errors = []
    if not result.engine_equal:
        errors.append("the first start has other tokens than eager PyTorch")
    if second.tokens != first.tokens:
        errors.append("the second start has other tokens than the first")
    if second.num_traced or not second.num_read:
        errors.append(f"the second start traced {second.num_traced} programs and read {second.num_read}")
    return dataclasses.replace(
        result,
        status="failed" if errors else PASSED,
        second_equal=second.tokens == first.tokens,
        by_record=second.by_record,
        num_read=second.num_read,
        error="; ".join(errors) or None,
    )


@functools.cache
def _processes() -> StartProcesses:
    """Returns the processes of both starts; what is set in this process is not set there."""
    return StartProcesses()


def _causal(model_type: str) -> Case:
    model, expected = model_with_margins(model_type)
    return model, expected, [{"input_ids": ids} for ids in prompts()], check_causal.ENGINE


def _with_inputs(
    make: Callable[[int], PreTrainedModel], inputs_of: Callable[[PreTrainedModel], check_seq2seq.ParityInputs]
) -> Case:
    model, expected = clearest(make, lambda model: check_seq2seq.expect(model, inputs_of(model)), check_seq2seq.SEEDS)
    given = inputs_of(model)
    inputs = [given["first"], given["second"]]
    is_decoder = not model.config.is_encoder_decoder
    lens = [one["input_ids"].shape[1] for one in inputs if is_decoder and "input_ids" in one]
    return model, expected, inputs, engine_options(lens)


def _seq2seq(model_type: str) -> Case:
    name = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type]
    make = functools.partial(audio_model, model_type, getattr(transformers, name))
    is_audio = is_audio_type(model_type)
    return _with_inputs(make, functools.partial(audio_inputs, model_type) if is_audio else check_seq2seq.text_inputs)


def _speech(model_type: str) -> Case:
    name = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type]
    make = functools.partial(audio_model, model_type, getattr(transformers, name), encoder_type="wav2vec2")
    return _with_inputs(make, functools.partial(audio_inputs, model_type))


CASES: dict[str, Callable[[str], Case]] = {CAUSAL: _causal, "seq2seq": _seq2seq, "speech": _speech}
"""Makes the model and the inputs of a type, by parity task."""
