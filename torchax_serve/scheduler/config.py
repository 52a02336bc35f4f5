"""`SchedulerConfig`: cache groups, slots, budgets and policies of a scheduler.

Values are checked when the config is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.rope_lengths import RopeLengths
from torchax_serve.sampling_params import invalid
from torchax_serve.scheduler.speculative_config import SpeculativeConfig


def check_int(name: str, value: object, low: int, remedy: str) -> None:
    """Raises `InvalidArgumentError` unless `value` is an integer of at least `low`."""
    if type(value) is not int or value < low:
        raise invalid(name, f"a whole number >= {low}", value, remedy)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Attention layers that share page ids: those with the same sliding window.

    A page id addresses its page in the pool of every layer of the group.
    """

    name: str
    window: int | None  # positions that a query sees, its own among them; None: all before it
    num_pages: int  # first dimension of the pools, the null page (page 0) included
    num_host_pages: int = 1  # pages in host memory for evicted prefixes, page 0 included, which is not used
    num_behind: int = 0  # last computed tokens that may be computed again: accepted drafts that states do not hold

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int(f"group {self.name!r}: window", self.window, 1, "None is full attention")
        check_int(f"group {self.name!r}: num_pages", self.num_pages, 2, "page 0 is the null page and holds no tokens")
        check_int(f"group {self.name!r}: num_host_pages", self.num_host_pages, 1, "1 is none: page 0 is not used")

    def first_live_page(self, num_computed: int, page_size: int) -> int:
        """Returns the index of the first page that a query at `num_computed` or later can see."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.num_behind - self.window + 1) // page_size

    def last_use(self, page: int, page_size: int) -> float:
        """Returns the number of computed tokens from which on no query sees the page `index`."""
        return math.inf if self.window is None else (page + 1) * page_size + self.num_behind + self.window - 1

    def most_pages(self, length: int, page_size: int) -> int:
        """Returns the maximum number of pages of a sequence of `length` tokens.

        The sequence is computed token by token.
        """
        num_pages = -(-length // page_size)
        if self.window is None:
            return num_pages
        return min(
            num_pages, (self.window + self.num_behind + page_size - 2) // page_size + 1
        )  # the window may begin on a page's last row


@dataclasses.dataclass(frozen=True)
class SnapshotGroup:
    """Rows of the pools of recurrent states that hold states of prefixes."""

    num_snapshots: int  # snapshot 0 included, which is not used; 1: none is kept
    num_host_snapshots: int = 1  # the same in host memory, for evicted prefixes

    def __post_init__(self) -> None:
        for name in ("num_snapshots", "num_host_snapshots"):
            check_int(name, getattr(self, name), 1, "1 is none: snapshot 0 is not used")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policy of a `Scheduler`.

    Raises:
        InvalidArgumentError: a value out of its range, or two that contradict each other.
    """

    groups: tuple[CacheGroup, ...]  # empty for models whose only state is recurrent
    page_size: int
    max_num_seqs: int
    max_model_len: int  # prompt and new tokens of one request together
    max_num_batched_tokens: int  # tokens computed in one step, all rows together
    max_rows_per_step: int | None = None  # requests that run at once, where that is less than max_num_seqs
    min_prefill_chunk: int = 16  # a step with decode rows prefills at least as many tokens of a longer prompt
    max_decode_slowdown: float = 8.0  # time per token of running requests with new prompts, over that without
    tpot_target_s: float | None = None  # seconds per token of running requests, in place of it
    ttft_target_s: float | None = None  # seconds to the first token, for which prefill takes what is needed
    enable_prefix_caching: bool = True  # off for models whose pages and snapshots do not hold their prefixes
    snapshots: SnapshotGroup | None = None  # None: no layer has a recurrent state
    max_num_steps: int = 1  # decode steps in one dispatch when nothing waits
    max_fused_decode_s: float = math.inf  # seconds that several of them may take
    allowed_chunk_sizes: tuple[int, ...] | None = (
        None  # the only sizes of prefill chunks, descending to 1; None: any size
    )
    batches_prefill: bool = True  # False: at most one prefill row in a plan
    rope: RopeLengths | None = None  # which lengths have other rotary frequencies; None: all have the same
    speculative: SpeculativeConfig | None = None  # None: no step verifies drafts
    token_buckets: tuple[
        int, ...
    ] = ()  # what a step's tokens are padded to, ascending; none: every number costs its own

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(group, CacheGroup) for group in self.groups):
            raise invalid("groups", "a tuple of CacheGroup", self.groups, "one for each window that layers have")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise invalid("groups", "one name for each group", names, "rename one")
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens", "min_prefill_chunk", "max_num_steps"):
            check_int(name, getattr(self, name), 1, "give a positive number")
        check_int("max_model_len", self.max_model_len, 2, "a request has a token of prompt and a new one")
        if self.max_rows_per_step is not None:
            check_int("max_rows_per_step", self.max_rows_per_step, 1, "None leaves it to max_num_seqs")
        needed = self.max_running - 1 + self.min_prefill_chunk
        if self.max_num_batched_tokens < needed:
            expected = f"at least {needed}, one for each other running request and a prefill chunk"
            raise invalid(
                "max_num_batched_tokens", expected, self.max_num_batched_tokens, "raise it, or lower min_prefill_chunk"
            )
        if not isinstance(self.max_decode_slowdown, int | float) or not 1 < self.max_decode_slowdown < math.inf:
            raise invalid("max_decode_slowdown", "a number > 1", self.max_decode_slowdown, "8 is usual")
        for name in ("tpot_target_s", "ttft_target_s"):
            target = getattr(self, name)
            if target is not None and (not isinstance(target, int | float) or not 0 < target < math.inf):
                raise invalid(name, "a number of seconds > 0, or None", target, "None sets none")
        if not isinstance(self.max_fused_decode_s, int | float) or not self.max_fused_decode_s > 0:
            raise invalid("max_fused_decode_s", "a number > 0", self.max_fused_decode_s, "a tenth of a second is usual")
        for name in ("enable_prefix_caching", "batches_prefill"):
            if type(getattr(self, name)) is not bool:
                raise invalid(name, "True or False", getattr(self, name), "give one of them")
        self._check_chunk_sizes()
        buckets = self.token_buckets
        if any(a >= b for a, b in itertools.pairwise(buckets)) or (
            buckets and buckets[-1] < self.max_num_batched_tokens
        ):
            expected = f"ascending numbers up to max_num_batched_tokens={self.max_num_batched_tokens}"
            raise invalid("token_buckets", expected, buckets, "extend them")

    def _check_chunk_sizes(self) -> None:
        sizes = self.allowed_chunk_sizes
        if sizes is None:
            return
        is_tuple = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
        if not is_tuple or not sizes or sizes[-1] != 1 or any(a <= b for a, b in itertools.pairwise(sizes)):
            raise invalid(
                "allowed_chunk_sizes", "whole numbers that descend to 1", sizes, "such as (256, 64, 16, 4, 1)"
            )
        if self.min_prefill_chunk not in sizes:
            raise invalid(
                "min_prefill_chunk", f"one of allowed_chunk_sizes={sizes}", self.min_prefill_chunk, "choose one"
            )

    def check_prompt(self, name: str, prompt_len: int) -> None:
        """Raises `InvalidArgumentError`, naming `name`, for a prompt that can never run."""
        if prompt_len >= self.max_model_len:
            expected = f"a prompt of at most {self.max_model_len - 1} tokens, so that one more fits max_model_len"
            raise invalid(name, expected, prompt_len, "shorten the prompt or raise max_model_len")
        if (reason := self.unfit(prompt_len + 1)) is not None:
            raise InvalidArgumentError(
                f"{name}: expected a prompt that fits the cache together with one new token, got {prompt_len} tokens, "
                f"which need {reason}; shorten the prompt or give the cache more pages"
            )

    def can_hold(self, length: int) -> bool:
        """Returns whether a request may have `length` tokens, prompt and answer."""
        return length <= self.max_model_len and self.unfit(length) is None

    def unfit(self, length: int) -> str | None:
        """Returns why the empty cache cannot hold a sequence of `length` tokens; None if it can."""
        for group in self.groups:
            needed = group.most_pages(length, self.page_size)
            if needed > group.num_pages - 1:
                return (
                    f"{needed} pages of {self.page_size} tokens in group {group.name!r}, which has "
                    f"{group.num_pages - 1} beside the null page"
                )
        return None

    @property
    def max_running(self) -> int:
        """Requests that run at once."""
        return self.max_num_seqs if self.max_rows_per_step is None else min(self.max_num_seqs, self.max_rows_per_step)

    @property
    def shortest_window(self) -> int | None:
        """Tokens of the shortest sliding window; None if all layers see all tokens."""
        return min((group.window for group in self.groups if group.window is not None), default=None)

    @property
    def max_span_len(self) -> int:
        """Most tokens that can be computed in one step while all other requests decode."""
        return self.max_num_batched_tokens - self.max_running + 1

    @property
    def pages_per_seq(self) -> int:
        """Columns of a page table."""
        return -(-self.max_model_len // self.page_size)

    def prefix_salt(self, salt: str, rope_len: int) -> str:
        """Returns the salt under which prefixes of a request of `salt` are cached.

        If rotary frequencies vary with the length, the result contains their range for a prompt of `rope_len`.
        """
        return salt if self.rope is None else f"{self.rope.regime(rope_len)}:{salt}"

    def chunk_len(self, limit: int) -> int:
        """Returns the longest prefill chunk of at most `limit` tokens; 0 where `limit` is."""
        if self.allowed_chunk_sizes is None or limit < 1:
            return max(limit, 0)
        return next(size for size in self.allowed_chunk_sizes if size <= limit)
