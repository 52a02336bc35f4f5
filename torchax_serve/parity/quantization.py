"""Measurement of what quantization costs.

Next-token distributions of a quantized model are compared with those of the dense one.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel, load_model, require_causal_lm
from model_adapters.ops.compressed_weight import Stored, unpacked
from model_adapters.program.position_limits import max_positions
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.generation.jax_model import run_on_jax
from torchax_serve.runtime.model_runtime import ModelRuntime

WINDOW = 256
"""Tokens of a forward: the logits of one window are held at a time."""
MAX_TOKENS = 4096
"""Tokens of a text that are read."""
TEXT = Path(__file__).parent / "quality_text.txt"
"""English prose of some 800 tokens, for a measurement without a file."""


@dataclasses.dataclass(frozen=True)
class QuantizationQuality:
    """Result of `measure_quality`.

    Attributes:
        model, architecture, dtype, device: Model that ran, and the device of JAX.
        quantization: Which weights have how many bits.
        text: Source of the text.
        num_tokens: Number of tokens that were predicted.
        dense_perplexity, perplexity: Of the text, without and with quantization.
        dense_bytes, num_bytes: Of the weights.
        mean_kl: Mean KL divergence of the quantized model's distribution from the dense one's, in nats.
        kl_99: The divergence that 99 % of the tokens stay below.
        same_top: Share of tokens for which both give the same token the highest probability.
        max_kl: Largest `mean_kl` that passes; None passes all.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    quantization: str
    text: str
    num_tokens: int
    dense_perplexity: float
    perplexity: float
    dense_bytes: int
    num_bytes: int
    mean_kl: float
    kl_99: float
    same_top: float
    max_kl: float | None

    @property
    def passed(self) -> bool:
        """Whether `mean_kl` is a number within `max_kl`."""
        return math.isfinite(self.mean_kl) and (self.max_kl is None or self.mean_kl <= self.max_kl)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON types; what is not finite is a string."""
        fields = dataclasses.asdict(self) | {"passed": self.passed}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }


def measure_quality(
    model: str | os.PathLike[str] | None = None,
    *,
    quantization: Any = None,
    text: str | os.PathLike[str] | None = None,
    max_kl: float | None = None,
    random_weights: bool = False,
    **load_options: Any,
) -> QuantizationQuality:
    """Compares next-token distributions of a model with and without quantized weights.

    Both sides run over the same text.

    Args:
        model: as for `torchax_serve.serve`.
        quantization: preset, file or rules; None compares a quantized checkpoint with its own weights made dense.
        text: file of UTF-8 text; None is a text of ours, or random ids for a model without a tokenizer.
        max_kl: largest mean divergence that passes, in nats.
        random_weights: make the weights up, from the configuration alone.
        load_options: further arguments of `model_adapters.loading.load_model`.

    Raises:
        InvalidArgumentError: a text that cannot be read or is too short; no quantization.
        UnsupportedModelError: not a causal language model.
        TorchaxServeError: the model cannot be loaded.
    """
    if max_kl is not None and not max_kl >= 0:
        raise InvalidArgumentError(f"max_kl: expected a number from 0 up, got {max_kl}")
    enable_compile_cache()
    load_options["random_weights"] = random_weights
    quantized = load_model(model, quantization=quantization, **load_options)
    require_causal_lm(quantized)
    if quantized.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{quantized.source.name} has an encoder; the comparison is of a single stack")
    if not any(isinstance(weight, Stored) for weight in quantized.weights.values()):
        raise InvalidArgumentError("quantization: expected a preset, a file or rules, got none; choose int8 or int4")
    ids = _token_ids(quantized, text)
    dense = (
        _made_dense(quantized) if quantization is None else load_model(model, **{**load_options, "requantize": False})
    )
    pairs = zip(_log_probabilities(dense, ids), _log_probabilities(quantized, ids), strict=True)
    parts = [_compare(*pair, window[1:]) for pair, window in zip(pairs, _windows(ids, dense), strict=True)]
    losses, theirs, divergences, same = (torch.cat([part[i] for part in parts]) for i in range(4))
    return QuantizationQuality(
        model=quantized.source.name,
        architecture=type(quantized.module).__name__,
        dtype=str(quantized.dtype),
        device=jax.devices()[0].device_kind,
        quantization=quantized.report.quantization,
        text=_text_name(quantized, text),
        num_tokens=len(losses),
        dense_perplexity=losses.mean().exp().item(),
        perplexity=theirs.mean().exp().item(),
        dense_bytes=dense.report.weights_bytes,
        num_bytes=quantized.report.weights_bytes,
        mean_kl=divergences.mean().item(),
        kl_99=divergences.quantile(0.99).item(),
        same_top=same.double().mean().item(),
        max_kl=max_kl,
    )


def _made_dense(loaded: LoadedModel) -> LoadedModel:
    """Returns the model with its weights as dense arrays."""
    arrays = {id(weight): unpacked(weight) for weight in loaded.weights.values()}
    weights = {name: arrays[id(weight)] for name, weight in loaded.weights.items()}
    num_bytes = sum(array.nbytes for array in arrays.values())
    report = dataclasses.replace(loaded.report, weights_bytes=num_bytes, quantization="")
    return dataclasses.replace(loaded, weights=dict(weights), report=report)


def _text_name(loaded: LoadedModel, text: str | os.PathLike[str] | None) -> str:
    if text is not None:
        return str(text)
    return "random ids" if loaded.tokenizer() is None else "a text of this package"


def _token_ids(loaded: LoadedModel, text: str | os.PathLike[str] | None) -> torch.Tensor:
    """Returns int64[len], at most `MAX_TOKENS`.

    Raises:
        InvalidArgumentError: the file is no text, the model has no tokenizer for it, or there are too few tokens.
    """
    tokenizer = loaded.tokenizer()
    if tokenizer is None:
        if text is not None:
            raise InvalidArgumentError(f"{loaded.source.name} has no tokenizer for a text; leave it out")
        embedding: Any = loaded.module.get_input_embeddings()
        ids = np.random.default_rng(0).integers(0, embedding.num_embeddings, 2 * WINDOW)
        return torch.from_numpy(ids)
    file = TEXT if text is None else Path(text)
    try:
        words = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is no UTF-8"
        raise InvalidArgumentError(f"text: expected a file of UTF-8 text, got {file} ({said})") from error
    tokens = torch.tensor(tokenizer(words, verbose=False)["input_ids"][:MAX_TOKENS], dtype=torch.long)
    if len(tokens) < 2:
        raise InvalidArgumentError(f"text: expected at least 2 tokens, got {len(tokens)} in {file}; give a longer text")
    return tokens


def _windows(ids: torch.Tensor, loaded: LoadedModel) -> list[torch.Tensor]:
    """Returns parts of `ids`, each of two tokens or more and as long as the model has positions."""
    length = min(WINDOW, max_positions(loaded.config.get_text_config()) or WINDOW)
    return [part for part in ids.split(length) if len(part) > 1]


@torch.no_grad()
def _log_probabilities(loaded: LoadedModel, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields log-probabilities float32[len - 1, vocab] of the next token, window by window."""
    module, eager_class = loaded.module, type(loaded.module)
    model = run_on_jax(module, ModelRuntime(module, loaded.weights))
    try:
        for window in _windows(ids, loaded):
            logits = model(input_ids=window[None], use_cache=False, return_dict=True).logits
            yield torch.log_softmax(logits[0, :-1].float(), -1)
    finally:
        module.__class__ = eager_class
        vars(module).pop("_jax_runtime", None)


def _compare(dense: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns, for each token, both losses, the divergence, and whether the top token agrees."""
    losses = (-side.gather(1, targets[:, None])[:, 0].double() for side in (dense, quantized))
    divergence = (dense.exp() * (dense - quantized)).sum(-1).double()
    return *losses, divergence, dense.argmax(-1) == quantized.argmax(-1)
