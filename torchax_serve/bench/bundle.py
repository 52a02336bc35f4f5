"""Times requests on a bundle; imports neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.bench.settings import BenchSettings
from torchax_serve.export.bundle_model import BundleModel, load_bundle
from torchax_serve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class BundleTiming:
    """Rates of requests that are sent at once, medians of several times.

    Attributes:
        batch: Number of requests.
        ttft_s: Seconds until each has a token.
        decode_tokens_per_s: Tokens after the first of each, divided by their time.
    """

    batch: int
    ttft_s: float
    decode_tokens_per_s: float


def bench_bundle(folder: Path, settings: BenchSettings) -> list[BundleTiming]:
    """Measures a bundle's time to first token and tokens/s.

    Requests are greedy, and go on through the end of the sequence.

    Args:
        folder: The bundle.
        settings: Sizes and repeats.

    Raises:
        InvalidArgumentError: more tokens than a request of the bundle may have.
        CheckpointError, UnsupportedModelError: the bundle cannot be loaded.
    """
    with load_bundle(folder) as model:
        if not isinstance(model, BundleModel):
            raise UnsupportedModelError(
                f"{folder}: expected a bundle of a model that writes text, got one of an encoder; measure the model "
                "itself"
            )
        wanted, limit = settings.prompt_len + settings.new_tokens, model.engine.max_model_len
        if wanted > limit:
            raise InvalidArgumentError(
                f"prompt_len + new_tokens: expected at most {limit}, as the bundle was exported with, got {wanted}; "
                "lower them"
            )
        random = np.random.default_rng(settings.seed)
        return [_timing(model, batch, settings, random) for batch in settings.batches]


def _timing(model: BundleModel, batch: int, settings: BenchSettings, random: np.random.Generator) -> BundleTiming:
    params = SamplingParams(max_new_tokens=settings.new_tokens, temperature=0, ignore_eos=True)
    firsts, rates = [], []
    for call in range(settings.repeats + 1):
        # Other tokens each time: a prefix that is in the cache would not be computed.
        prompts = random.integers(0, model.engine.vocab_size, (batch, settings.prompt_len)).tolist()
        began = time.perf_counter()
        streams = [model.iter_tokens(prompt, params=params) for prompt in prompts]
        for stream in streams:
            next(stream)
        first = time.perf_counter()
        for stream in streams:
            for _ in stream:
                pass
        end = time.perf_counter()
        if call:  # the first one compiles
            firsts.append(first - began)
            rates.append(batch * (settings.new_tokens - 1) / (end - first))
    return BundleTiming(batch, statistics.median(firsts), statistics.median(rates))
