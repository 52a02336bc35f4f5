"""Result of the parity check of one model type."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

PASSED = "passed"

PACKED, PER_SEQUENCE, STATIC = "packed", "per-sequence", "static"
TRANSFORMERS_LOOP = "transformers"
EXECUTORS: dict[str, str] = {
    PACKED: "engine, many requests in one ragged row, on the paged cache",
    PER_SEQUENCE: "engine, one forward per request, on a cache gathered from its pages",
    STATIC: "the static batch loop of `generate`, one call after the other",
    TRANSFORMERS_LOOP: "transformers' loop over the compiled forward",
}
"""Values of `Result.executor`, each with a description in Markdown."""


def error_line(error: Exception) -> str:
    """Formats an error as one line of at most 300 characters.

    The folders of this machine are left out.
    """
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"


def why_not_batched(error: Exception) -> str:
    """Returns in one line why requests of a model share no batch.

    The error says it for both executors.
    """
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(str(error).split()))
    _, _, reason = text.partition("Each by itself: ")
    return (reason or text).removesuffix("; generate runs it, one batch at a time")


class ProbeResults:
    """Calls functions and records the errors that they raise.

    Attributes:
        errors: One line for each failed call, beginning with its name.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of `function`, or None if it raises."""
        try:
            return function(*args)
        except Exception as error:
            self.errors.append(f"{name}: {error_line(error)}")
            return None


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of checking one model type: a row of docs/models.md.

    Attributes:
        status: "passed"; "failed"; "impossible", where there is nothing to compare with: transformers or torch cannot
            run the model, or not on text; "crashed" or "timed out", where the worker did not answer.
        executor: One of `EXECUTORS`: how the model runs; None if it does not generate.
        fallback_reason: Why the model does not run on a faster executor.
        forward_difference: Largest absolute difference between the logits under ``jax.jit`` and eager PyTorch's.
        padded_equal, unbatched_equal, engine_equal: Whether all greedy tokens equal eager PyTorch's, in a padded batch,
            for one prompt at a time, and on the engine among other requests; None: not compared.
        smallest_gap: Smallest gap between the first and the second logit of the greedy choices.
        num_distinct: Number of different tokens in the less varied answer.
        cache_kinds: Kinds of cache layers: "full", "window", "compressed", "state".
        has_tp_plan: Whether the configuration has a tensor-parallel plan.
        kernels: Op implementations that ran besides the references, on the machine of the sweep.
        compile_s: Seconds of tracing, lowering and compiling.
        total_s: Seconds of the complete check.
        error: Error of the check.
        notes: Calls that fail in transformers and were therefore not compared.
        packages: Packages other than transformers that modules of the model come from, with their versions.
        second_equal: Whether a second process has the tokens of the first; None: not compared.
        by_record: Whether the second process started from a record, without PyTorch.
        num_read: Programs of the model that the second process has read from disk.
    """

    model_type: str
    class_name: str
    status: str = "failed"
    executor: str | None = None
    fallback_reason: str | None = None
    forward_difference: float | None = None
    padded_equal: bool | None = None
    unbatched_equal: bool | None = None
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
    second_equal: bool | None = None
    by_record: bool | None = None
    num_read: int | None = None
