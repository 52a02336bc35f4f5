"""Samples the next token on the device, exactly as transformers' logits processors would.

One pure function (`torchax_serve/sampling/sample.py`) reads options by row, at one of four levels. `Sampler` calls it
for the slots of an engine, `BatchSampler` for a static batch.
"""

from torchax_serve.sampling.batch_sampler import BatchSampler
from torchax_serve.sampling.config_options import CALLER_OPTIONS, PLAN_OPTIONS, unsupported_options, validate_options
from torchax_serve.sampling.selection import INVALID_TOKEN

__all__ = [
    "CALLER_OPTIONS",
    "INVALID_TOKEN",
    "PLAN_OPTIONS",
    "BatchSampler",
    "unsupported_options",
    "validate_options",
]
