"""One side of a benchmark: a model whose ``generate`` is called and timed."""

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
    """Watches memory over one call."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that holds, once closed, by how many bytes memory in use grew at most."""
        ...


class JaxMemory:
    """Of the process on a CPU, else of the device that JAX has."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that holds, once closed, by how many bytes memory in use grew at most."""
        found: list[int] = []
        device = jax.devices()[0]
        if device.platform == "cpu":
            give_back_freed()
            _forget_high_water()
            peak = PeakMemory()
            yield found
            found.append(peak.growth_bytes)
        else:
            # The runtime's peak is that of the whole process: larger batches have to come later.
            before = (device.memory_stats() or {}).get("bytes_in_use", 0)
            yield found
            found.append(max(0, (device.memory_stats() or {}).get("peak_bytes_in_use", 0) - before))


class TorchMemory:
    """Of torch's allocator on a GPU."""

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[int]]:
        """Yields a list that holds, once closed, by how many bytes memory in use grew at most."""
        found: list[int] = []
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.append(torch.cuda.max_memory_allocated() - before)


def _forget_high_water() -> None:
    """Sets the high-water mark of resident memory back to what is resident now (Linux, proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call of ``generate`` showed."""

    timing: Timing
    tokens: torch.Tensor  # int64[batch, new_tokens]
    growth_bytes: int = 0
    compile_cache: CompileCache | None = None


class TimedModel:
    """A transformers model object, on JAX or not; its generation settings are set to greedy without an end.

    Args:
        name: short, for tables.
        description: what it is, in words.
        model: the object whose ``generate`` is called.
        memory: how to see what it uses.
        has_compile_cache: whether programs that JAX compiles are kept; None for an engine without JAX.
        options: further arguments of ``generate``.
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
        """Rows of the embedding."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def call(self, ids: torch.Tensor, new_tokens: int) -> Call:
        """Generates `new_tokens` behind `ids` int64[batch, prompt_len]."""
        clock = _Clock()
        start = time.perf_counter()
        output = self._generate(ids, new_tokens, streamer=clock)
        end = time.perf_counter()
        return Call(Timing(clock.first_s - start, end - start), output[:, ids.shape[1] :].cpu())

    def first_call(self, ids: torch.Tensor, new_tokens: int) -> Call:
        """As `call`, with a look at memory and at what was compiled."""
        with self._memory.growth() as growth, count_programs() as programs:
            call = self.call(ids, new_tokens)
        enabled = self._has_compile_cache
        cache = None if enabled is None else CompileCache(programs[0], programs[1], enabled)
        return dataclasses.replace(call, growth_bytes=growth[0], compile_cache=cache)

    def final_cache(self, ids: torch.Tensor, new_tokens: int) -> Any:
        """The transformers cache that `call` leaves."""
        return cache_in(self._generate(ids, new_tokens, return_dict_in_generate=True))

    def _generate(self, ids: torch.Tensor, new_tokens: int, **kwargs: Any) -> Any:
        ids = ids.to(self._model.device)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            # of the class: a repository's own, which lies on the object, may do and return anything
            return type(self._model).generate(
                self._model, ids, attention_mask=mask, max_new_tokens=new_tokens, **self._options, **kwargs
            )


class _Clock(BaseStreamer):
    """Notes when the first new token is handed out; the prompt comes before it."""

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
    """Yields a list that holds, once closed, how many programs XLA was asked for and how many came from the cache."""
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
