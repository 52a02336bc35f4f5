"""Check of a tiny random model with a head for a task of transformers against eager PyTorch.

All tensors of the output of ``forward`` are compared.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.errors import UnsupportedModelError
from parity_sweep.check_causal import TOLERANCE, packages_of
from parity_sweep.tiny.heads import head_inputs, head_model
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import MAX_ROUNDING
from torchax_serve.entrypoints.to_jax import to_jax
from torchax_serve.parity.result import PASSED, Result, error_line

IN_OTHER_SWEEPS = frozenset(
    {
        *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TEXT_ENCODING", "MASKED_LM"),
        *("SEQUENCE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    }
)
"""Mappings of transformers that other parity tasks cover."""
OF_NO_TASK = ("image", "backbone", "pretraining")
"""Mappings of models without a head for a task, in the order in which a type without any is looked for."""
SEEDS = (0, 1, 3)
SEPARATOR = ": "
Outputs = dict[str, torch.Tensor]
_NARROW = {torch.int64: torch.int32}
"""Integers of a program have 32 bits."""


@functools.cache
def heads() -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the classes that transformers maps each model type to, by task.

    Base models, backbones and heads for pretraining are those of types that have nothing else.
    """
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    known: set[str] = set()
    elsewhere: set[tuple[str, str]] = set()
    for name in dir(modeling_auto):
        match = re.fullmatch(r"MODEL_FOR_(.+)_MAPPING_NAMES", name)
        if match is None:
            continue
        mapping = {each: _as_tuple(names) for each, names in getattr(modeling_auto, name).items()}
        if match[1] in IN_OTHER_SWEEPS:
            known |= mapping.keys()
            elsewhere |= {(each, names[0]) for each, names in mapping.items()}
        else:
            found[match[1].lower().replace("_", " ")] = mapping
    for task, mapping in found.items():
        found[task] = {each: names for each, names in mapping.items() if (each, names[0]) not in elsewhere}
        if task not in OF_NO_TASK:
            known |= mapping.keys()
    for task in OF_NO_TASK:
        found[task] = {each: names for each, names in found[task].items() if each not in known}
        known |= found[task].keys()
    return found


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def names() -> list[str]:
    """Lists every head as "type: task", all tasks of a type one after the other."""
    return sorted(f"{model_type}{SEPARATOR}{task}" for task, mapping in heads().items() for model_type in mapping)


def check(name: str) -> Result:
    """Checks the classes of one head, named as in `names`; errors are stored in the result."""
    model_type, _, task = name.partition(SEPARATOR)
    began = time.monotonic()
    classes = heads()[task][model_type]
    result = Result(name, ", ".join(classes))
    checked = [_checked(result, model_type, task, getattr(transformers, each)) for each in classes]
    failed = [each for each in checked if each.status != PASSED]
    differences = [each.forward_difference for each in checked if each.forward_difference is not None]
    return dataclasses.replace(
        (failed or checked)[0],
        forward_difference=max(differences, default=None),
        total_s=round(time.monotonic() - began, 2),
    )


def _checked(result: Result, model_type: str, task: str, model_class: type[PreTrainedModel]) -> Result:
    """Returns `result` with the comparison of one class."""
    try:
        model, given, expected = _expected(model_type, task, model_class)
    except UnsupportedModelError as error:
        return dataclasses.replace(result, status="impossible", error=str(error))
    result = dataclasses.replace(result, packages=packages_of(model))
    try:
        found = _outputs(to_jax(model), given)
    except Exception as error:
        return dataclasses.replace(result, error=error_line(error))
    difference, wrong = _difference(found, expected)
    return dataclasses.replace(
        result, status="failed" if wrong else PASSED, forward_difference=difference, error="; ".join(wrong[:4]) or None
    )


@torch.no_grad()
def _expected(
    model_type: str, task: str, model_class: type[PreTrainedModel]
) -> tuple[PreTrainedModel, Inputs, Outputs]:
    """Builds a model that does not amplify rounding, its inputs, and its eager outputs.

    Raises:
        UnsupportedModelError: The model fails in PyTorch itself; with PyTorch's own error.
    """
    for seed in SEEDS:
        model = head_model(model_type, task, model_class, seed)
        try:
            given = head_inputs(model, model_type, task)
            expected = _outputs(copy.deepcopy(model), given)
            assert expected, "outputs without a tensor"
        except Exception as error:
            raise UnsupportedModelError(
                f"{model_class.__name__} fails in PyTorch itself{_place(error)}: {error_line(error)}"
            ) from error
        try:
            doubled = {each: _doubled(value) for each, value in given.items()}
            exact = _outputs(copy.deepcopy(model).double(), doubled)
        except Exception:  # code that does not compute in float64
            break
        difference, wrong = _difference(exact, expected, of_dtype=False)
        if not wrong and difference <= MAX_ROUNDING:
            break
    return model, given, expected


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _place(error: Exception) -> str:
    """Returns where in transformers an error was raised."""
    frames = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("transformers.")
    ]
    return f" at {frames[-1]}" if frames else ""


@torch.no_grad()
def _outputs(model: Any, given: Inputs) -> Outputs:
    """Returns all tensors of the output of a forward by their names, without those of caches."""
    torch.manual_seed(0)
    return dict(_tensors(model(**copy.deepcopy(given))))


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, str(key) if name == "output" else f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{name}[{index}]")


def _difference(found: Outputs, expected: Outputs, *, of_dtype: bool = True) -> tuple[float, list[str]]:
    """Returns the largest difference of two outputs, and a line for each tensor that differs.

    A difference counts relative to the largest value of a tensor, where that is more than 1.
    """
    wrong = [f"{name}: on one side only" for name in sorted(found.keys() ^ expected.keys())]
    differences = [0.0]
    for name in expected.keys() & found.keys():
        ours, theirs = found[name], expected[name]
        if ours.shape != theirs.shape or (of_dtype and ours.dtype != _NARROW.get(theirs.dtype, theirs.dtype)):
            wrong.append(f"{name}: {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}")
        elif not theirs.is_floating_point() and not theirs.is_complex():
            if not torch.equal(ours, theirs):
                wrong.append(f"{name}: {int((ours != theirs).sum())} of {theirs.numel()} values differ")
        elif theirs.isnan().any() or not torch.equal(theirs.isfinite(), ours.isfinite()):
            wrong.append(f"{name}: numbers on one side, and none on the other or on both")
        elif (finite := theirs.isfinite()).any():
            largest = max(1.0, float(theirs[finite].abs().max()))
            differences.append(float((ours - theirs)[finite].abs().max()) / largest)
            if differences[-1] > TOLERANCE:
                wrong.append(f"{name}: {differences[-1]:.0e}")
    return max(differences), wrong
