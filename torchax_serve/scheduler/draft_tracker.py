"""Counts on the host how often prompt lookup finds the next token of a request."""

from __future__ import annotations

from collections.abc import Sequence

START_RATE = 0.6
"""Fraction of hits that a new request is believed to have: its first steps tell for little time."""

WEIGHT = 0.25
"""Weight of the newest token in the fraction of hits: it follows text within about four tokens."""


class DraftTracker:
    """The fraction of the last tokens that prompt lookup would have drafted.

    It is known without a draft, so that a request whose text begins to repeat is speculated for, and steps that do not
    speculate cost a dictionary entry for each token.

    Args:
        match_len: Number of last tokens that are looked up.

    Attributes:
        rate: Moving mean of hits, 0 to 1.
    """

    __slots__ = ("_followers", "_match_len", "_next", "_num_seen", "rate")

    def __init__(self, match_len: int) -> None:
        self._match_len = match_len
        self._followers: dict[tuple[int, ...], int] = {}  # by n-gram, the position behind its last occurrence
        self._num_seen = 0
        self._next: int | None = None  # position of the token that is expected next
        self.rate = START_RATE

    def update(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Takes the tokens since the last call.

        Args:
            tokens: All tokens of the request.
            prompt_len: Number of those of its prompt, which are no hits.
        """
        followers, size = self._followers, self._match_len
        for position in range(self._num_seen, len(tokens)):
            # Of tokens[:position], the last `size` are looked up; then the token at `position` is compared.
            found = self._next
            if position >= size:
                gram = tuple(tokens[position - size : position])
                if found is None:
                    found = followers.get(gram)
                followers[gram] = position
            is_hit = found is not None and tokens[found] == tokens[position]
            if position >= prompt_len:
                self.rate += WEIGHT * (is_hit - self.rate)
            self._next = found + 1 if is_hit and found is not None else None
        self._num_seen = len(tokens)
