"""`run_on_queue`: a ``generate`` call that waits in the queue of single requests.

When its turn has come, it runs there to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import jax
from transformers import GenerationConfig

from model_adapters.errors import RequestError
from torchax_serve.engine.engine import Engine
from torchax_serve.executors.request_input import SequenceEnded
from torchax_serve.generation.call_limits import CallLimits
from torchax_serve.generation.sequence_steps import GenerateWatch
from torchax_serve.request_params import RequestParams
from torchax_serve.scheduler import Request

T = TypeVar("T")


def run_on_queue(engine: Engine, call: Callable[[GenerateWatch], T], limits: CallLimits) -> T:
    """Returns the result of `call`, which runs on the thread of `engine`.

    Args:
        engine: Engine of single requests.
        call: Calls ``generate`` with a streamer or a stopping criterion of the watch, so that it can be ended.
        limits: Priority, time limits and cancellation.

    Raises:
        RequestError: it was cancelled, a time limit has passed (DeadlineError), or the engine was closed.
        QueueFullError: too many requests are waiting.
        Exception: what `call` raises.
    """
    params = limits.params()
    steps = CallSteps(call, params.timeout_s)
    own = RequestParams.of_generation_config(GenerationConfig(max_new_tokens=1), params, seed=0)
    handle = engine.submit(Request.of((0,), own, request_input=steps))
    with limits.cancelling([handle]):
        try:
            handle.result()
        except RequestError as error:
            if steps.error is not None:
                raise steps.error from None
            raise error
    return steps.results[0]


class CallSteps(Generic[T]):
    """`SequenceSteps` of a call: its first step runs the call, and there is no token.

    Args:
        call: The call.
        timeout_s: Seconds until the call is ended; None: never.

    Attributes:
        results: The result of the call, once it has ended well.
        error: What the call has raised.
    """

    runs_ahead = False

    def __init__(self, call: Callable[[GenerateWatch], T], timeout_s: float | None) -> None:
        self._call, self._watch = call, GenerateWatch.with_timeout(timeout_s)
        self.results: list[T] = []
        self.error: BaseException | None = None

    def prefill(self) -> jax.Array:
        """Implements `SequenceSteps.prefill`; always raises SequenceEnded, or what the call raises."""
        try:
            self.results.append(self._call(self._watch))
        except SequenceEnded:
            raise
        except BaseException as error:
            self.error = error
            raise
        raise SequenceEnded("stop")

    def decode(self, last_tokens: jax.Array) -> jax.Array:
        """Implements `SequenceSteps.decode`: there is no second step."""
        raise SequenceEnded("stop")

    def cancel(self) -> None:
        """Implements `SequenceSteps.cancel`."""
        self._watch.cancelled.set()

    def close(self) -> None:
        """Does nothing: the call has freed what it has used."""
