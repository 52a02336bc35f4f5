"""What the systems are asked: requests with random token ids, the same for all systems and new in every turn."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from serving_peers.jobs import Arrival, Job

# Of a run that only shows that everything works: parts of a shape, and fields of `Workload`.
SMOKE_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMOKE_SIZES: dict[str, Any] = {
    "prompt_len": 16,
    "new_tokens": 8,
    "num_requests": 8,
    "prompt_lens": (4, 48),
    "output_lens": (2, 12),
    "prefix_len": 64,
    "suffix_len": 4,
    "num_running": 2,
    "running_new_tokens": 48,
    "num_flood": 3,
    "flood_prompt_len": 96,
    "flood_after": 4,
}
SMOKE_KV_CACHE_BYTES = 2**24

LOWEST_ID = 3  # below stand the special tokens of many vocabularies


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of everything that is asked.

    Attributes:
        vocab_size: token ids are drawn below it.
        seed: of lengths, arrival times and token ids.
        prompt_len, new_tokens: of the requests of a batch.
        num_requests, prompt_lens, output_lens: of the mix; lengths are drawn evenly between two bounds, both included.
        prefix_len, suffix_len: of a request whose beginning may be in the cache.
        num_running, running_new_tokens: of the requests that a flood may slow down.
        num_flood, flood_prompt_len: of the flood.
        flood_after: tokens that each running request has when the flood comes.
    """

    vocab_size: int
    seed: int = 0
    prompt_len: int = 128
    new_tokens: int = 64
    num_requests: int = 64
    prompt_lens: tuple[int, int] = (16, 512)
    output_lens: tuple[int, int] = (16, 128)
    prefix_len: int = 512
    suffix_len: int = 16
    num_running: int = 8
    running_new_tokens: int = 160
    num_flood: int = 16
    flood_prompt_len: int = 768
    flood_after: int = 32

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(
            self.prompt_len + max(self.new_tokens, self.running_new_tokens),
            self.prompt_lens[1] + self.output_lens[1],
            self.prefix_len + self.suffix_len + 1,
            self.flood_prompt_len + 1,
        )

    def _ids(self, length: int, *named: object) -> list[int]:
        """The same for the same name."""
        draw = random.Random(repr((self.seed, *named)))
        return [draw.randrange(LOWEST_ID, self.vocab_size) for _ in range(length)]

    def batch(self, num_requests: int, turn: int) -> list[Job]:
        """Requests that come together: with one token each, and others with all."""
        return [
            Job(
                [
                    Arrival(self._ids(self.prompt_len, "batch", num_requests, turn, new_tokens, index), new_tokens)
                    for index in range(num_requests)
                ]
            )
            for new_tokens in (1, self.new_tokens)
        ]

    def mix(self, rate: float, turn: int) -> list[Job]:
        """Requests of many lengths that arrive as a Poisson process of `rate` requests/s, infinite: all at once.

        Lengths and times are the same in every turn, so that turns can be compared; the tokens are not, so that none
        finds its beginning in a cache.
        """
        draw = random.Random(repr((self.seed, "mix")))
        arrivals, at_s = [], 0.0
        for index in range(self.num_requests):
            prompt_len, output_len = draw.randint(*self.prompt_lens), draw.randint(*self.output_lens)
            gap = draw.expovariate(1.0)
            arrivals.append(Arrival(self._ids(prompt_len, "mix", rate, turn, index), output_len, at_s))
            at_s += 0.0 if math.isinf(rate) else gap / rate
        return [Job(arrivals)]

    def prefix(self, turn: int) -> list[Job]:
        """A request alone, and another that begins as the first one does."""
        beginning = self._ids(self.prefix_len, "prefix", turn)
        return [Job([Arrival(beginning + self._ids(self.suffix_len, "suffix", turn, index), 1)]) for index in range(2)]

    def flood(self, turn: int) -> list[Job]:
        """Running requests left alone, and others of their kind among which long prompts arrive all at once."""

        def running(name: str) -> list[Arrival]:
            return [
                Arrival(self._ids(self.prompt_len, name, turn, index), self.running_new_tokens)
                for index in range(self.num_running)
            ]

        flood = [
            Arrival(self._ids(self.flood_prompt_len, "flood", turn, index), 1, after_tokens=self.flood_after)
            for index in range(self.num_flood)
        ]
        return [Job(running("calm")), Job(running("disturbed") + flood)]
