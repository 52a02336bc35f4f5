"""RWKV writes into its weights when it is first called for inference: it divides some by powers of two.

The hidden states are divided alike, against overflow in 16 bits; what comes out is the same. Weights here are arguments
of a program, and stay as they are.
"""

from __future__ import annotations

from typing import Any


def _rescale_layers(self: Any) -> None:
    """Nothing: the layers stay as they were loaded."""


REPLACED = {"RwkvModel._rescale_layers": _rescale_layers}
UNREAD = ("attention_mask",)
