"""`TranscriptStream`: the text of a transcription while its tokens come, for event loops."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Self

from torchax_serve.generation.call_limits import CallLimits
from torchax_serve.generation.call_pool import CallPool
from torchax_serve.generation.transcript_times import finished_ids, time_begin
from torchax_serve.text.detokenizer import Detokenizer


class TranscriptPieces:
    """Makes pieces of text from tokens; joined they are the beginning of the transcript.

    Args:
        model: The model on JAX.
        tokenizer: Its tokenizer; None for no text.
        is_cut: Whether the audio has several windows. What a window says behind its last pair of time tokens is not
            part of the transcript then, so its text comes at its end.
    """

    def __init__(self, model: Any, tokenizer: Any, *, is_cut: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._eos_ids = _eos_ids(model)
        self._begin, self._is_cut = time_begin(model), is_cut
        self._window: list[int] = []
        self._sent, self._held = "", ""

    def push(self, token_ids: Sequence[int] | None) -> str:
        """Returns the text that new tokens have made certain; None ends a window."""
        if not self._is_cut:
            return self._text(token_ids or ())
        if token_ids is not None:
            self._window += [token_id for token_id in token_ids if token_id not in self._eos_ids]
            return ""
        window, self._window = self._window, []
        return self._text(window if self._begin is None else finished_ids(window, self._begin))

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self._held + "".join(self._detokenizer.push(token_id) for token_id in token_ids)
        if not self._sent:
            text = text.lstrip()
        piece = text.rstrip()  # a transcript has no white space at its ends: it waits for what follows
        self._held = text[len(piece) :]
        self._sent += piece
        return piece

    def rest(self, transcript: str) -> str:
        """Returns what is left of the complete transcript.

        Nothing of one that does not begin with the pieces.
        """
        return transcript[len(self._sent) :] if transcript.startswith(self._sent) else ""


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


class TranscriptStream(AsyncIterator[str]):
    """Pieces of one transcript, for ``async for``.

    Closing or dropping it ends the transcription within a step.

    It is made in an event loop, and submits the transcription at once.

    Args:
        pool: Threads for it.
        transcribe: Returns the transcript; called with limits whose `on_tokens` is to be called.
        limits: Makes the limits from `on_tokens`.
        pieces: Makes text of the tokens.

    Raises:
        QueueFullError: too many calls are waiting.
    """

    def __init__(
        self,
        pool: CallPool,
        transcribe: Callable[[CallLimits], Any],
        limits: Callable[[Callable[[Sequence[int] | None], None]], CallLimits],
        pieces: TranscriptPieces,
    ) -> None:
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[str | None] = asyncio.Queue()

        def push(token_ids: Sequence[int] | None) -> None:
            loop.call_soon_threadsafe(arrivals.put_nowait, pieces.push(token_ids))

        self._limits = limits(push)
        self._future = pool.submit(functools.partial(transcribe, self._limits), self._limits)
        self._pieces = _read(pool, self._future, self._limits, arrivals, pieces)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Ends the transcription."""
        self._end()
        await self._pieces.aclose()

    def __del__(self) -> None:
        """Ends the transcription: its pieces have no reader any more."""
        if "_pieces" in vars(self):
            self._end()

    def _end(self) -> None:
        self._limits.cancel()
        self._future.cancel()


async def _read(
    pool: CallPool, future: Any, limits: CallLimits, arrivals: asyncio.Queue[str | None], pieces: TranscriptPieces
) -> AsyncGenerator[str]:
    """Yields pieces as they arrive; None ends them."""
    work = asyncio.ensure_future(pool.run(future, limits))
    work.add_done_callback(lambda _: arrivals.put_nowait(None))
    try:
        while (piece := await arrivals.get()) is not None:
            if piece:
                yield piece
        if rest := pieces.rest(await work):
            yield rest
    finally:
        work.cancel()
