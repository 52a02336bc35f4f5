"""Special tokens that end a turn of a conversation wherever a vocabulary has them."""

# ruff: noqa: RUF001
from __future__ import annotations

from collections.abc import Collection, Mapping

TURN_ENDS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>"),
        *("<EOT>", "_<EOT>", "< EOT >", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|end_of_text|>"),
        *("<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    }
)
"""As llama.cpp knows them."""
_ENDS_A_MESSAGE: Mapping[str, str] = {"<|end|>": "<|channel|>"}
"""Tokens that end a message of several next to another token."""


def ends_among(tokens: Collection[str]) -> list[str]:
    """Returns those of special tokens that end a turn."""
    return sorted(text for text in TURN_ENDS & set(tokens) if _ENDS_A_MESSAGE.get(text) not in tokens)
