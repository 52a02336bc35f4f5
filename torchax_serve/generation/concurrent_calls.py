"""`run_concurrently`: calls of ``generate`` on threads, each with its own loops."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.generation.call_limits import CallLimits, current_generator, seeds_from

Input = TypeVar("Input")
Result = TypeVar("Result")


def run_concurrently(
    call: Callable[[Input], Result], inputs: Sequence[Input], limits: CallLimits, num_threads: int, *, draws: bool
) -> list[Result]:
    """Returns the results of `call` for each input.

    An error of one ends the others. Where tokens are drawn, each has seeds of its own, which follow from those of the
    caller: the results do not depend on which is faster.

    Args:
        call: Returns the result of an input.
        inputs: The inputs.
        limits: Limits of all calls together.
        num_threads: Calls that run at once.
        draws: Whether tokens may be drawn.
    """
    seeds = [0] * len(inputs)
    if draws:
        seeds = torch.randint(2**63 - 1, (len(inputs),), generator=current_generator()).tolist()

    def run(each: Input, seed: int) -> Result:
        limits.check()
        with seeds_from(torch.Generator().manual_seed(seed)):
            return call(each)

    with concurrent.futures.ThreadPoolExecutor(min(num_threads, len(inputs)), "generate") as pool:
        futures = [pool.submit(run, *pair) for pair in zip(inputs, seeds, strict=True)]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            limits.cancel()
            raise
    return [future.result() for future in futures]


def options_of_each(options: Mapping[str, Any], num_calls: int) -> list[dict[str, Any]]:
    """Returns the options of each call for one array of samples, from those of a call for all.

    Raises:
        InvalidArgumentError: there are languages for another number of arrays.
    """
    languages = options.get("language")
    if not isinstance(languages, list | tuple):
        return [dict(options)] * num_calls
    if len(languages) != num_calls:
        raise InvalidArgumentError(
            f"language: expected one for each of {num_calls} arrays, got {len(languages)}; give one for all"
        )
    return [{**options, "language": language} for language in languages]


def checking(limits: CallLimits, then: Callable[[Any], Any] | None) -> Callable[[Any], None]:
    """Returns a ``monitor_progress`` that checks `limits` before each window, and calls `then`."""

    def check(progress: Any) -> None:
        limits.check()
        if then is not None:
            then(progress)

    return check
