"""Samples the next token on the device, exactly as transformers' logits processors would.

One pure function (`torchax_serve/sampling/sample.py`) reads options by row, at one of four levels. `Sampler` calls it
for the slots of an engine, `BatchSampler` for a static batch.
"""

from torchax_serve.sampling.batch_sampler import BatchSampler
from torchax_serve.sampling.selection import INVALID_TOKEN

__all__ = ["INVALID_TOKEN", "BatchSampler"]
