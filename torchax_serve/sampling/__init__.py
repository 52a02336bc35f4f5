"""Choosing the next token on the device, exactly as transformers' logits processors would.

`GenerationSampling.build` turns a generation config into arrays and structure, `start` makes the state of a batch,
`step` (or `process`, `select`, `append` one by one) is what a jitted decode step calls.
"""

from torchax_serve.sampling.config_options import CALLER_OPTIONS, PLAN_OPTIONS, unsupported_options, validate
from torchax_serve.sampling.history import GenerationSampling, SamplingHistory, append, finished, start
from torchax_serve.sampling.sample_step import process, select, step
from torchax_serve.sampling.selection import NO_VALID_TOKEN

__all__ = [
    "CALLER_OPTIONS",
    "NO_VALID_TOKEN",
    "PLAN_OPTIONS",
    "GenerationSampling",
    "SamplingHistory",
    "append",
    "finished",
    "process",
    "select",
    "start",
    "step",
    "unsupported_options",
    "validate",
]
