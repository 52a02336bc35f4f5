"""xLSTM's forward takes an attention mask among its further arguments and hands it on to nothing that reads it."""

from __future__ import annotations

IGNORED_ARGUMENTS = ("attention_mask",)
