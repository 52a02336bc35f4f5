"""Choosing the next token on the device, exactly as transformers' logits processors would.

`SamplingPlan.build` turns a generation config into arrays and structure, `start` makes the state of a batch, `step`
(or `process`, `select`, `append` one by one) is what a jitted decode step calls.
"""

from torchax_serve.sampling.options import CALLER_OPTIONS, PLAN_OPTIONS, unsupported_by_fast_path, validate
from torchax_serve.sampling.pipeline import NO_VALID_TOKEN, process, select, step
from torchax_serve.sampling.plan import SamplingPlan
from torchax_serve.sampling.state import SamplingState, append, finished, start

__all__ = [
    "CALLER_OPTIONS",
    "NO_VALID_TOKEN",
    "PLAN_OPTIONS",
    "SamplingPlan",
    "SamplingState",
    "append",
    "finished",
    "process",
    "select",
    "start",
    "step",
    "unsupported_by_fast_path",
    "validate",
]
