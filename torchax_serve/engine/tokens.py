"""The tokens of one request, one by one."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Iterator
from typing import Self

from torchax_serve.engine.ticket import NewTokens, Ticket, TokenLogprobs
from torchax_serve.scheduler import FinishReason


class TokenStream(Iterator[int]):
    """Yields new token ids as they come, the one that ends the answer included; also with ``async for``.

    Closing it ends the request.

    Attributes:
        logprobs: of the tokens yielded so far, where they were asked for.
        prompt_logprobs: of the prompt's tokens, None for the first one; with the first token, where they are asked for.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._ticket = ticket
        self._arrivals = iter(ticket)
        self._async_arrivals: AsyncIterator[NewTokens] | None = None
        self._ready: collections.deque[int] = collections.deque()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request has ended, once its last token was yielded."""
        return None if self._ready else self._ticket.finish_reason

    def _take(self, new: NewTokens) -> None:
        self._ready.extend(new.token_ids)
        self.logprobs += new.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        while not self._ready:
            self._take(next(self._arrivals))
        return self._ready.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        if self._async_arrivals is None:
            self._async_arrivals = aiter(self._ticket)
        while not self._ready:
            self._take(await anext(self._async_arrivals))
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._ticket.cancel()
