"""Limits of the tokens that a model accepts; more is an error that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.embeddings import learned_positions, vocab_rows
from model_adapters.program.position_limits import has_end, has_table_of_distances, max_positions


@dataclasses.dataclass(frozen=True)
class InputLimits:
    """Sizes of a model's tables.

    Attributes:
        vocab_size: rows of the table of tokens.
        max_positions: tokens that the configuration makes room for; None: any number.
        learned_positions: the same where positions are looked up in a table, behind which there is nothing to read.
        has_end: whether a prompt of more tokens than `max_positions` is an error.
    """

    vocab_size: int
    max_positions: int | None
    learned_positions: int | None
    has_end: bool = True

    @classmethod
    def of(cls, decoder: torch.nn.Module, around: Sequence[torch.nn.Module], config: Any) -> InputLimits:
        """Returns the limits of a model.

        Args:
            decoder: Submodule that decodes tokens, or the model itself.
            around: Modules that may have the token embedding if `decoder` has none.
            config: Text configuration of the decoder.
        """
        sizes = (vocab_rows(module) for module in (decoder, *around))
        vocab_size = next((size for size in sizes if size is not None), None)
        if vocab_size is None:
            vocab_size = int(getattr(config, "vocab_size", 2**31 - 1))  # characters, all there are
        positions = max_positions(config)
        learned = positions if has_table_of_distances(config) else learned_positions(decoder, positions)
        return cls(vocab_size, positions, learned, has_end=learned is not None or has_end(config))

    def check_prompt(self, ids: torch.Tensor | None) -> None:
        """Raises InvalidArgumentError for a prompt [batch, len] that is empty or too long."""
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        if ids.numel() == 0:
            raise InvalidArgumentError(
                "expected a prompt of at least one token, got an empty one; add a token, such as bos"
            )
        if self.has_end and self.max_positions is not None and ids.shape[1] > self.max_positions:
            raise InvalidArgumentError(
                f"expected a prompt of at most {self.max_positions} tokens, the positions this model has, "
                f"got {ids.shape[1]}; shorten it"
            )

    def check_positions(self, length: int) -> None:
        """Raises InvalidArgumentError if `length` exceeds a learned table of positions."""
        if self.learned_positions is not None and length > self.learned_positions:
            raise InvalidArgumentError(
                f"expected at most {self.learned_positions} tokens in all, the rows of this model's table of "
                f"positions, got {length} (prompt and new tokens); lower max_new_tokens or shorten the prompt"
            )

    def check_ids(self, ids: torch.Tensor, name: str | None = None) -> None:
        """Raises InvalidArgumentError, naming `name`, for token ids outside the vocabulary."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InvalidArgumentError(
                f"{f'{name}: ' if name else ''}expected token ids from 0 to {self.vocab_size - 1}, got {bad}; encode "
                "with this model's own tokenizer"
            )
