"""Steps of a single request: a row of the compiled forward, or a ``generate`` call.

Both yield one token at a time, as `SequenceSteps` of `torchax_serve.executors.request_input`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from model_adapters.device_arrays import to_device
from torchax_serve.executors.request_input import SequenceEnded
from torchax_serve.generation.batch_forward import BatchForward
from torchax_serve.outputs import FinishReason


class ForwardSteps:
    """Steps of one row on the compiled forward, with a dense cache of its own.

    Args:
        forward: Forward of the row.
    """

    runs_ahead = True

    def __init__(self, forward: BatchForward) -> None:
        self._forward: BatchForward | None = forward
        self._tokens: list[jax.Array] = []  # new tokens, int32[1] each, where all tokens may be computed again

    def prefill(self) -> jax.Array:
        """Implements `SequenceSteps.prefill`."""
        return self._open_forward.prefill()

    def decode(self, last_tokens: jax.Array) -> jax.Array:
        """Implements `SequenceSteps.decode`."""
        forward = self._open_forward
        if forward.recompute_len is None:
            return forward.decode(last_tokens)
        self._tokens.append(jnp.copy(last_tokens))  # the sampler donates its own
        if forward.prompt_len + len(self._tokens) - 1 != forward.recompute_len:
            return forward.decode(last_tokens)
        new = torch.from_numpy(np.concatenate([np.asarray(token) for token in self._tokens])).long()
        return forward.recompute(torch.cat([forward.prompt_ids, new[None]], 1))

    @property
    def _open_forward(self) -> BatchForward:
        if self._forward is None:
            raise SequenceEnded("abort")
        return self._forward

    def cancel(self) -> None:
        """Implements `SequenceSteps.cancel`: no step blocks."""

    def close(self) -> None:
        """Implements `SequenceSteps.close`."""
        self._forward = None
        self._tokens.clear()


class GenerateSteps:
    """Steps of a ``generate`` call in its own thread; each step waits for the next token.

    A call that knows its tokens at its end only, such as beam search, has them all in its first step. The logits of a
    step select the token that ``generate`` has chosen.

    Args:
        call: Calls ``generate`` with a `GenerateWatch`; returns the tokens that the watch has not seen.
        vocab_size: Number of columns of the logits.
        timeout_s: Seconds until the call is ended; None: never.
        check_tokens_left: Raises if the call's options forbid every token behind the new ones so far, for which
            transformers draws the first or fails; None: unknown.
    """

    runs_ahead = False

    def __init__(
        self,
        call: Callable[[GenerateWatch], Iterable[int]],
        *,
        vocab_size: int,
        timeout_s: float | None,
        check_tokens_left: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._call, self._vocab_size = call, vocab_size
        self._check_tokens_left, self._new_ids = check_tokens_left, list[int]()
        self._watch = GenerateWatch.with_timeout(timeout_s)
        self._thread: threading.Thread | None = None

    def prefill(self) -> jax.Array:
        """Implements `SequenceSteps.prefill`."""
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()
        return self._next_logits()

    def decode(self, last_tokens: jax.Array) -> jax.Array:
        """Implements `SequenceSteps.decode`."""
        return self._next_logits()

    def _next_logits(self) -> jax.Array:
        item = self._watch.tokens.get()
        if self._check_tokens_left is not None and not isinstance(item, SequenceEnded):
            self._check_tokens_left(self._new_ids)
        if isinstance(item, BaseException):
            self._watch.tokens.put(item)  # for a later step
            raise item
        self._new_ids.append(item)
        logits = np.full((1, self._vocab_size), -np.inf, np.float32)
        logits[0, item] = 0
        return to_device(logits, np.float32)

    def _run(self) -> None:
        tokens = self._watch.tokens
        try:
            self._watch.check()
            for token in self._call(self._watch):
                tokens.put(int(token))
            tokens.put(SequenceEnded("length"))
        except BaseException as error:
            tokens.put(error)

    def cancel(self) -> None:
        """Implements `SequenceSteps.cancel`."""
        self._watch.cancelled.set()

    def close(self) -> None:
        """Implements `SequenceSteps.close`: waits for the call's current step."""
        self.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class GenerateWatch:
    """Streamer and stopping criterion of a ``generate`` call: takes its tokens, and ends it.

    Args:
        deadline_s: When the call ends, in seconds on the clock `time.monotonic`; None: never.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self.tokens: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self._deadline_s = deadline_s

    @classmethod
    def with_timeout(cls, timeout_s: float | None) -> GenerateWatch:
        """Returns a watch whose call ends `timeout_s` seconds from now; None: never."""
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def check(self) -> None:
        """Raises SequenceEnded if the call was cancelled or is past its deadline."""
        reason: FinishReason | None = None
        if self.cancelled.is_set():
            reason = "abort"
        elif self._deadline_s is not None and time.monotonic() > self._deadline_s:
            reason = "deadline"
        if reason is not None:
            raise SequenceEnded(reason)

    def streamer(self, on_tokens: Callable[[Sequence[int] | None], None] | None = None) -> BaseStreamer:
        """Returns a streamer that takes the new tokens of one row.

        Args:
            on_tokens: Called with them, too, and with None at the end of each loop over tokens; None: nobody asks.
        """
        return _WatchStreamer(self, on_tokens)

    def criterion(self) -> StoppingCriteria:
        """Returns a stopping criterion for calls without a streamer."""
        return _WatchCriterion(self)


class _WatchStreamer(BaseStreamer):
    def __init__(self, watch: GenerateWatch, on_tokens: Callable[[Sequence[int] | None], None] | None) -> None:
        self._watch, self._on_tokens, self._has_prompt = watch, on_tokens, False

    def put(self, value: torch.Tensor) -> None:
        self._watch.check()
        if self._has_prompt:
            token_id = int(value.reshape(-1)[0])
            self._watch.tokens.put(token_id)
            if self._on_tokens is not None:
                self._on_tokens((token_id,))
        self._has_prompt = True

    def end(self) -> None:
        self._has_prompt = False  # a call may have several loops, each with a prompt
        if self._on_tokens is not None:
            self._on_tokens(None)


class _WatchCriterion(StoppingCriteria):
    def __init__(self, watch: GenerateWatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._watch.check()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@contextlib.contextmanager
def torch_seed(seed: int | None) -> Iterator[None]:
    """Seeds torch's global generator inside the block and restores it; does nothing for None."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
