"""Results of a benchmark, as plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from torchax_serve.bench.machine import Machine
from torchax_serve.bench.settings import BenchSettings
from torchax_serve.profiling.bandwidth import Bandwidth


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call of ``generate``, in seconds from the call."""

    ttft_s: float  # until the first new token
    total_s: float  # until it returned


@dataclasses.dataclass(frozen=True)
class CompileCache:
    """Programs that a first call needed, by their source.

    Attributes:
        num_programs: Number of programs requested from XLA.
        num_hits: Number of them read from the persistent compilation cache.
        enabled: Whether there is such a cache.
    """

    num_programs: int
    num_hits: int
    enabled: bool

    @property
    def state(self) -> str:
        """State of the cache: ``off``, ``warm``, ``partly warm``, ``cold``, or ``in memory``.

        The last means that this process had every program.
        """
        if not self.num_programs:
            return "in memory"
        if not self.enabled:
            return "off"
        return "warm" if self.num_hits == self.num_programs else "partly warm" if self.num_hits else "cold"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measurement of one engine at one batch size.

    Attributes:
        engine: Name: ``torchax-serve``, or the peer.
        batch, prompt_len, new_tokens: Sizes of each call.
        first_call_s: Seconds of the first call, which compiles.
        timings: Times of the later calls.
        growth_bytes: by how much memory in use grew at most in the first call: cache, activations, compilation.
        peak_bytes: The same, plus the weights.
        step_bytes: what a decode step must read, on average: weights, and keys and values of the tokens so far; None
            where that is not known.
        bandwidth_bytes_per_s: Highest read rate of the machine in this run.
        compile_cache: None for an engine without one.
    """

    engine: str
    batch: int
    prompt_len: int
    new_tokens: int
    first_call_s: float
    timings: tuple[Timing, ...]
    growth_bytes: int
    peak_bytes: int
    step_bytes: float | None
    bandwidth_bytes_per_s: float
    compile_cache: CompileCache | None

    @property
    def ttft_s(self) -> float:
        """Median time to first token, in seconds."""
        return statistics.median(each.ttft_s for each in self.timings)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of the batch divided by the time to first token."""
        return self.batch * self.prompt_len / self.ttft_s

    @property
    def tpot_s(self) -> float:
        """Median seconds per step after the first token."""
        return statistics.median((each.total_s - each.ttft_s) / (self.new_tokens - 1) for each in self.timings)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first of each row, divided by their time."""
        return self.batch / self.tpot_s

    @property
    def compile_s(self) -> float:
        """Seconds of the first call minus those of a later call."""
        return max(0.0, self.first_call_s - statistics.median(each.total_s for each in self.timings))

    @property
    def mbu(self) -> float | None:
        """Model bandwidth utilisation, a fraction of the measured bandwidth.

        It is what a step must read, over its time. The measure is Databricks' (Agarwal et al., "LLM Inference
        Performance Engineering: Best Practices", 2023).
        """
        return None if self.step_bytes is None else self.step_bytes / self.tpot_s / self.bandwidth_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields and the derived numbers."""
        derived = ("ttft_s", "prefill_tokens_per_s", "tpot_s", "decode_tokens_per_s", "compile_s", "mbu")
        found = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        if self.compile_cache is not None:
            found["compile_cache"]["state"] = self.compile_cache.state
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """Measurements at one batch size: ours, and the peer's if there is one.

    Attributes:
        same_tokens: part of the new tokens, up to the first difference in each row, that both sides agree on. In half
            precision rounding parts them; in float32 it is 1.
    """

    batch: int
    ours: Measurement
    peer: Measurement | None
    same_tokens: float | None

    def ratio(self, name: str) -> float | None:
        """Returns our rate divided by the peer's.

        `name` is ``decode_tokens_per_s`` or ``prefill_tokens_per_s``.
        """
        return None if self.peer is None else getattr(self.ours, name) / getattr(self.peer, name)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and its loading."""

    name: str
    architecture: str
    dtype: str
    num_parameters: int
    weights_bytes: int
    random_weights: bool
    load_s: float
    checkpoint_bytes: int
    load_peak_bytes: int  # growth of the process's resident memory while loading


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Report with everything needed to judge and repeat the measurement."""

    command: str
    machine: Machine
    settings: BenchSettings
    peer: str | None  # description of the peer
    model: ModelFacts
    bandwidth: Bandwidth
    cases: tuple[Case, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON types."""
        found = dataclasses.asdict(self)
        found["machine"]["is_busy"] = self.machine.is_busy
        for case, entry in zip(self.cases, found["cases"], strict=True):
            entry["ours"] = case.ours.as_dict()
            entry["peer"] = None if case.peer is None else case.peer.as_dict()
            for name in ("decode_tokens_per_s", "prefill_tokens_per_s"):
                entry[f"{name}_ratio"] = case.ratio(name)
        return found


def same_part(ours: Any, theirs: Any) -> float:
    """Returns the fraction of int[batch, len] `ours` that equals `theirs`.

    Each row counts up to its first difference.
    """
    equal = (ours == theirs).int().cumprod(1)
    return float(equal.sum()) / math.prod(equal.shape)
