"""Arguments and results of packed steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_adapters.caches.packed_batch import MediaTokens
from torchax_serve.executors.base import AbstractStep
from torchax_serve.executors.step_inputs import PackedStepSpec


def further(scored: tuple[Any, Any] | None, media: MediaTokens | None) -> tuple[Any, ...]:
    """Returns the arguments of a packed step that most steps do without."""
    return (scored, media) if media is not None else () if scored is None else (scored,)


def abstract_step(
    spec: PackedStepSpec, max_len: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> AbstractStep:
    """Returns a step of `spec` with abstract arguments, the first of which is donated.

    `max_len` is the number of tokens of the longest request.
    """
    is_decode = spec.layout.is_decode
    return AbstractStep(
        name="decode" if is_decode else "prefill",
        num_tokens=spec.num_tokens,
        num_rows=spec.num_rows,
        context_len=max_len if is_decode else spec.num_tokens,
        num_prompts=0 if is_decode else 1,
        function=function,
        args=args,
        donated=(0,),
    )
