"""Text and end of an answer from its tokens: `AnswerDetokenizer`, `TextStream`, `stream`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.outputs import FinishReason, GenerationStats, TokenLogprobs
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler.request import Request
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.detokenizer import Detokenizer, NoText, StopStrings
from torchax_serve.text.prompt import TextModel, detokenizer_of, encode_prompt, make_request
from torchax_serve.validation.argument_checks import short_repr


@dataclasses.dataclass(frozen=True)
class AnswerStep:
    """Addition of one step to an answer.

    Attributes:
        text: Text that became final; it never ends inside a character.
        token_ids: New token ids.
        logprobs: Log-probabilities of `token_ids`; None if they were not requested.
        finish_reason: Why the answer ended; None while it goes on.
        stop: The stop string or the token of ``stop_token_ids`` that ended it; None for any other end.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


class AnswerDetokenizer:
    """Detokenizes an answer step by step, up to a stop string; other ends are the engine's.

    It runs on the reader's thread: the engine goes on until the reader, who learns of the stop string here, cancels the
    request with the reason "stop" (`TextStream`, and the server's ``Answer``).

    Args:
        detokenizer: Of this answer; it is used by it only.
        stop_strings: Texts that end the answer.
        stop_token_ids: Tokens that end it because the request named them; they have no text.
        include_stop: Whether the text has the stop string or the stop token.
        silent_ids: Further tokens without text.
        min_tokens: Tokens that may complete no stop string, the first ones of the answer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | NoText,
        stop_strings: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        *,
        include_stop: bool = False,
        silent_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._num_to_go = min_tokens
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._include_stop, self._silent_ids = include_stop, frozenset(silent_ids)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> AnswerStep:
        """Takes the tokens of a step and, with the last one, why the engine ended the request.

        Tokens behind the one that completes a stop string are dropped.
        """
        stop: str | int | None = None
        num_taken, ends = len(token_ids), finish_reason not in (None, "abort", "error")
        if self._stops is None:
            text = self._detokenizer.push_all(int(each) for each in token_ids if self._is_shown(each))
            text += self._detokenizer.flush() if ends else ""
        else:
            text, num_taken = self._up_to_stop(self._stops, token_ids, ends)
            stop = self._stops.found
        if stop is not None:
            finish_reason = "stop"
            text += str(stop) if self._include_stop else ""
        elif finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_token_ids:
            stop = int(token_ids[-1])
        taken = None if logprobs is None else tuple(logprobs[:num_taken])
        return AnswerStep(text, tuple(token_ids[:num_taken]), taken, finish_reason, stop)

    def _up_to_stop(self, stops: StopStrings, token_ids: Sequence[int], ends: bool) -> tuple[str, int]:
        """Returns the text of a step up to a stop string, and how many tokens it takes."""
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            piece = self._detokenizer.push(int(token_id)) if self._is_shown(token_id) else ""
            pieces.append(stops.push(piece, may_end=self._num_to_go <= 0))
            self._num_to_go -= 1
            if stops.found is not None:
                return "".join(pieces), index + 1
        if ends:
            pieces.append(stops.push(self._detokenizer.flush(), may_end=self._num_to_go < 0))
            if stops.found is None:
                pieces.append(stops.flush())
        return "".join(pieces), len(token_ids)

    def _is_shown(self, token_id: int) -> bool:
        """Returns whether a token has text."""
        is_stop = token_id in self._stop_token_ids and not self._include_stop
        return not is_stop and token_id not in self._silent_ids


class TextStream(Iterator[str]):
    """Iterates over the pieces of one answer, with ``for`` or ``async for``.

    A context manager, also with ``async with``: leaving it, `close`, or dropping the last reference stops decoding. For
    a model without a tokenizer there is an empty piece per token.

    Attributes:
        token_ids: New tokens so far, the end-of-sequence token included.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer | NoText,
        handle: Any,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.token_ids: list[int] = []
        self._prompt_len, params = len(request.prompt_ids), request.params
        # `min_new_tokens`, as in transformers, holds no stop string back; the server's ``min_tokens`` does, as in vLLM.
        self._detokenizer = AnswerDetokenizer(detokenizer, params.stop_strings, params.given.stop_token_ids or ())
        self._has_text = not isinstance(detokenizer, NoText)
        self._handle = handle
        self._outputs: Iterator[Any] = iter(handle)
        self._async_outputs: Any = None
        # What has arrived and is not shown yet: a token, or the end and its reason, or both.
        self._ready: collections.deque[tuple[int | None, FinishReason | None]] = collections.deque()
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._pieces: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._first_s: float | None = None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """`TokenLogprobs` of the tokens so far, with ``SamplingParams(logprobs=...)``."""
        return self._logprobs[: len(self.token_ids)]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """`TokenLogprobs` of the prompt's tokens, None for the first token.

        They are requested by ``SamplingParams(prompt_logprobs=...)``.
        """
        return self._prompt_logprobs

    @property
    def text(self) -> str:
        """Pieces so far, joined."""
        return "".join(self._pieces)

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far; ``finish_reason`` is set once the stream has ended."""
        num_later = len(self.token_ids) - 1
        decode_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        return GenerationStats(
            prompt_tokens=self._prompt_len,
            new_tokens=len(self.token_ids),
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            decode_tokens_per_s=num_later / decode_s if num_later > 0 and decode_s > 0 else None,
            total_s=self._last_s - self._start_s,
            finish_reason=self._finish_reason,
            cached_tokens=self._handle.num_cached_tokens,
            queued_s=self._handle.queued_s,
            num_preemptions=self._handle.num_preemptions,
        )

    def __repr__(self) -> str:
        state = "running" if self._finish_reason is None else f"finish_reason={self._finish_reason!r}"
        return f"<TextStream: {len(self.token_ids)} tokens, {short_repr(self.text)}, {state}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while self._finish_reason is None:
            try:
                while not self._ready:
                    self._take(next(self._outputs))
                piece = self._next_piece()
            except BaseException:
                self.close()
                raise
            if piece or not self._has_text:
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stops decoding; a stream that has not ended gets the reason "abort".

        The model stays usable.
        """
        if self._finish_reason is None:
            self._finish_reason = "abort"
            self._handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Returns the next piece without blocking the event loop."""
        if self._async_outputs is None:
            self._async_outputs = aiter(self._handle)
        while self._finish_reason is None:
            try:
                while not self._ready:
                    self._take(await anext(self._async_outputs))
                piece = self._next_piece()
            except BaseException:
                self.close()
                raise
            if piece or not self._has_text:
                self._pieces.append(piece)
                return piece
        raise StopAsyncIteration

    def _take(self, output: Any) -> None:
        """Takes an output of the handle, token by token.

        The end is shown with a token that stops the answer, and else behind the last one.
        """
        reason: FinishReason | None = output.finish_reason
        self._ready += [(token_id, None) for token_id in output.token_ids]
        if reason is not None:
            with_token = reason == "stop" and bool(self._ready)
            self._ready.append((self._ready.pop()[0] if with_token else None, reason))
        self._logprobs += output.logprobs or ()
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs

    def _next_piece(self) -> str:
        """Shows what has arrived first; returns the text that became final."""
        token_id, reason = self._ready.popleft()
        new = () if token_id is None else (int(token_id),)
        if new:
            self._last_s = self._clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
            self.token_ids += new
        step = self._detokenizer.push(new, finish_reason=reason)
        self._finish_reason = step.finish_reason
        if step.finish_reason == "stop":
            self._handle.cancel("stop")  # at a stop string, which the engine does not see; else the request has ended
        return step.text


@refuses_unknown_options
def stream(model: TextModel, prompt: str | Sequence[int], params: SamplingParams | None = None) -> TextStream:
    """Continues `prompt` and yields the text as it comes.

    The prompt is checked, and the request is submitted, at once. A piece never ends inside a character and contains no
    part of a stop string. The joined pieces are the decoded new tokens without special tokens, up to the first stop
    string.

    Args:
        model: the model.
        prompt: text, or token ids.
        params: sampling parameters; the model's ``generation_config`` has the defaults, and without a limit an answer
            ends after `DEFAULT_MAX_NEW_TOKENS` tokens.

    Raises:
        InvalidArgumentError: an empty prompt, one longer than the model's positions, token ids out of range; text, or
            stop strings, for a model without a tokenizer.
        UnsupportedArgumentError: more than one answer (``n``), or an unknown argument.
        QueueFullError: too many requests are waiting.
    """
    return start_stream(model, make_request(model, encode_prompt(model, prompt), params))


def start_stream(model: TextModel, request: Request) -> TextStream:
    """Returns the `TextStream` of a checked request."""
    num_answers = request.params.num_answers
    if num_answers > 1:
        raise UnsupportedArgumentError(
            f"n: expected one answer, got n={num_answers}; call generate_batch, or ask again for another"
        )
    detokenizer = detokenizer_of(model, request.params.stop_strings)
    return TextStream(request, detokenizer, model.submit_prompt(request))


def submit_answer(model: TextModel, request: Request, first: Any = None) -> Any:
    """Returns the handle of `request`, which is submitted.

    Args:
        model: The model.
        request: The request.
        first: Handle of the first answer to its prompt; a later one shares its pages.
    """
    shares_pages = request.answer_index and request.generate_inputs is None
    return model.submit_prompt(request, first if shares_pages else None)


def submitted_together(model: TextModel, num_answers: int) -> contextlib.AbstractContextManager[None]:
    """Returns a block that submits the answers to a prompt to the engine together.

    Else the first one could end before the others enter, which then share less of its prompt. None may be read inside.
    """
    if num_answers == 1 or not hasattr(type(model), "engine"):
        return contextlib.nullcontext()
    try:
        engine: Any = model.engine  # type: ignore[attr-defined]
    except UnsupportedModelError:  # its requests run one at a time, and share nothing
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[None] = engine.submitted_together()
    return block
