"""Other weights for engines that run, between two of their steps.

The memory of their caches can be given away as well.

Programs depend on shapes, dtypes and shardings of weights alone, and are given the arrays with each step, so that an
exchange of arrays compiles nothing. What must change with them are the cached prefixes: their pages were computed by
the weights of before. Other engines have had wrong tokens of such pages (NeMo-RL pull request 4018, lmdeploy issue
4917).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from model_adapters.ops.compressed_weight import Weight
from torchax_serve.engine.admission import ASLEEP
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.model_runner import ModelRunner
from torchax_serve.scheduler import Scheduler

if TYPE_CHECKING:
    from torchax_serve.engine.data_parallel import DataParallelEngines


def engines_in(*groups: Engine | DataParallelEngines | object) -> list[Engine]:
    """Returns the single engines among `groups`; what is no engine is left out."""
    found: list[Engine] = []
    for group in groups:
        found += [group] if isinstance(group, Engine) else getattr(group, "engines", [])
    return found


def between_steps(
    engines: Sequence[Engine], function: Callable[[], None], version: int, *, when_idle: bool = False
) -> None:
    """Calls `function` between two steps of all `engines`; sets the version of their weights.

    Prefixes of before are not found any more.

    Args:
        engines: Those whose requests wait for requests of others come first.
        function: Exchanges the weights.
        version: Version of the weights after it.
        when_idle: As of `Engine.call`.
    """
    if not engines:
        function()
        return

    def stopped(scheduler: Scheduler, runner: ModelRunner) -> None:
        between_steps(engines[1:], function, version, when_idle=when_idle)
        scheduler.clear_prefix_cache()
        runner.weights_version = version

    engines[0].call(stopped, when_idle=when_idle)


def exchange(pairs: Sequence[tuple[MutableMapping[str, Weight], Mapping[str, Weight]]]) -> None:
    """Exchanges the arrays of each mapping for new ones, all in one step for other threads."""
    before = [dict(weights) for weights, _ in pairs]  # freed after the exchange, which nothing then interrupts
    for weights, new in pairs:
        weights.update(new)
    before.clear()


def sleep(engines: Sequence[Engine]) -> None:
    """Refuses new requests, waits for those that were taken, and frees the caches."""
    for engine in engines:
        engine.drain(refusal=ASLEEP)
    for engine in engines:
        engine.call(_free_cache, when_idle=True)


def _free_cache(scheduler: Scheduler, runner: ModelRunner) -> None:
    scheduler.clear_prefix_cache()
    runner.release_cache()


def wake(engines: Sequence[Engine]) -> None:
    """Allocates the caches of sleeping engines, which then take requests."""
    for engine in engines:
        if engine.admission.refusal == ASLEEP:
            engine.call(lambda _, runner: runner.reset())
            engine.admission.refusal = None
