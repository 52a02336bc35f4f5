"""An accelerator that is stood in for: the engine is real, the device answers when one would, and clocks tell the rest.

What `host_overhead.py` measures with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from serving_peers.roofline import kv_token_bytes, num_weights

VOCAB_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device by its vendor's figures, and which part of its rates programs are believed to reach."""

    name: str = "NVIDIA H200"
    memory_bytes: float = 141e9
    bytes_per_s: float = 4.8e12
    flops_per_s: float = 989e12  # bfloat16, dense
    reached: float = 1.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a decoder's steps move and multiply."""

    weight_bytes: int  # read by each step
    token_bytes: int  # keys and values of one token
    token_flops: int

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Costs:
        """Of a shape as Llama's in 16 bits, whose table of embeddings is looked up in."""
        num_multiplied = sum(num_weights(shape))
        return cls(2 * num_multiplied, kv_token_bytes(shape), 2 * num_multiplied)

    def step_s(self, device: Accelerator, num_tokens: int, num_cached: int) -> float:
        """Of a step of so many tokens that attend to so many in the cache."""
        moved = (self.weight_bytes + num_cached * self.token_bytes) / device.bytes_per_s
        return max(moved, num_tokens * self.token_flops / device.flops_per_s) / device.reached


@dataclasses.dataclass
class Round:
    """One round of the engine's thread: a plan sent, the tokens of an earlier one taken."""

    num_decode: int  # rows of the plan sent
    num_prefill_tokens: int
    num_steps: int
    device_s: float  # what the accelerator takes for the plan
    idle_s: float  # the accelerator had nothing to do before the plan came
    host_s: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # of `host_s`, by name
    has_compiled: bool = False


class RoundRecorder:
    """Puts clocks on the engine's parts, and a device behind them that takes its time.

    Args:
        device: stood in for.
        costs: of the model's steps there.
        holds_prompts: whether steps with prompts take their time, too.
        at_once: whether, instead, no step takes any.
    """

    def __init__(self, device: Accelerator, costs: Costs, *, holds_prompts: bool, at_once: bool) -> None:
        self._device, self._costs = device, costs
        self._holds_prompts, self._at_once = holds_prompts, at_once
        self.rounds: list[Round] = []
        self.spans: list[tuple[str, float, float]] = []  # name, begin and end of what the engine's thread did
        self._ready_s = 0.0  # when the accelerator has done all that it was sent
        self._sent: Round | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Records the engine that is built inside."""
        import jax

        from torchax_serve.engine import factory
        from torchax_serve.engine.output_processor import OutputProcessor
        from torchax_serve.executors.packed import executor as packed
        from torchax_serve.scheduler import Scheduler

        timed = [(Scheduler, "schedule"), (Scheduler, "commit"), (OutputProcessor, "deliver"), (factory.Engine, "step")]
        with contextlib.ExitStack() as stack:
            for owner, name in [*timed, (jax.stages.Compiled, "__call__")]:
                span = "call" if name == "__call__" else name
                stack.enter_context(mock.patch.object(owner, name, self._timed(span, getattr(owner, name))))
            stack.enter_context(mock.patch.object(packed.PackedExecutor, "_forward", arguments_only))
            stack.enter_context(mock.patch.object(factory, "ModelRunner", self._paced(factory.ModelRunner)))
            yield

    def clear(self) -> None:
        """Begins anew."""
        self.rounds.clear()
        self.spans.clear()

    def _timed(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "engine":
                return function(*args, **kwargs)
            first, began = len(self.spans), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append((name, began, time.perf_counter()))
                if name == "step":
                    self._note(first)

        return timed

    def _paced(self, runner_class: Any) -> Any:
        execute, read = self._timed("execute", runner_class.execute), self._timed("read", runner_class.read)
        wait, send = self._timed("wait", self._wait), self._timed("note", self._send)

        class PacedRunner(runner_class):  # type: ignore[misc]
            """Hands tokens out when the accelerator would have them."""

            def execute(self, plan: Any, *args: Any) -> Any:
                num_programs = self.num_programs
                step = execute(self, plan, *args)
                step.ready_s = send(plan, self.num_programs > num_programs)
                step.is_complete = lambda: time.perf_counter() >= step.ready_s
                return step

            def read(self, step: Any) -> Any:
                wait(step.ready_s)
                return read(self, step)

        return PacedRunner

    def _send(self, plan: Any, has_compiled: bool) -> float:
        """When the accelerator will have computed `plan`."""
        now, step_s = time.perf_counter(), 0.0
        if self._holds_prompts or not plan.num_prefill_tokens:
            num_tokens = sum(row.num_tokens for row in plan.rows)
            num_cached = sum(row.context_len + row.num_tokens for row in plan.rows)
            step_s = self._costs.step_s(self._device, num_tokens, num_cached)
        idle_s = max(0.0, now - self._ready_s)
        self._ready_s = max(now, self._ready_s) + (0.0 if self._at_once else plan.num_steps * step_s)
        self._sent = Round(plan.num_decode, plan.num_prefill_tokens, plan.num_steps, plan.num_steps * step_s, idle_s)
        self._sent.has_compiled = has_compiled
        return self._ready_s

    @staticmethod
    def _wait(until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))

    def _note(self, first: int) -> None:
        """Takes down the round whose spans begin at `first`."""
        parts: dict[str, float] = {}
        for name, began, ended in self.spans[first:]:
            parts[name] = parts.get(name, 0.0) + ended - began
        done, self._sent = self._sent, None
        if done is not None:
            done.host_s = parts.pop("step") - parts.pop("wait", 0.0) - parts.pop("note")
            done.parts = parts
            self.rounds.append(done)

    def events(self) -> list[dict[str, Any]]:
        """The spans in the format of Chrome's trace viewer, which Perfetto reads."""
        return [
            {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
            for name, began, ended in self.spans
        ]


def arguments_only(executor: Any, weights: Any, pools: Any, batch: Any, spec: Any) -> tuple[Any, Any, None]:
    """In the place of a model's forward: takes all that it takes, and makes next to nothing of it."""
    import jax
    import jax.numpy as jnp

    touched = sum(jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(weights))
    favourite = (7 * batch.kv_lens + jnp.arange(len(batch.kv_lens))) % VOCAB_SIZE
    return jax.nn.one_hot(favourite, VOCAB_SIZE, dtype=jnp.bfloat16) + 1e-9 * touched, pools, None
