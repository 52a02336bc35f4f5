"""GPT-Neo and MPT cut by the number of keys, as if the newest key were the last, and take nothing else to count by.

GPT-Neo cuts its causal masks out of a table, MPT its biases, which are distances.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt import modeling_mpt

LEANS = True


def _distances(self: Any, num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As the original, for more keys: a cache may be a page wider than the tokens that there can be."""
    return modeling_mpt.build_mpt_alibi_tensor(num_heads, 2 * sequence_length + 512, *args, **kwargs)


REPLACED = {"MptModel.build_mpt_alibi_tensor": _distances}
