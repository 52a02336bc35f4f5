"""Choosing the next token on the device, exactly as transformers' logits processors would.

`SamplingPlan.build` turns a generation config into arrays and structure, `start` makes the state of a batch, `step`
(or `process`, `select`, `append` one by one) is what a jitted decode step calls.
"""

from torchax_serve.sampling.config_options import CALLER_OPTIONS, PLAN_OPTIONS, unsupported_by_fast_path, validate
from torchax_serve.sampling.history import SamplingPlan, SamplingState, append, finished, start
from torchax_serve.sampling.sample_step import process, select, step
from torchax_serve.sampling.selection import NO_VALID_TOKEN

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
