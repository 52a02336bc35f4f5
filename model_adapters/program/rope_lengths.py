"""The sequence lengths with the same rotary frequencies of a model; plain Python."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeLengths:
    """The dependence of a model's rotary frequencies on the length of the sequence.

    A token's keys are rotated once, when it is computed, by the frequencies of the length that the sequence then has: a
    prompt's tokens by the prompt's length, each token of the answer by the length that ends with it.

    Attributes:
        border: the longest length, in tokens, with the frequencies of a short one.
        has_one_long: whether all longer lengths share theirs (LongRoPE); else each has its own (dynamic NTK scaling).
        recompute_len: the length after which transformers' `generate` recomputes the sequence, so that all of its
            tokens have the frequencies of one length; None where it continues with its cache.
    """

    border: int
    has_one_long: bool
    recompute_len: int | None = None

    def regime(self, length: int) -> str:
        """Returns a name for the frequencies of a prompt of `length` tokens.

        Prompts with the same name may share keys.
        """
        if length <= self.border:
            return ""
        return "long" if self.has_one_long else str(length)
