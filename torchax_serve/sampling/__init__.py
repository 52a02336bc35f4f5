"""Choosing the next token on the device, exactly as transformers' logits processors would.

`GenerationSampling.build` turns a generation config into arrays and structure, `start` makes the state of a batch,
`step` (or `process`, `select`, `append` one by one) is what a jitted decode step calls.
"""

from torchax_serve.sampling.config_options import CALLER_OPTIONS, PLAN_OPTIONS, unsupported_options, validate_options
from torchax_serve.sampling.history import GenerationSampling, SamplingHistory, append, init_history, is_finished
from torchax_serve.sampling.sample_step import process, sample_step, select
from torchax_serve.sampling.selection import INVALID_TOKEN

__all__ = [
    "CALLER_OPTIONS",
    "INVALID_TOKEN",
    "PLAN_OPTIONS",
    "GenerationSampling",
    "SamplingHistory",
    "append",
    "init_history",
    "is_finished",
    "process",
    "sample_step",
    "select",
    "unsupported_options",
    "validate_options",
]
