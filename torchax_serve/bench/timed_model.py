"""Times ``generate`` of one side of a benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from model_adapters.loading.memory import PeakMemory, give_back_freed
from model_adapters.program.call_signature import cache_in
from torchax_serve.bench.report import CompileCache, Timing


class Memory(Protocol):
    """Measures memory during a call."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that receives, on exit, the largest growth of memory in use, in bytes."""
        ...


class JaxMemory:
    """Measures the memory of the process on a CPU, else that of JAX's device."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that receives, on exit, the largest growth of memory in use, in bytes."""
        found: list[int] = []
        device = jax.devices()[0]
        if device.platform == "cpu":
            give_back_freed()
            _reset_high_water()
            peak = PeakMemory()
            yield found
            found.append(peak.growth_bytes)
        else:
            # The runtime's peak is that of the process so far: larger batches have to come later.
            before = (device.memory_stats() or {}).get("bytes_in_use", 0)
            yield found
            found.append(max(0, (device.memory_stats() or {}).get("peak_bytes_in_use", 0) - before))


class TorchMemory:
    """Measures torch's allocator on a GPU."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that receives, on exit, the largest growth of memory in use, in bytes."""
        found: list[int] = []
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.append(torch.cuda.max_memory_allocated() - before)


def _reset_high_water() -> None:
    """Resets the high-water mark of resident memory to its current value.

    This works on Linux only (proc(5), clear_refs).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@dataclasses.dataclass(frozen=True)
class Call:
    """Measurements of one call of ``generate``."""

    timing: Timing
    tokens: torch.Tensor  # int64[batch, new_tokens]
    growth_bytes: int = 0
    compile_cache: CompileCache | None = None


class TimedModel:
    """Transformers model, on JAX or not, that decodes greedily without end-of-text.

    Args:
        name: Short name, for tables.
        description: Description of the model.
        model: Object whose ``generate`` is called.
        memory: Measures its memory.
        has_compile_cache: Whether JAX's compiled programs are stored on disk; None for an engine without JAX.
        options: Further arguments of ``generate``.
    """

    def __init__(
        self,
        name: str,
        description: str,
        model: Any,
        memory: Memory,
        *,
        has_compile_cache: bool | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.description = name, description
        self._model, self._memory, self._options = model, memory, options or {}
        self._has_compile_cache = has_compile_cache
        model.generation_config = GenerationConfig(do_sample=False)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def call(self, ids: torch.Tensor, new_tokens: int) -> Call:
        """Generates `new_tokens` after `ids` int64[batch, prompt_len]."""
        clock = _Clock()
        start = time.perf_counter()
        output = self._generate(ids, new_tokens, streamer=clock)
        end = time.perf_counter()
        return Call(Timing(clock.first_s - start, end - start), output[:, ids.shape[1] :].cpu())

    def first_call(self, ids: torch.Tensor, new_tokens: int) -> Call:
        """Runs `call`, and also measures memory and counts compiled programs."""
        with self._memory.growth() as growth, count_programs() as programs:
            call = self.call(ids, new_tokens)
        enabled = self._has_compile_cache
        cache = None if enabled is None else CompileCache(programs[0], programs[1], enabled)
        return dataclasses.replace(call, growth_bytes=growth[0], compile_cache=cache)

    def final_cache(self, ids: torch.Tensor, new_tokens: int) -> Any:
        """Returns the transformers cache after `call`."""
        return cache_in(self._generate(ids, new_tokens, return_dict_in_generate=True))

    def _generate(self, ids: torch.Tensor, new_tokens: int, **kwargs: Any) -> Any:
        ids = ids.to(self._model.device)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            # that of the class: a repository's own ``generate`` is set on the object, and may return anything
            return type(self._model).generate(
                self._model, ids, attention_mask=mask, max_new_tokens=new_tokens, **self._options, **kwargs
            )


class _Clock(BaseStreamer):
    """Streamer that records when the first new token arrives, which follows the prompt."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.first_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def count_programs() -> Iterator[list[int]]:
    """Yields a list for the numbers of programs requested from XLA and read from the cache.

    The list is filled on exit.
    """
    found = [0, 0]

    def on_duration(event: str, duration_secs: float, **metadata: Any) -> None:
        found[0] += event == "/jax/core/compile/backend_compile_duration"

    def on_event(event: str, **metadata: Any) -> None:
        found[1] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        jax.monitoring.unregister_event_listener(on_event)
