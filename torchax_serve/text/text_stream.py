"""Text and end of an answer, from its tokens: `StepDecoder`, `TextStream`, and `stream`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.outputs import FinishReason, GenerationStats, TokenLogprobs
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.detokenizer import Detokenizer, NoText, StopStrings
from torchax_serve.text.prompt import PreparedPrompt, TextModel, detokenizer_of, encode_prompt, make_request
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


class StepDecoder:
    """Decodes the steps of one answer.

    Args:
        detokenizer: Of this answer; it is used by it only.
        stop_strings: Texts that end the answer.
        eos_token_ids: Tokens that end it.
        stop_token_ids: Those of them that the request named; they have no text.
        include_stop: Whether the text has the stop string or the stop token.
        silent_ids: Further tokens without text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | NoText,
        stop_strings: Sequence[str] = (),
        eos_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        *,
        include_stop: bool = False,
        silent_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops, self._has_stop_strings = StopStrings(stop_strings), bool(stop_strings)
        self._eos_token_ids, self._stop_token_ids = frozenset(eos_token_ids), frozenset(stop_token_ids)
        self._include_stop, self._silent_ids = include_stop, frozenset(silent_ids)
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> AnswerStep:
        """Takes the tokens of a step and, with the last one, why the engine ended the request.

        Tokens behind the one that completes a stop string are dropped.
        """
        pieces: list[str] = []
        stop: str | int | None = None
        num_taken = self._num_until_end(token_ids)
        if not self._has_stop_strings:
            pieces.append(
                self._detokenizer.push_all(int(each) for each in token_ids[:num_taken] if self._is_shown(each))
            )
        else:
            for index, token_id in enumerate(token_ids[:num_taken]):
                text = self._detokenizer.push(int(token_id)) if self._is_shown(token_id) else ""
                pieces.append(self._stops.push(text))
                if self._stops.found is not None:
                    num_taken = index + 1
                    break
        if self._stops.found is None and num_taken and token_ids[num_taken - 1] in self._eos_token_ids:
            self.finish_reason = "stop"
            last = int(token_ids[num_taken - 1])
            stop = last if last in self._stop_token_ids else None
        if self._stops.found is None and self.finish_reason is None:
            self.finish_reason = finish_reason
        if self._stops.found is None and self.finish_reason not in (None, "abort", "error"):
            pieces.append(self._stops.push(self._detokenizer.flush()))
            if self._stops.found is None:
                pieces.append(self._stops.flush())
        if self._stops.found is not None:
            self.finish_reason, stop = "stop", self._stops.found
            if self._include_stop:
                pieces.append(self._stops.found)
        taken = None if logprobs is None else tuple(logprobs[:num_taken])
        return AnswerStep("".join(pieces), tuple(token_ids[:num_taken]), taken, self.finish_reason, stop)

    def _num_until_end(self, token_ids: Sequence[int]) -> int:
        """Returns the number of tokens up to the first one that ends the answer, which counts."""
        ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in self._eos_token_ids)
        return next(ends, len(token_ids))

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
        request: PreparedPrompt,
        detokenizer: Detokenizer | NoText,
        tokens: Iterator[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.token_ids: list[int] = []
        self._request = request
        stop_token_ids = request.params.stop_token_ids or ()
        self._decoder = StepDecoder(detokenizer, request.stop_strings, request.eos_token_ids, stop_token_ids)
        self._has_text = not isinstance(detokenizer, NoText)
        self._tokens = tokens
        self._pieces: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._first_s: float | None = None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """`TokenLogprobs` of the tokens so far, with ``SamplingParams(logprobs=...)``."""
        return list(getattr(self._tokens, "logprobs", ()))[: len(self.token_ids)]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """`TokenLogprobs` of the prompt's tokens, None for the first token.

        They are requested by ``SamplingParams(prompt_logprobs=...)``.
        """
        return getattr(self._tokens, "prompt_logprobs", None)

    @property
    def text(self) -> str:
        """Pieces so far, joined."""
        return "".join(self._pieces)

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far; ``finish_reason`` is set once the stream has ended."""
        num_later = len(self.token_ids) - 1
        handle: Any = getattr(self._tokens, "handle", None)
        decode_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        return GenerationStats(
            prompt_tokens=len(self._request.prompt_ids),
            new_tokens=len(self.token_ids),
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            decode_tokens_per_s=num_later / decode_s if num_later > 0 and decode_s > 0 else None,
            total_s=self._last_s - self._start_s,
            finish_reason=self._finish_reason,
            cached_tokens=0 if handle is None else handle.num_cached_tokens,
            queued_s=None if handle is None else handle.queued_s,
            num_preemptions=0 if handle is None else handle.num_preemptions,
        )

    def __repr__(self) -> str:
        state = "running" if self._finish_reason is None else f"finish_reason={self._finish_reason!r}"
        return f"<TextStream: {len(self.token_ids)} tokens, {short_repr(self.text)}, {state}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while self._finish_reason is None:
            piece = self._advance()
            if piece or not self._has_text:
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stops decoding; a stream that has not ended gets the reason "abort".

        The model stays usable.
        """
        if self._finish_reason is None:
            self._end("abort")

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
        """Returns the next piece without blocking the event loop; for requests on the engine."""
        tokens: Any = self._tokens
        if not hasattr(tokens, "__anext__"):
            raise UnsupportedModelError(
                "async for: expected a request on the engine, and this one is not; iterate with for, in a thread"
            )
        while self._finish_reason is None:
            try:
                token_id = await anext(tokens)
            except StopAsyncIteration:
                piece = self._end(self._finish_reason_without_stop())
            except BaseException:
                self.close()
                raise
            else:
                piece = self._push(token_id)
            if piece or not self._has_text:
                self._pieces.append(piece)
                return piece
        raise StopAsyncIteration

    def _finish_reason_without_stop(self) -> FinishReason:
        """Returns why the tokens have ended without an end-of-sequence token or stop string."""
        reason: FinishReason | None = getattr(self._tokens, "finish_reason", None)
        return reason if reason in ("deadline", "queue_deadline") else "length"

    def _advance(self) -> str:
        """Takes one token, or the end; returns the text that became final."""
        try:
            token_id = next(self._tokens)
        except StopIteration:
            return self._end(self._finish_reason_without_stop())
        except BaseException:
            self.close()
            raise
        return self._push(token_id)

    def _push(self, token_id: int) -> str:
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s
        self.token_ids.append(int(token_id))
        return self._shown(self._decoder.push(self.token_ids[-1:]))

    def _end(self, reason: FinishReason) -> str:
        """Ends the answer; returns the text that was held back, or nothing of a cancelled answer."""
        return self._shown(self._decoder.push((), finish_reason=reason))

    def _shown(self, step: AnswerStep) -> str:
        """Returns the text of a step; the last one stops the tokens."""
        if step.finish_reason is not None:
            self._finish_reason = step.finish_reason
            close = getattr(self._tokens, "close", None)
            if close is not None:
                close()
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


def start_stream(model: TextModel, request: PreparedPrompt) -> TextStream:
    """Returns the `TextStream` of a checked request."""
    num_answers = request.generation_config.num_return_sequences or 1
    if num_answers > 1:
        raise UnsupportedArgumentError(
            f"n: expected one answer, got n={num_answers}; call generate_batch, or ask again for another"
        )
    detokenizer = detokenizer_of(model, request.stop_strings)
    return TextStream(request, detokenizer, new_tokens(model, request))


def new_tokens(model: TextModel, request: PreparedPrompt, first: Iterator[int] | None = None) -> Iterator[int]:
    """Returns the model's iterator over the new tokens of `request`.

    Args:
        model: The model.
        request: The request.
        first: Tokens of the first answer to its prompt; a later one shares its pages.
    """
    has_shared_pages = request.answer_index and request.inputs is None and hasattr(first, "handle")
    submit: Callable[..., Iterator[int]] | None = getattr(model, "submit_prompt", None)
    if submit is not None:  # a served model, which need not check again
        return submit(request, first if has_shared_pages else None)
    kwargs: dict[str, Any] = {} if request.seed is None else {"seed": request.seed}
    if request.inputs is not None:
        kwargs["inputs"] = request.inputs
    if request.masks is not None:
        kwargs["masks"] = request.masks
    if has_shared_pages:
        kwargs["fork_of"] = first
    if request.params.engine_only():
        kwargs["params"] = request.params.only_engine_options()  # the config has the others
    return model.iter_tokens(request.prompt_ids, request.generation_config, **kwargs)


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
