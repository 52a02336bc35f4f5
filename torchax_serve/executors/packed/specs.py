"""Sizes of the steps of a packed executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from model_adapters.caches.packed_batch import PagedLayout
from model_adapters.ops import registry
from model_adapters.ops.linear import skips_equal_rows
from torchax_serve.buckets import bucket_for, bucket_sizes, token_buckets
from torchax_serve.executors.media_slots import MediaSpec
from torchax_serve.executors.step_inputs import PackedDecodeSpec, PackedStepSpec
from torchax_serve.sampling.types import MAX_NUM_TOP
from torchax_serve.scheduler import PlanRow

MAX_WARM_SCORED_TOKENS = 256
"""Tokens of a step with log-probabilities of prompts that warm-up compiles, if the budget is not smaller. More are
compiled when they come: their logits take as much memory as hundreds of requests."""


SMALLEST_DECODE_BUCKET = 4
"""Rows of a decode step that cost what one costs: the weights are read once for all of them."""

FREE_TOKENS = 256
"""Tokens up to which a step takes an accelerator about as long as one token, as it waits for the weights."""


@dataclasses.dataclass(frozen=True)
class StepBuckets:
    """Sizes of the steps of a packed executor, ascending.

    Attributes:
        decode: Numbers of rows of decode steps.
        tokens: Numbers of tokens of other steps.
        costs: Numbers of tokens up to which such a step costs the same.
    """

    decode: tuple[int, ...]
    tokens: tuple[int, ...]
    costs: tuple[int, ...]

    @classmethod
    def of_device(cls, num_slots: int, token_budget: int) -> StepBuckets:
        """Returns the sizes for the platform that is traced for."""
        is_accelerator = registry.platform() != "cpu"
        costs = steps = token_buckets(token_budget)
        if is_accelerator:
            costs = steps = token_buckets(token_budget, 4, FREE_TOKENS)
        elif skips_equal_rows():  # padding, that is: what remains of its cost lies between elements of other sizes
            steps = token_buckets(token_budget, 2, steps[-1])
        smallest = min(SMALLEST_DECODE_BUCKET, num_slots)
        return cls(bucket_sizes(num_slots, 4 if is_accelerator else 2, smallest), steps, costs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSpecs:
    """Makes the specs of steps, each once: steps of all requests ask for them.

    Attributes:
        layout: Layout of the cache.
        pages_per_seq: Pages of the longest sequence.
        num_slots: Maximum number of rows of a step.
        decode_buckets: Numbers of rows of decode steps, ascending.
        token_buckets: Numbers of tokens of other steps, ascending.
        max_num_steps: Maximum number of decode steps in one dispatch.
        batch_invariant: Whether matrix products sum in the same order for any number of rows.
        has_rope_lens: Whether rotary frequencies depend on lengths.
        lora: Form of the adapters' matrices; empty: there are none.
        head: Names the draft head that follows each step; empty: there is none.
        num_top: Top log-probabilities of a step that returns them.
    """

    layout: PagedLayout
    pages_per_seq: int
    num_slots: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    max_num_steps: int
    batch_invariant: bool
    has_rope_lens: bool
    lora: str = ""
    head: str = ""
    num_top: int = MAX_NUM_TOP
    _known: dict[tuple[int, bool, bool, MediaSpec | None], PackedStepSpec] = dataclasses.field(default_factory=dict)
    _decode: dict[tuple[int, bool], PackedDecodeSpec] = dataclasses.field(default_factory=dict)
    _choices: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)

    def is_decode(self, rows: Sequence[PlanRow]) -> bool:
        """Returns whether each row has one token with rotary frequencies of its own length.

        Recurrent layers may compute tokens of a prompt in another way than generated ones, or from a snapshot.
        """
        if self.has_rope_lens and any(row.rope_len > row.context_len + 1 for row in rows):
            return False
        if self.layout.has_states and any(row.states or row.context_len < row.prompt_len for row in rows):
            return False
        return all(row.num_tokens == 1 for row in rows)

    def step_spec(
        self,
        num_tokens: int,
        *,
        is_decode: bool = False,
        all_logits: bool = False,
        media: MediaSpec | None = None,
    ) -> PackedStepSpec:
        """Returns the spec of a step with `num_tokens` tokens, a bucket; no more rows than tokens."""
        key = num_tokens, is_decode, all_logits, media
        spec = self._known.get(key)
        if spec is None:
            num_rows = min(num_tokens, self.num_slots)
            layout = dataclasses.replace(self.layout, is_decode=is_decode, all_logits=all_logits)
            has_rope_lens = self.has_rope_lens and not is_decode
            sizes = num_tokens, num_rows, self.pages_per_seq
            forms = self.lora, self.head, media
            spec = PackedStepSpec(*sizes, layout, self.batch_invariant, has_rope_lens, *forms, self.num_top)
            self._known[key] = spec
        return spec

    @property
    def max_len(self) -> int:
        """Most tokens of a row."""
        return self.layout.max_len

    @property
    def draft_ends(self) -> tuple[int, ...]:
        """Implements `DraftSpecs.draft_ends`: attention reads the pages that there are."""
        return (self.max_len,)

    def of_drafts(self, num_rows: int, num_tokens: int, end: int) -> PackedStepSpec:
        """Returns the spec of a step of `num_rows` rows with drafts and logits of all tokens."""
        layout = dataclasses.replace(self.layout, all_logits=True)
        sizes = num_tokens, num_rows, self.pages_per_seq
        return PackedStepSpec(
            *sizes, layout, self.batch_invariant, self.has_rope_lens, head=self.head, num_top=self.num_top
        )

    def decode_spec(self, num_rows: int, has_deltas: bool = False) -> PackedDecodeSpec:
        """Returns the spec of decode steps of `num_rows` rows, a bucket."""
        spec = self._decode.get((num_rows, has_deltas))
        if spec is None:
            packed = self.step_spec(num_rows, is_decode=True)
            spec = self._decode[num_rows, has_deltas] = PackedDecodeSpec(packed, self.max_num_steps, has_deltas)
        return spec

    def step_choices(
        self, num_tokens: int, *, all_logits: bool = False, media: MediaSpec | None = None
    ) -> list[PackedStepSpec]:
        """Returns the specs of steps that have room for `num_tokens` tokens, ascending."""
        key = num_tokens, all_logits, media
        found: list[PackedStepSpec] | None = self._choices.get(key)
        if found is None:
            least = max(num_tokens, self.num_scored_tokens) if all_logits else num_tokens
            buckets = (size for size in self.token_buckets if size >= least)
            found = [self.step_spec(size, all_logits=all_logits, media=media) for size in buckets]
            self._choices[key] = found
        return found

    def decode_choices(
        self, num_rows: int, media: MediaSpec | None = None, has_deltas: bool = False
    ) -> list[PackedDecodeSpec | PackedStepSpec]:
        """Returns the specs of steps that can decode `num_rows` rows, decode steps first."""
        key = "decode", num_rows, media, has_deltas
        found: list[PackedDecodeSpec | PackedStepSpec] | None = self._choices.get(key)
        if found is None:
            buckets = (size for size in self.decode_buckets if size >= num_rows)
            decode = (self.decode_spec(size, has_deltas) for size in buckets)
            found = self._choices[key] = [*decode, *self.step_choices(num_rows, media=media)]
        return found

    @property
    def num_scored_tokens(self) -> int:
        """Smallest number of tokens that a step with log-probabilities of prompts is padded to."""
        return bucket_for(self.token_buckets, min(self.token_buckets[-1], MAX_WARM_SCORED_TOKENS))

    def all(self) -> list[PackedStepSpec | PackedDecodeSpec]:
        """Returns every step that mixed traffic can meet."""
        return [
            *(self.step_spec(size) for size in self.token_buckets),
            self.step_spec(self.num_scored_tokens, all_logits=True),
            *(self.decode_spec(size) for size in self.decode_buckets),
        ]

    def larger_scored(self) -> list[PackedStepSpec]:
        """Returns the steps with log-probabilities of prompts that `all` leaves out."""
        return self.step_choices(self.num_scored_tokens + 1, all_logits=True)
