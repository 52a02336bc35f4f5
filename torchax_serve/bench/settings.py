"""Settings of a benchmark."""

from __future__ import annotations

import dataclasses

from model_adapters.errors import InvalidArgumentError

PEERS = ("hf",)


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Grid of one measurement per batch size; checked on construction.

    Attributes:
        batches: Batch sizes, one measurement for each.
        prompt_len: Number of tokens of each prompt.
        new_tokens: Number of generated tokens.
        repeats: Number of timed calls of each side; medians are reported.
        against: Peer; ``hf`` is transformers' own ``generate``, None is no peer.
        seed: Seed of prompts and random weights.
    """

    batches: tuple[int, ...] = (1, 8)
    prompt_len: int = 128
    new_tokens: int = 64
    repeats: int = 5
    against: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches:
            raise InvalidArgumentError("expected at least one batch size, got none")
        # A decode rate needs a token after the first.
        lowest = {"prompt_len": 1, "new_tokens": 2, "repeats": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise InvalidArgumentError(f"{name}: expected a whole number >= {low}, got {getattr(self, name)}")
        for batch in self.batches:
            if batch < 1:
                raise InvalidArgumentError(f"batches: expected whole numbers >= 1, got {batch}")
        if self.against is not None and self.against not in PEERS:
            raise InvalidArgumentError(f"against: expected {' or '.join(PEERS)}, got {self.against!r}")
