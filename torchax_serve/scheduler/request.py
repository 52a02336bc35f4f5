"""A request (`Request`) and its progress in the scheduler (`RequestState`)."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torchax_serve.request_params import GREEDY, RequestParams
from torchax_serve.sampling_params import invalid
from torchax_serve.scheduler.config import check_int

if TYPE_CHECKING:
    from torchax_serve.scheduler.draft_tracker import DraftTracker
    from torchax_serve.scheduler.page_allocator import SequencePages
from torchax_serve.outputs import FinishReason
from torchax_serve.scheduler.types import MAX_PAGE_ID, MAX_TOKEN_ID, RequestId


class TokenIds(tuple[int, ...]):
    """Token ids that were checked (`torchax_serve.text.prompt.checked_ids`), and are not again."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Request:
    """One answer to one prompt: all that is known of it before it runs.

    The scheduler reads plain numbers and ids; arrays and objects of the fields at the end are the engine's.

    Attributes:
        prompt_ids: Token ids; of an encoder-decoder model those that the decoder starts with.
        params: Its options.
        answer_index: Number of the answer among those to its prompt, from 0 on.
        generate_inputs: Tensors by argument of ``generate``, for a prompt with images or audio that is not prepared
            yet; `request_input` is what is made of them.
        request_input: What the executor gets next to the token ids, as
            `torchax_serve.executors.request_input.RequestInput`.
        masks: `torchax_serve.sampling.token_masks.TokenMasks`: tokens that may be sampled, step by step; None: all.
            What may be sampled follows from all tokens before: one may be unread, not more.
        is_continuation: Whether it goes on with a call that an engine has taken before, such as the next window of long
            audio: it may exceed the limits of waiting requests.
        adapter: The use of the adapter that `params` name, found when the request is submitted; None: none.

    Raises:
        InvalidArgumentError: a value out of its range.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    request_id: RequestId = 0  # given by the engine that takes it
    stop_ids: frozenset[int] = frozenset()  # end of sequence and `stop_token_ids`; the one that ends it is an output
    min_new_tokens: int = 0  # stop tokens among the first `min_new_tokens` outputs do not end the request
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # on the scheduler's clock; the request ends at the first step at or after it
    queue_deadline_s: float | None = None  # the same for a request that has not been given a slot by then
    salt: str = ""  # prefixes are shared among requests of equal salt only
    cache_prompt: bool = True  # False: shares nothing (token ids that do not say all, such as those of images)
    fork_of: RequestId | None = None  # a live request with the same prompt, whose computed prompt is shared if possible
    page_ids: Sequence[int] | None = None  # what cached pages are found by, which says what images are; None: tokens
    spans: tuple[tuple[int, int], ...] = ()  # beginnings and ends of tokens that are computed in one step
    speculates: bool = True  # drafts of its tokens may be verified
    num_unspeculated: float = 0  # first new tokens for which there are no drafts; infinite: for none of them
    arrived_s: float | None = None  # on the scheduler's clock, for goals of the time to first token; None: just now
    is_continuation: bool = False

    params: RequestParams = GREEDY
    answer_index: int = 0
    generate_inputs: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    request_input: Any = dataclasses.field(default=(), repr=False)
    masks: Any = dataclasses.field(default=None, repr=False)
    adapter: Any = dataclasses.field(default=None, repr=False)

    @classmethod
    def of(
        cls, prompt_ids: Sequence[int], params: RequestParams, *, encoder_ids: Sequence[int] | None = None, **more: Any
    ) -> Self:
        """Makes a request for a continuation of `prompt_ids`.

        Args:
            prompt_ids: Token ids.
            params: Its options.
            encoder_ids: What an encoder reads; None: there is no encoder, or it reads no tokens.
            more: Further attributes.
        """
        params = params.with_encoder_ids(prompt_ids if encoder_ids is None else encoder_ids)
        num_prompt, given = len(prompt_ids), params.given
        most = params.most_new_tokens(num_prompt)
        return cls(
            prompt_ids=prompt_ids if isinstance(prompt_ids, TokenIds) else tuple(prompt_ids),
            params=params,
            max_new_tokens=most,
            stop_ids=frozenset(params.stop_ids),
            min_new_tokens=min(params.num_forced_tokens(num_prompt), most),
            priority=given.priority or 0,
            salt=given.cache_salt or "",
            cache_prompt=given.prompt_logprobs is None,  # cached tokens have no logits
            speculates=given.speculate is not False,
            num_unspeculated=params.num_unspeculated(num_prompt),
            **more,
        )

    @property
    def known_ids(self) -> Sequence[int]:
        """Ids that the scheduler finds cached pages by."""
        return self.prompt_ids if self.page_ids is None else self.page_ids

    @property
    def own_steps(self) -> Any:
        """Steps of a request that runs by itself, its `request_input`; None: they are the engine's."""
        return self.request_input if hasattr(self.request_input, "prefill") else None

    @property
    def adapter_id(self) -> int:
        """Adapter of its tokens: one more than its place, 0 for none."""
        return 0 if self.adapter is None else self.adapter.adapter_id

    def cancel(self) -> None:
        """Ends a step of the request that blocks; called from any thread."""
        if (steps := self.own_steps) is not None:
            steps.cancel()

    def close(self) -> None:
        """Frees what only this request uses on the device."""
        if (steps := self.own_steps) is not None:
            steps.close()
        if self.adapter is not None:
            self.adapter.release()

    def __post_init__(self) -> None:
        name = f"request {self.request_id!r}"
        _check_ids(name, self.prompt_ids, MAX_TOKEN_ID)
        if self.page_ids is not None:
            _check_ids(name, self.page_ids, MAX_PAGE_ID)
        check_int(f"{name}: max_new_tokens", self.max_new_tokens, 1, "a request yields at least one token")
        check_int(f"{name}: min_new_tokens", self.min_new_tokens, 0, "0 sets no minimum")
        if self.min_new_tokens > self.max_new_tokens:
            expected = f"at most max_new_tokens={self.max_new_tokens}"
            raise invalid(f"{name}: min_new_tokens", expected, self.min_new_tokens, "lower it")
        if type(self.priority) is not int:
            raise invalid(f"{name}: priority", "a whole number, lower ones first", self.priority, "0 is usual")
        for field, deadline in (("deadline_s", self.deadline_s), ("queue_deadline_s", self.queue_deadline_s)):
            if deadline is not None and (not isinstance(deadline, int | float) or math.isnan(deadline)):
                raise invalid(f"{name}: {field}", "seconds on the scheduler's clock", deadline, "None sets none")
        stops = self.stop_ids
        if not isinstance(stops, frozenset) or not all(type(token) is int for token in stops):
            raise invalid(f"{name}: stop_ids", "a frozenset of token ids", stops, "frozenset() stops nowhere")
        for field, value in (("request_id", self.request_id), ("fork_of", self.fork_of)):
            if type(value) not in (int, str) and (field == "request_id" or value is not None):
                raise invalid(f"{name}: {field}", "a whole number or a string", value, "name a request by one of them")
        if type(self.cache_prompt) is not bool:
            raise invalid(f"{name}: cache_prompt", "True or False", self.cache_prompt, "False shares nothing")
        if not isinstance(self.salt, str):
            raise invalid(f"{name}: salt", "a string", self.salt, "'' shares with all requests that have none")


