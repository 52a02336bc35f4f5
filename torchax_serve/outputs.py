"""Result types of requests, and statistics of streams and engines.

The types say why requests ended and what they returned. A leaf: text, scheduler and engine share these types, and none
of them is needed to read a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "deadline", "queue_deadline", "error"]
"""Why a request ended.

``stop``: an end-of-sequence token, a stop token or a stop string. ``length``: `max_new_tokens`, the longest request of
the engine, or all pages of the cache. ``abort``: its reader cancelled it. ``deadline``: its time limit.
``queue_deadline``: its time limit for waiting, before it began. ``error``: a failure.
"""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token under the model, before any sampling option.

    Attributes:
        token_id: Id of the token.
        logprob: Natural logarithm of the token's probability.
        top: Pairs of token id and log-probability of the likeliest tokens, in descending order.
        weights_version: Version of the weights that computed them: the number of `set_weights` calls before that step.
        rank: Number of tokens that are at least as likely, itself counted: 1 for the likeliest. None: not known.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    weights_version: int = 0
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        text: Text of the answer without special tokens, up to the first stop string; empty for a model without a
            tokenizer.
        token_ids: New tokens, including the end-of-sequence token.
        prompt_len: Number of tokens of the prompt.
        finish_reason: Why the answer ended.
        logprobs: Log-probabilities of each new token; None if they were not requested.
        prompt_logprobs: Log-probabilities of the prompt's tokens, None for the first one; None if they were not
            requested.
    """

    text: str
    token_ids: list[int]
    prompt_len: int
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class TranscriptWord:
    """A word of a transcript, with its times in seconds from the begin of the audio."""

    text: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class TranscriptSegment:
    """A part of a transcript.

    Attributes:
        text: Its text.
        start_s: Its begin, in seconds from that of the audio.
        end_s: Its end, in the same seconds.
        token_ids: Its tokens, those of times included.
        seek: Frame of the audio at which the window with the segment begins.
        avg_logprob: Mean log-probability of the window's tokens under the model.
        no_speech_prob: Probability under the model that the window has no speech.
        compression_ratio: Bytes of the window's text over those of it compressed by zlib; high for repetitions.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: list[int]
    seek: int
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The words in audio, with times.

    Attributes:
        text: All of it.
        duration_s: Seconds of the audio.
        language: English name of the language, in lower case; None if the model does not tell.
        segments: Its parts in their order.
        words: Its words in their order; None if they were not requested.
    """

    text: str
    duration_s: float
    language: str | None
    segments: list[TranscriptSegment]
    words: list[TranscriptWord] | None = None


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one answer.

    Attributes:
        prompt_tokens: Number of tokens of the prompt, including those of the chat template.
        new_tokens: Number of tokens decoded, including the end-of-sequence token.
        ttft_s: Seconds from the request to the first token; None before the first token.
        decode_tokens_per_s: Rate of the tokens after the first; None with fewer than two tokens.
        total_s: Seconds from the request to the last token.
        finish_reason: Why the answer ended; None while it runs.
        cached_tokens: Number of tokens of the prompt that were found in the prefix cache.
        queued_s: Seconds from the request to its first step, a part of `ttft_s`; None before it, and off the engine.
        num_preemptions: How often it made room for other requests; its tokens were computed anew each time.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    total_s: float
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    queued_s: float | None = None
    num_preemptions: int = 0


class GroupUsage(NamedTuple):
    """Pages of one group of attention layers, not counting the null page."""

    name: str
    num_pages: int
    num_used: int
    num_cached: int  # pages that hold a prefix and belong to no running request
    num_host_pages: int = 0  # pages in host memory
    num_host_used: int = 0  # of those, with a prefix
    num_offloaded: int = 0  # total, pages written to host memory
    num_loaded: int = 0  # total, pages read back
    page_size: int = 0  # tokens of a page; 0: a page is a state


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Counts of a scheduler: current ones, and totals since its start."""

    num_running: int
    num_waiting: int  # including preempted requests
    num_in_flight: int  # plans not yet committed
    pages: tuple[GroupUsage, ...]
    num_preemptions: int  # total
    num_prompt_tokens: int  # total, of requests that started (again after a preemption)
    num_hit_tokens: int  # total, prompt tokens found in the prefix cache
    num_new_tokens: int  # total, accepted
    num_draft_tokens: int = 0  # total, drafts that were verified
    num_accepted_tokens: int = 0  # total, of these those that were accepted


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts of an engine: current ones, and totals since its start."""

    scheduler: SchedulerStats
    num_programs: int  # compiled steps in memory
    num_steps: int  # total, dispatched to the device
    tokens_per_s: float  # new tokens over the last 10 seconds
    host_s: float  # total seconds of the engine's thread, not counting waits for the device
    busy_s: float  # total seconds with a step in flight
    cache_bytes: int = 0  # of pages and states on the device
    num_event_batches: int = 0  # total, events of the prefix cache
    num_dropped_batches: int = 0  # total, of these those that nobody got, as too many waited

    @classmethod
    def sum_of(cls, each: Sequence[EngineStats]) -> EngineStats:
        """Returns the sums over several engines that run at the same time.

        Pages are those of all engines.
        """
        counts = [stats.scheduler for stats in each]
        fields = [field.name for field in dataclasses.fields(SchedulerStats) if field.name != "pages"]
        sums = {name: sum(getattr(count, name) for count in counts) for name in fields}
        return cls(
            scheduler=SchedulerStats(**sums, pages=tuple(group for count in counts for group in count.pages)),
            num_programs=sum(stats.num_programs for stats in each),
            num_steps=sum(stats.num_steps for stats in each),
            tokens_per_s=sum(stats.tokens_per_s for stats in each),
            host_s=sum(stats.host_s for stats in each),
            busy_s=max(stats.busy_s for stats in each),
            cache_bytes=sum(stats.cache_bytes for stats in each),
            num_event_batches=sum(stats.num_event_batches for stats in each),
            num_dropped_batches=sum(stats.num_dropped_batches for stats in each),
        )

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of all prompt tokens found in the prefix cache."""
        return self.scheduler.num_hit_tokens / max(1, self.scheduler.num_prompt_tokens)

    def __str__(self) -> str:
        """Returns one line for people."""
        scheduler = self.scheduler
        drafts = ""
        if scheduler.num_draft_tokens:
            drafts = f"{scheduler.num_accepted_tokens}/{scheduler.num_draft_tokens} drafts accepted, "
        pages = ", ".join(f"{group.num_used}/{group.num_pages} pages ({group.name})" for group in scheduler.pages)
        return (
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {pages or 'no pages'}, "
            f"prefix hits {self.prefix_hit_rate:.0%}, {scheduler.num_preemptions} preempted, "
            f"{drafts}{self.num_programs} programs, {self.tokens_per_s:.0f} tokens/s"
        )
