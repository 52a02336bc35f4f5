"""Arguments and results of packed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from model_adapters.caches.packed_batch import MediaTokens, PackedBatch, Pool
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from torchax_serve.executors.base import AbstractStep
from torchax_serve.executors.step_inputs import PackedStepSpec

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram


def optional_args(scored: tuple[Any, Any] | None, media: MediaTokens | None) -> tuple[Any, ...]:
    """Returns the last arguments of a packed step, which most steps do without."""
    return (scored, media) if media is not None else () if scored is None else (scored,)


def all_logits(
    forward: Callable[..., Any], weights: Weights, pools: Any, last_tokens: Any, numbers: Any, *, spec: PackedStepSpec
) -> tuple[Any, Any]:
    """Computes the logits of all tokens of a step, [T, vocab], and the pools."""
    logits, pools, _ = forward(weights, pools, spec.unpack(numbers, last_tokens), spec)
    return logits, pools


def abstract_step(
    spec: PackedStepSpec, max_len: int, function: Callable[..., Any], args: tuple[Any, ...], *, verifies: bool = False
) -> AbstractStep:
    """Returns a step of `spec` with abstract arguments, the first of which is donated.

    `max_len` is the number of tokens of the longest request; `verifies` tells a verify step.
    """
    is_decode = spec.layout.is_decode or verifies
    return AbstractStep(
        name="verify" if verifies else "decode" if is_decode else "prefill",
        num_tokens=spec.num_tokens,
        num_rows=spec.num_rows,
        context_len=max_len if is_decode else spec.num_tokens,
        num_prompts=0 if is_decode else 1,
        function=function,
        args=args,
        donated=(0,),
    )


def forward_model(
    program: ModelProgram,
    weights: Weights,
    pools: tuple[Pool, ...],
    batch: PackedBatch,
    spec: PackedStepSpec,
    layers: Sequence[int],
) -> tuple[jax.Array, tuple[Pool, ...], jax.Array | None]:
    """Returns logits and pools of a step, and the hidden states of `layers`; None for no layers."""
    from model_adapters.program.packed_forward import forward_with_hidden  # tracing needs torch, running does not

    with batch_invariant(spec.batch_invariant):
        return forward_with_hidden(program.with_module(), weights, pools, batch, spec.layout, layers)
