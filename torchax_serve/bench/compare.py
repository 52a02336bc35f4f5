"""Times ``generate`` on JAX and on a peer, alternating."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import LoadedModel, load_model, require_causal_lm
from model_adapters.loading.compress_weights import prepare_weights
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.program.position_limits import max_positions
from torchax_serve.bench.machine import Machine
from torchax_serve.bench.memory_traffic import CacheLayer, cache_layers, step_bytes, weight_bytes_per_step
from torchax_serve.bench.report import BenchReport, Case, Measurement, ModelFacts, same_part
from torchax_serve.bench.settings import BenchSettings
from torchax_serve.bench.timed_model import Call, JaxMemory, TimedModel, TorchMemory
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.profiling.bandwidth import Bandwidth, measure_bandwidth, num_cores
from torchax_serve.runtime.eager import EagerReference

Note = Callable[[str], None]
OURS = "torchax-serve"


def bench(
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    settings: BenchSettings | None = None,
    *,
    dtype: str = "auto",
    random_weights: bool = False,
    command: str | None = None,
    note: Note | None = None,
    **load_options: Any,
) -> BenchReport:
    """Measures time to first token, rates, memory and traffic of greedy decoding.

    No sequence ends before its length: end-of-text is off. After a first call of each side, which compiles, calls of
    both sides take turns, so that whatever else the machine does meets both alike. The peer computes with the very
    weights that JAX has.

    Args:
        model: as for `torchax_serve.serve`; with `random_weights` a configuration.
        settings: Sizes, repeats and peer.
        dtype: Dtype of weights and computation.
        random_weights: make the weights up, from the configuration alone.
        command: Command that repeats the measurement, for the report.
        note: Called with a line of text before each part.
        load_options: further arguments of `model_adapters.loading.load_model`.

    Raises:
        InvalidArgumentError: more tokens than the model has positions, or a peer that cannot run here.
        UnsupportedModelError: not a causal language model.
        TorchaxServeError: The model cannot be loaded.
    """
    settings, say = settings or BenchSettings(), note or silent
    has_compile_cache = enable_compile_cache() is not None
    say("measuring the bandwidth of memory")
    machine = Machine.here()
    bandwidth = measure_bandwidth()
    say("loading")
    loaded = load_model(model, dtype=dtype, random_weights=random_weights, seed=settings.seed, **load_options)
    require_causal_lm(loaded)
    check_positions(loaded, settings)
    run = BenchRun(loaded, settings, say, has_compile_cache=has_compile_cache)
    raw = [run.calls(batch) for batch in settings.batches]
    run.check_untouched()
    bandwidth = bandwidth.better(measure_bandwidth(bandwidth.buffer_bytes))
    return BenchReport(
        command=command or " ".join(sys.orig_argv),
        machine=machine,
        settings=settings,
        peer=None if run.peer is None else run.peer.description,
        model=model_facts(loaded, random_weights=random_weights),
        bandwidth=bandwidth,
        cases=tuple(run.case(batch, sides, bandwidth) for batch, sides in zip(settings.batches, raw, strict=True)),
    )


def silent(text: str) -> None:
    """Ignores the text."""


def check_positions(loaded: LoadedModel, settings: BenchSettings) -> None:
    """Raises InvalidArgumentError for more tokens than the model has positions."""
    limit = max_positions(loaded.config.get_text_config())
    wanted = settings.prompt_len + settings.new_tokens
    if limit is not None and wanted > limit:
        raise InvalidArgumentError(
            f"prompt_len + new_tokens is {wanted}, expected at most {limit}, the positions of {loaded.source.name}"
        )


def model_facts(loaded: LoadedModel, *, random_weights: bool) -> ModelFacts:
    """Returns what a report says about the model."""
    parameters = dict(loaded.module.named_parameters(remove_duplicate=True))
    return ModelFacts(
        name=loaded.source.name,
        architecture=type(loaded.module).__name__,
        dtype=str(loaded.dtype),
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        weights_bytes=loaded.report.weights_bytes,
        random_weights=random_weights,
        load_s=loaded.report.load_s,
        checkpoint_bytes=loaded.report.checkpoint_bytes,
        load_peak_bytes=loaded.report.peak_host_bytes,
    )


class BenchRun:
    """A loaded model, and the peer it is compared with."""

    def __init__(self, loaded: LoadedModel, settings: BenchSettings, say: Note, *, has_compile_cache: bool) -> None:
        self._loaded, self._settings, self._say = loaded, settings, say
        self._reference: EagerReference | None = None
        self.peer: TimedModel | None = None
        if settings.against == "hf":
            self._reference = EagerReference(loaded)
            self.peer = _hf(self._reference.module)
        self._weights = {"hf": _dense(loaded.weights) if self._reference is not None else {}, OURS: loaded.weights}
        prepare_weights(loaded)
        self._served = ServedModel(loaded)
        runtime: Any = self._served.torch_model._jax_runtime
        self._has_cache = runtime.cache_support.is_supported
        self.ours = TimedModel(
            OURS, "this project", self._served.torch_model, JaxMemory(), has_compile_cache=has_compile_cache
        )
        self._layers: tuple[CacheLayer, ...] | None = None

    def check_untouched(self) -> None:
        """Raises if the weights have changed; see `EagerReference.check_untouched`."""
        if self._reference is not None:
            self._reference.check_untouched()

    def calls(self, batch: int) -> list[list[Call]]:
        """Runs the calls of both sides, alternating; returns them by side."""
        settings = self._settings
        vocab_size = self.ours.vocab_size
        prompt = np.random.default_rng(settings.seed).integers(0, vocab_size, (batch, settings.prompt_len))
        ids = torch.from_numpy(prompt)
        engines = [self.ours] if self.peer is None else [self.ours, self.peer]
        found: list[list[Call]] = []
        for engine in engines:
            self._say(f"batch {batch}: first call of {engine.name}")
            found.append([engine.first_call(ids, settings.new_tokens)])
        self.count_layers(ids)
        for index in range(settings.repeats):
            self._say(f"batch {batch}: round {index + 1} of {settings.repeats}")
            for engine, calls in zip(engines, found, strict=True):
                calls.append(engine.call(ids, settings.new_tokens))
        return found

    def count_layers(self, ids: torch.Tensor) -> None:
        """Finds out which layers have a cache, by a call on ``ids[batch, len]``, once."""
        if self._layers is None and self._has_cache:
            cache = self.ours.final_cache(ids, self._settings.new_tokens)
            self._layers = cache_layers(cache, self._settings.prompt_len + self._settings.new_tokens - 1)

    def case(self, batch: int, sides: list[list[Call]], bandwidth: Bandwidth) -> Case:
        """Summarizes the calls of one batch size."""
        ours = self._measurement(self.ours, batch, sides[0], bandwidth)
        if self.peer is None:
            return Case(batch, ours, None, None)
        peer = self._measurement(self.peer, batch, sides[1], bandwidth)
        return Case(batch, ours, peer, same_part(sides[0][0].tokens, sides[1][0].tokens))

    def _measurement(self, engine: TimedModel, batch: int, calls: list[Call], bandwidth: Bandwidth) -> Measurement:
        settings, first = self._settings, calls[0]
        memory_traffic = None
        if self._layers is not None:
            weights = weight_bytes_per_step(self._loaded.module, self._weights[engine.name], batch)
            memory_traffic = step_bytes(
                weights, self._layers, batch=batch, prompt_len=settings.prompt_len, new_tokens=settings.new_tokens
            )
        return Measurement(
            engine=engine.name,
            batch=batch,
            prompt_len=settings.prompt_len,
            new_tokens=settings.new_tokens,
            first_call_s=first.timing.total_s,
            timings=tuple(call.timing for call in calls[1:]),
            growth_bytes=first.growth_bytes,
            peak_bytes=first.growth_bytes + self._loaded.report.weights_bytes,
            step_bytes=memory_traffic,
            bandwidth_bytes_per_s=bandwidth.bytes_per_s,
            compile_cache=first.compile_cache,
        )


def _dense(weights: Weights) -> dict[str, Any]:
    """Returns `weights` with dense-sized arrays, without memory, in place of quantized ones."""
    sizes = {id(each): np.broadcast_to(np.empty((), each.dtype), each.shape) for each in weights.values()}
    return {name: sizes[id(each)] if isinstance(each, QuantizedWeight) else each for name, each in weights.items()}


def _hf(module: PreTrainedModel) -> TimedModel:
    """Returns transformers' ``generate``, prepared for the device.

    It is eager on a CPU; on a GPU it has its static cache and ``torch.compile``.
    """
    platform = jax.default_backend()
    if platform == "cpu":
        torch.set_num_threads(num_cores())
        words = f"transformers generate, eager PyTorch in {num_cores()} threads, {module.config._attn_implementation}"
        return TimedModel("hf", words, module, JaxMemory())
    if platform != "gpu" or not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"against='hf' needs a torch for the device that JAX has ({jax.devices()[0].device_kind}); "
            "install torch with CUDA, or leave the peer out"
        )
    words = f"transformers generate, static cache, torch.compile, {module.config._attn_implementation}"
    on_gpu: Any = module.to("cuda")  # type: ignore[arg-type]
    return TimedModel("hf", words, on_gpu, TorchMemory(), options={"cache_implementation": "static"})