def _check_ids(name: str, ids: Sequence[int], most: int) -> None:
    if isinstance(ids, TokenIds):
        return
    # Types are compared, not asked for an interface: prompts may have 100,000 tokens.
    if not isinstance(ids, list | tuple) or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > most:
        got = ids if not isinstance(ids, list | tuple) or len(ids) < 9 else f"{ids[:8]} and {len(ids) - 8} more"
        raise invalid(f"{name}: prompt_ids", "a non-empty list of token ids >= 0", got, "tokenize the prompt first")


class Status(enum.Enum):
    """Status of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again; its outputs so far are computed anew as if they were prompt
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """Progress of a request. Only the scheduler changes it, but for `waits_for_tokens`."""

    request: Request
    rank: tuple[int, int]  # (priority, order of arrival): the lowest runs first and is preempted last
    tokens: list[int]  # prompt and outputs
    prompt_len: int
    max_total_len: int  # length of prompt and outputs at which the request ends with "length"
    rope_len: int  # length that rotary frequencies are at least for: the prompt's, or more where it was computed anew
    recompute_len: float = math.inf  # length behind which all is computed anew, for the frequencies of longer ones
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    pages: SequencePages | None = None  # also holds the slot; kept after the end while steps are in flight
    num_prefill_tokens: int = 0  # tokens known when it was given its slot; those from there on were sampled in the slot
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_planned: int = 0  # the same once all steps in flight are done
    num_output_placeholders: int = 0  # sampled tokens that are not known yet
    num_in_flight: int = 0  # plans not yet committed that have a row of this request
    publish_due_len: float = 0  # computed tokens from which on `PageAllocator.publish_prefix` has something to do
    arrived_step: int = 0  # the plan that was to be made next when it arrived
    started_step: int | None = None  # the same when it was given its first token
    num_cached: int | None = None  # tokens found in the prefix cache when it was first given a slot
    draft_tracker: DraftTracker | None = None  # of the text so far, if the engine speculates
    started_s: float | None = None  # when it was first given a slot, on the scheduler's clock
    num_preemptions: int = 0
    waits_for_tokens: bool = False  # it has masks, until the engine knows that any token may follow

    def missed(self, reason: FinishReason) -> bool:
        """Returns whether a "deadline" or "queue_deadline" that has passed ends the request."""
        is_open = self.status is not Status.FINISHED
        return is_open and (reason == "deadline" or self.num_cached is None)

    def uncut_len(self, start: int, num_tokens: int) -> int:
        """Returns the most tokens from `start`, at most `num_tokens`, that cut no span."""
        end = start + num_tokens
        for begin, after in self.request.spans:
            if begin < end < after:
                return max(0, begin - start)
        return num_tokens

    @property
    def least_chunk(self) -> int:
        """Number of tokens of which a step must have room for the prompt's next ones.

        It does not depend on what is cached.
        """
        start = self.num_planned if self.status is Status.RUNNING else None
        spans = self.request.spans
        if start is None:
            return max((after - begin for begin, after in spans), default=1)
        return next((after - start for begin, after in spans if begin <= start < after), 1)

    @property
    def slot(self) -> int | None:
        """Row of the decode batch, None while it has none."""
        return None if self.pages is None else self.pages.slot

    @property
    def output_ids(self) -> list[int]:
        """Accepted tokens (a copy)."""
        return self.tokens[self.prompt_len :]

    @property
    def wants_decode(self) -> bool:
        """Whether a sampled token is to be computed next, and one more may be sampled after it."""
        if self.num_output_placeholders > 1 and self.waits_for_tokens:
            return False
        return self.num_prefill_tokens <= self.num_planned < self.max_total_len - 1

    @property
    def steps_to_recompute(self) -> float:
        """Number of decode steps that may be planned before the sequence has to be computed anew.

        At most 0: it has to be computed anew now.
        """
        return self.recompute_len - self.num_planned

    def grow_rope(self) -> None:
        """Sets the rotary length to the current number of tokens, if all are computed anew.

        That is where the sequence has outgrown the length of its rotary frequencies.
        """
        if len(self.tokens) > self.recompute_len:
            self.rope_len, self.recompute_len = len(self.tokens), math.inf

    @property
    def wants_prefill(self) -> bool:
        """Whether tokens known at the start are still to be computed."""
        return self.num_planned < self.num_prefill_tokens

    def append_plain(self, sampled: tuple[int, ...]) -> bool:
        """Takes the tokens of a decode row if none can end the request; the fast path of a commit.

        False, and nothing is taken, where the request has ended or was preempted, or may end with one of them.
        """
        tokens = self.tokens
        num_known = len(tokens) + len(sampled)
        if (
            self.status is not Status.RUNNING
            or num_known >= self.max_total_len
            or not self.request.stop_ids.isdisjoint(sampled)
        ):
            return False
        tokens += sampled
        self.num_computed = num_known - 1
        self.num_output_placeholders -= len(sampled)
        self.num_in_flight -= 1
        return True
