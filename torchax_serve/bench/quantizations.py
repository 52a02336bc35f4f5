"""Times one model with its weights stored in several ways, in turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import load_model, require_causal_lm
from model_adapters.quantization.rules import parse_rules
from torchax_serve.bench.compare import BenchRun, Note, check_positions, model_facts, silent
from torchax_serve.bench.machine import Machine
from torchax_serve.bench.report import BenchReport
from torchax_serve.bench.settings import BenchSettings
from torchax_serve.bench.timed_model import Call
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.profiling.bandwidth import measure_bandwidth

DENSE_NAMES = ("bf16", "bfloat16", "none", "dense")
"""Names for weights that are not quantized: they keep the model's dtype, packed where the processor is made for it."""


def _check(quantizations: Sequence[str], settings: BenchSettings) -> None:
    """Raises InvalidArgumentError for a peer, a name twice, or neither a preset nor a file of rules."""
    if settings.against is not None:
        raise InvalidArgumentError("against: expected one quantization with a peer, got several; leave the peer out")
    if len(set(quantizations)) < len(quantizations):
        raise InvalidArgumentError(f"quantization: expected different names, got {','.join(quantizations)}")
    for name in quantizations:
        if name not in DENSE_NAMES:
            parse_rules(name)


def bench_quantizations(
    model: str | os.PathLike[str] | None,
    quantizations: Sequence[str],
    settings: BenchSettings | None = None,
    *,
    random_weights: bool = False,
    command: str | None = None,
    note: Note | None = None,
    **load_options: Any,
) -> dict[str, BenchReport]:
    """Measures `model` once for each way of storing its weights; calls take turns.

    Args:
        model: as for `torchax_serve.serve`; with `random_weights` a configuration.
        quantizations: presets or files of rules, or a name of `DENSE_NAMES`.
        settings: sizes and repeats, without a peer.
        random_weights: make the weights up, from the configuration alone.
        command: command that repeats the measurement, for the report.
        note: called with a line of text before each part.
        load_options: further arguments of `model_adapters.loading.load_model`.

    Returns:
        A report for each of `quantizations`.

    Raises:
        TorchaxServeError: a peer, a name twice, or neither a preset nor a file of rules; the model cannot be loaded.
    """
    settings, say = settings or BenchSettings(), note or silent
    _check(quantizations, settings)  # before the first of them is measured
    has_compile_cache = enable_compile_cache() is not None
    say("measuring the bandwidth of memory")
    machine, bandwidth = Machine.here(), measure_bandwidth()
    runs, facts = {}, {}
    for name in quantizations:
        say(f"loading {name}")
        rules = None if name in DENSE_NAMES else name
        options = {"random_weights": random_weights, "seed": settings.seed, **load_options, "quantization": rules}
        options["requantize"] = rules is not None and options.get("requantize", False)
        loaded = load_model(model, **options)
        require_causal_lm(loaded)
        check_positions(loaded, settings)
        facts[name] = model_facts(loaded, random_weights=random_weights)
        runs[name] = BenchRun(loaded, settings, say, has_compile_cache=has_compile_cache)
    raw = {batch: _calls_in_turns(runs, batch, settings, say) for batch in settings.batches}
    bandwidth = bandwidth.better(measure_bandwidth(bandwidth.buffer_bytes))
    return {
        name: BenchReport(
            command=command or " ".join(sys.orig_argv),
            machine=machine,
            settings=settings,
            peer=None,
            model=facts[name],
            bandwidth=bandwidth,
            cases=tuple(run.case(batch, [raw[batch][name]], bandwidth) for batch in settings.batches),
        )
        for name, run in runs.items()
    }


def _calls_in_turns(runs: dict[str, BenchRun], batch: int, settings: BenchSettings, say: Note) -> dict[str, list[Call]]:
    """Returns the calls of each run: the first, and `settings.repeats` in turns.

    The first call compiles.
    """
    vocab_size = min(run.ours.vocab_size for run in runs.values())
    prompt = np.random.default_rng(settings.seed).integers(0, vocab_size, (batch, settings.prompt_len))
    ids = torch.from_numpy(prompt)
    found = {}
    for name, run in runs.items():
        say(f"batch {batch}: first call of {name}")
        found[name] = [run.ours.first_call(ids, settings.new_tokens)]
        run.count_layers(ids)
    for index in range(settings.repeats):
        say(f"batch {batch}: round {index + 1} of {settings.repeats}")
        for name, run in runs.items():
            found[name].append(run.ours.call(ids, settings.new_tokens))
    return found
