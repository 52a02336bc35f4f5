"""What the harness found out about a model type."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

PASSED = "passed"


def said(error: Exception) -> str:
    """An error in one line, without the folders of this machine."""
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"


class ProbeResults:
    """Calls of which each may fail; what went wrong is kept.

    Attributes:
        errors: in one line each, with the name of the call.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` gives; None where it raises."""
        try:
            return function(*args)
        except Exception as error:
            self.errors.append(f"{name}: {said(error)}")
            return None


@dataclasses.dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        status: "passed"; "failed"; "impossible", where there is nothing to compare with: transformers or torch cannot
            run the model, or not on text; "crashed" or "timed out", where the worker did not answer.
        road: of the engine: "paged", "gathered", or "generate" for what runs one request after the other.
        road_reason: why not a faster road.
        forward_difference: the largest between logits under ``jax.jit`` and those of eager PyTorch.
        padded_equal, alone_equal, engine_equal: whether all greedy tokens are eager PyTorch's; None: not compared.
        smallest_gap: between the first and the second logit of the greedy choices.
        num_distinct: different tokens in the less varied answer.
        cache_kinds: "full", "window", "state".
        has_tp_plan: whether the configuration says how its weights are cut for tensor parallelism.
        kernels: implementations of ops beyond the references, on the machine of the sweep.
        compile_s: seconds of tracing, lowering and compiling.
        total_s: seconds of the whole check.
        error: what went wrong.
        notes: what transformers could not do and was therefore not compared.
        packages: beside transformers, from which modules of the model come, with their versions.
    """

    model_type: str
    class_name: str
    status: str = "failed"
    road: str | None = None
    road_reason: str | None = None
    forward_difference: float | None = None
    padded_equal: bool | None = None
    alone_equal: bool | None = None
    engine_equal: bool | None = None
    smallest_gap: float | None = None
    num_distinct: int | None = None
    cache_kinds: list[str] = dataclasses.field(default_factory=list)
    has_tp_plan: bool = False
    kernels: list[str] = dataclasses.field(default_factory=list)
    compile_s: float | None = None
    total_s: float | None = None
    error: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    packages: list[str] = dataclasses.field(default_factory=list)
