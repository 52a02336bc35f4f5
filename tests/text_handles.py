"""A handle of a request whose tokens come from an iterator, for models that stand for served ones."""

import typing


class Output(typing.NamedTuple):
    token_ids: tuple
    finish_reason: str | None = None
    logprobs: tuple | None = None
    prompt_logprobs: tuple | None = None


class IteratorHandle:
    """Ends as the engine does: at a stop token, at the limit, or where the iterator ends; `size` tokens a step."""

    num_cached_tokens, queued_s, num_preemptions = 0, None, 0

    def __init__(self, request, tokens, *, size=1, end="length"):
        self.request, self.tokens, self.size, self.end = request, iter(tokens), size, end
        self.cancelled = []  # reasons

    def __iter__(self):
        step = []
        for number, token_id in enumerate(self.tokens, 1):
            step.append(token_id)
            reason = "length" if number == self.request.max_new_tokens else None
            reason = "stop" if token_id in self.request.stop_ids else reason
            if reason is not None or len(step) == self.size:
                yield Output(tuple(step), reason)
                step = []
            if reason is not None:
                return
        yield Output(tuple(step), self.end)

    async def __aiter__(self):
        for output in self:
            yield output

    def cancel(self, reason="abort"):
        self.cancelled.append(reason)
        if hasattr(self.tokens, "close"):
            self.tokens.close()
