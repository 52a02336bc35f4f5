"""Prometheus metrics, under our names and, if asked for, vLLM's.

Label values come from fixed sets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from torchax_serve.text.text_stream import AnswerStep

if TYPE_CHECKING:
    from torchax_serve.outputs import EngineStats, GroupUsage
    from torchax_serve.server.answers import Answer
    from torchax_serve.server.model_service import ModelService

_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event of a program that XLA has compiled, also one for a small operation next to the steps."""
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class _Compilations:
    """Programs that XLA has compiled since this was made, and the seconds that took."""

    def __init__(self) -> None:
        import jax  # late: metrics are made before anything else of a server

        self.number, self.duration_s = 0, 0.0
        self._monitoring, self._lock = jax.monitoring, threading.Lock()
        self._monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **_kwargs: str | int) -> None:
        if event == _COMPILED:
            with self._lock:
                self.number, self.duration_s = self.number + 1, self.duration_s + duration_secs

    def close(self) -> None:
        """Ends the counting."""
        self._monitoring.unregister_event_duration_listener(self._on_duration)


class Metrics:
    """Counters and histograms of a server.

    Args:
        compat: ``vllm`` for vLLM's metric names next to our own; None for our own only.
        hides_adapters: Returns whether the names of adapters are left out, which who reads metrics may not know.
    """

    def __init__(self, compat: str | None = None, hides_adapters: Callable[[], bool] = lambda: False) -> None:
        self._hides_adapters = hides_adapters
        self.registry = CollectorRegistry()
        self._prefixes = ["torchax_serve_"] + (["vllm:"] if compat == "vllm" else [])
        self._engine: _EngineCollector | None = None
        self._compilations: _Compilations | None = None
        self.requests = Counter(
            "torchax_serve_http_requests_total", "HTTP requests", ["route", "status"], registry=self.registry
        )
        self.request_s = Histogram(
            "torchax_serve_http_request_duration_seconds",
            "Seconds of HTTP requests, up to the last byte sent",
            ["route"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.by_key = Counter("torchax_serve_requests_by_key_total", "HTTP requests", ["key"], registry=self.registry)
        self.errors = Counter("torchax_serve_errors_total", "Answers with an error", ["type"], registry=self.registry)
        lag = "Worst lag of the event loop in the last half second"
        self.loop_lag_s = Gauge("torchax_serve_event_loop_lag_seconds", lag, registry=self.registry)
        self.in_flight = Gauge("torchax_serve_http_in_flight", "HTTP requests in work", registry=self.registry)
        self._ttft = self._histograms("time_to_first_token_seconds", "Seconds to the first token", _LATENCY_S)
        self._itl = self._histograms("inter_token_latency_seconds", "Seconds between tokens", _TOKEN_S)
        self._e2e = self._histograms("e2e_request_latency_seconds", "Seconds to the last token", _LATENCY_S)
        self._queue = self._histograms("request_queue_time_seconds", "Seconds in the queue", _LATENCY_S)
        self._prefill = self._histograms("request_prefill_time_seconds", "Seconds to prefill", _LATENCY_S)
        self._decode = self._histograms("request_decode_time_seconds", "Seconds to decode", _LATENCY_S)
        self._prompt_len = self._histograms("request_prompt_tokens", "Tokens of prompts", _LENGTHS)
        self._answer_len = self._histograms("request_generation_tokens", "Tokens of answers", _LENGTHS)
        self._success = [
            Counter(f"{prefix}request_success_total", "Answers", ["finished_reason"], registry=self.registry)
            for prefix in self._prefixes
        ]

    def _histograms(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        return [
            Histogram(f"{prefix}{name}", text, buckets=buckets, registry=self.registry) for prefix in self._prefixes
        ]

    def watch(self, loaded: Callable[[], Sequence[ModelService]], *, has_several: bool = False) -> None:
        """Adds the counts of the engines of models; those of several have the label ``model_name``."""
        if self._engine is None:
            self._compilations = _Compilations()
            names = self._prefixes, self._compilations, self._hides_adapters
            self._engine = _EngineCollector(loaded, *names, has_several=has_several)
            self.registry.register(self._engine)

    def close(self) -> None:
        """Ends the counting of compilations."""
        if self._compilations is not None:
            self._compilations.close()
            self._compilations = None

    def step(self, answer: Answer, step: AnswerStep) -> None:
        """Records a step of an answer; call it for each, in its order."""
        if answer.first_s is None or answer.last_s is None:
            return
        if answer.num_tokens == len(step.token_ids) and step.token_ids:
            _observe(self._ttft, answer.first_s - answer.submitted_s)
        elif step.token_ids and answer.previous_s is not None:
            _observe(self._itl, (answer.last_s - answer.previous_s) / len(step.token_ids))
        if step.finish_reason is not None:
            _observe(self._e2e, answer.last_s - answer.submitted_s)
            if answer.started_s is not None:
                _observe(self._queue, answer.started_s - answer.submitted_s)
                _observe(self._prefill, answer.first_s - answer.started_s)
            _observe(self._decode, answer.last_s - answer.first_s)
            _observe(self._prompt_len, len(answer.prompt_ids))
            _observe(self._answer_len, answer.num_tokens)
            for counter in self._success:
                counter.labels(step.finish_reason).inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _observe(histograms: Sequence[Histogram], value: float) -> None:
    for histogram in histograms:
        histogram.observe(value)


class _EngineCollector(Collector):
    """Reads the engine's counts when metrics are asked for."""

    def __init__(
        self,
        loaded: Callable[[], Sequence[ModelService]],
        prefixes: Sequence[str],
        compilations: _Compilations,
        hides_adapters: Callable[[], bool],
        *,
        has_several: bool,
    ) -> None:
        self._hides_adapters, self._has_several = hides_adapters, has_several
        self._loaded, self._prefixes, self._compilations = loaded, prefixes, compilations

    def describe(self) -> list[Any]:
        """Returns nothing: the registry need not read the counts to know the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields the counts of now."""
        compiled = {"compilations": self._compilations.number, "compilation_seconds": self._compilations.duration_s}
        for name, value in compiled.items():
            yield CounterMetricFamily(f"torchax_serve_{name}", name.replace("_", " "), value=value)
        services = self._loaded()
        if self._has_several:
            yield GaugeMetricFamily("torchax_serve_loaded_models", "Models that are loaded", value=len(services))
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for service in services:
            if (stats := service.model.stats()) is not None:
                own = {"model_name": service.name} if self._has_several else {}
                self._add_counts(families, stats, own)
                for prefix in self._prefixes:
                    self._add_descriptions(families, prefix, service, stats.scheduler.pages, own)
        yield from families.values()

    def _add_counts(self, families: dict[str, Any], stats: EngineStats, own: dict[str, str]) -> None:
        scheduler = stats.scheduler
        used, total = sum(group.num_used for group in scheduler.pages), sum(g.num_pages for g in scheduler.pages)
        gauges = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": used / max(1, total),
        }
        counters = {
            "prompt_tokens": scheduler.num_prompt_tokens,
            "generation_tokens": scheduler.num_new_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.num_prompt_tokens,
            "prefix_cache_hits": scheduler.num_hit_tokens,
            "spec_decode_num_draft_tokens": scheduler.num_draft_tokens,
            "spec_decode_num_accepted_tokens": scheduler.num_accepted_tokens,
        }
        further = {
            "engine_steps": stats.num_steps,
            "compiled_programs": stats.num_programs,
            "offloaded_kv_pages": sum(group.num_offloaded for group in scheduler.pages),
            "loaded_kv_pages": sum(group.num_loaded for group in scheduler.pages),
            "kv_event_batches": stats.num_event_batches,
            "dropped_kv_event_batches": stats.num_dropped_batches,
        }
        for prefix in self._prefixes:
            for name, value in gauges.items():
                _add(families, GaugeMetricFamily, f"{prefix}{name}", name.replace("_", " "), own, value)
            for name, value in counters.items():
                _add(families, CounterMetricFamily, f"{prefix}{name}", name.replace("_", " "), own, value)
        for name, value in further.items():
            _add(families, CounterMetricFamily, f"torchax_serve_{name}", name.replace("_", " "), own, value)

    def _add_descriptions(
        self,
        families: dict[str, Any],
        prefix: str,
        service: ModelService,
        pages: Sequence[GroupUsage],
        own: dict[str, str],
    ) -> None:
        """Adds what gateways route by: the size of the cache, and the adapters that requests have."""
        sizes: dict[str, int] = {}
        for group in pages:  # of all replicas
            if group.page_size:
                sizes[group.name] = sizes.get(group.name, 0) + group.num_pages
        if sizes:
            largest = max(sizes, key=lambda name: sizes[name])
            page_size = next(group.page_size for group in pages if group.name == largest)
            labels = {**own, "block_size": str(page_size), "num_gpu_blocks": str(sizes[largest])}
            _add(families, GaugeMetricFamily, f"{prefix}cache_config_info", "Pages of the cache", labels, 1)
        # Asked of the class: an attribute that a recorded model has not loads its torch module.
        model = service.model
        limit, names = model.adapters_in_use if hasattr(type(model), "adapters_in_use") else (0, [])
        if limit and not self._hides_adapters():
            in_use = {"running_lora_adapters": ",".join(names), "waiting_lora_adapters": ""}
            labels = {**own, "max_lora": str(limit), **in_use}
            text = "Adapters that requests have"
            _add(families, GaugeMetricFamily, f"{prefix}lora_requests_info", text, labels, time.time())


def _add(families: dict[str, Any], kind: type[Any], name: str, text: str, labels: dict[str, str], value: float) -> None:
    """Adds a value to the family of a metric, which is made with its first one."""
    if name not in families:
        families[name] = kind(name, text, labels=list(labels))
    families[name].add_metric(list(labels.values()), value)
