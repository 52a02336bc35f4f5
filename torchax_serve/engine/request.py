"""`EngineRequest`: a request as the engine takes it, with token ids and checked options."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from model_adapters.errors import InvalidArgumentError
from torchax_serve.engine.adapters import AdapterUse
from torchax_serve.executors.request_input import MediaInput, RequestInput, SequenceSteps
from torchax_serve.sampling.history import HistoryOptions
from torchax_serve.sampling.row_params import RowSamplingParams
from torchax_serve.sampling.token_masks import TokenMasks
from torchax_serve.sampling_params import NO_PARAMS, SamplingParams
from torchax_serve.scheduler import RequestId, SchedulerRequest

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from torchax_serve.engine.request_handle import TokenStream


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request for one answer to one prompt.

    Attributes:
        prompt_ids: Checked token ids; of an encoder-decoder model those that the decoder starts with.
        max_new_tokens: Maximum number of tokens of the answer.
        min_new_tokens: Number of tokens of the answer before a stop token may end it.
        params: Options that only the engine honours.
        sampling: Sampling options, checked.
        fork_of: Id of a running request with the same prompt, whose pages are shared.
        encoder_ids: Token ids for the encoder of an encoder-decoder model.
        encoder_output: Output of the encoder, float[1, len, width] on the host, in place of `encoder_ids`.
        steps: All steps of a request that runs by itself, with its images or audio.
        masks: Tokens that may be sampled, step by step; None: all.
        media: Images or audio of the prompt, encoded.
        is_continuation: Whether it goes on with a call that an engine has taken before, such as the next window of long
            audio: it may exceed the limits of waiting requests.
        adapter: The use of the adapter that `params` name, found when the request is submitted; None: none.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int
    params: SamplingParams
    sampling: RowSamplingParams
    fork_of: RequestId | None = None
    encoder_ids: tuple[int, ...] = ()
    encoder_output: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    steps: SequenceSteps | None = dataclasses.field(default=None, repr=False, compare=False)
    masks: TokenMasks | None = dataclasses.field(default=None, repr=False, compare=False)
    media: MediaInput | None = dataclasses.field(default=None, repr=False, compare=False)
    is_continuation: bool = False
    adapter: AdapterUse | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def source(self) -> RequestInput:
        """Steps, media, encoder output or encoder input; no tokens for a model without an encoder."""
        if self.steps is not None or self.media is not None:
            return self.steps or self.media  # type: ignore[return-value]
        return self.encoder_ids if self.encoder_output is None else self.encoder_output

    @property
    def adapter_id(self) -> int:
        """Adapter of its tokens: one more than its place, 0 for none."""
        return 0 if self.adapter is None else self.adapter.adapter_id

    def cancel(self) -> None:
        """Ends a step of the request that blocks; called from any thread."""
        if self.steps is not None:
            self.steps.cancel()

    def close(self) -> None:
        """Frees what only this request uses on the device."""
        if self.steps is not None:
            self.steps.close()
        if self.adapter is not None:
            self.adapter.release()

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        params: SamplingParams | None = None,
        *,
        vocab_size: int,
        seed: int | None = None,
        fork_of: RequestId | None = None,
        source_ids: Sequence[int] = (),
        encoded: np.ndarray | None = None,
        steps: SequenceSteps | None = None,
        media: MediaInput | None = None,
    ) -> Self:
        """Makes a request for a continuation of `prompt_ids`.

        Args:
            prompt_ids: Token ids, checked against the model.
            config: Limits and sampling options, with the caller's merged into the model's; without stop strings.
            params: Options that only the engine honours (`SamplingParams.only_engine_options`).
            vocab_size: Number of columns of the logits.
            seed: Seed of the random draws, which depend on nothing else than it and the tokens; None: a random one.
            fork_of: As the attribute.
            source_ids: As `encoder_ids`.
            encoded: As `encoder_output`.
            steps: As the attribute.
            media: As the attribute.

        Raises:
            InvalidArgumentError: a value is out of its range.
            UnsupportedArgumentError: an option is not supported for requests of the engine.
        """
        params = params or NO_PARAMS
        num_prompt = len(prompt_ids)
        seed = secrets.randbits(63) if seed is None else seed
        row = RowSamplingParams.of(params, config, vocab_size=vocab_size, seed=seed)
        if config.max_new_tokens is not None:
            most = int(config.max_new_tokens)
        else:
            most = max(1, int(config.max_length or 0) - num_prompt)
        least = min(row.num_forced_tokens(num_prompt), most)
        row = dataclasses.replace(row, max_new_tokens=most)
        inputs = tuple(source_ids), encoded, steps
        return cls(tuple(prompt_ids), most, least, params, row, fork_of, *inputs, media=media)

    def as_answer(self, masks: TokenMasks | None, fork_of: TokenStream | None) -> Self:
        """Returns the request with masks, and as one more answer to the prompt of another one.

        Args:
            masks: As the attribute.
            fork_of: Tokens of a request on the same engine; None: of none.
        """
        parent = None if fork_of is None else fork_of.handle.request_id
        return dataclasses.replace(self, masks=masks, fork_of=parent)

    def with_num_top(self, max_logprobs: int, vocab_size: int) -> Self:
        """Returns the request with the numbers of log-probabilities that -1 stands for.

        Args:
            max_logprobs: Most that it may ask for; -1: the whole vocabulary.
            vocab_size: Number of columns of the logits.

        Raises:
            InvalidArgumentError: it asks for more.
        """
        asked = {name: getattr(self.params, name) for name in ("logprobs", "prompt_logprobs")}
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name, number in asked.items():
            if number is not None and (vocab_size if number == -1 else number) > most:
                shown = "-1, those of the whole vocabulary" if number == -1 else number
                raise InvalidArgumentError(
                    f"{name}: expected at most {most}, got {shown}; EngineOptions(max_logprobs=...) allows more"
                )
        if -1 not in asked.values():
            return self
        logprobs, prompt = (vocab_size if number == -1 else number for number in asked.values())
        return dataclasses.replace(
            self,
            params=dataclasses.replace(self.params, logprobs=logprobs, prompt_logprobs=prompt),
            sampling=dataclasses.replace(self.sampling, logprobs=logprobs),
        )

    def with_scores_logprobs(self) -> Self:
        """Returns the request with log-probabilities under processed scores, at temperature 1."""
        history = dataclasses.replace(self.sampling.history or HistoryOptions(), scores_logprobs=True)
        return dataclasses.replace(
            self,
            params=dataclasses.replace(self.params, logprobs=0),
            sampling=dataclasses.replace(self.sampling, logprobs=0, history=history),
        )

    def within(self, max_len: int) -> Self:
        """Returns the request limited to `max_len` tokens, prompt and answer.

        The engine would end it there anyway. Its token history then needs no more memory than a sequence of the engine.
        """
        room = max(1, max_len - len(self.prompt_ids))
        if self.max_new_tokens <= room:
            return self
        return dataclasses.replace(
            self,
            max_new_tokens=room,
            min_new_tokens=min(self.min_new_tokens, room),
            sampling=dataclasses.replace(self.sampling, max_new_tokens=room),
        )

    def _num_unspeculated(self) -> float:
        """Returns the number of new tokens that need more than the logits of the token before."""
        needs_more = self.sampling.level not in ("greedy", "sampled")
        return math.inf if needs_more else self.sampling.num_tokens_with_tables(len(self.prompt_ids))

    def to_scheduler(self, request_id: RequestId, now: float) -> SchedulerRequest:
        """Returns the part that the scheduler needs; `now` is in seconds on the scheduler's clock."""
        params = self.params
        return SchedulerRequest(
            request_id=request_id,
            prompt_ids=list(self.prompt_ids if self.media is None else self.media.page_ids),
            spans=() if self.media is None else self.media.spans,
            has_page_ids=self.media is not None,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=frozenset(self.sampling.stop_ids),
            min_new_tokens=self.min_new_tokens,
            priority=params.priority or 0,
            deadline_s=None if params.timeout_s is None else now + params.timeout_s,
            queue_deadline_s=None if params.queue_timeout_s is None else now + params.queue_timeout_s,
            salt=("" if self.adapter is None else self.adapter.salt) + (params.cache_salt or ""),
            cache_prompt=params.prompt_logprobs is None,  # cached tokens have no logits
            fork_of=self.fork_of,
            arrived_s=now,
            waits_for_tokens=self.masks is not None,
            speculates=params.speculate is not False,
            num_unspeculated=self._num_unspeculated(),
        )
