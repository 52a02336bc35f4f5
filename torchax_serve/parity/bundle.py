"""Compares a bundle's greedy tokens with those of its model in eager PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from model_adapters.loading import load_model
from torchax_serve.export.bundle_model import load_bundle
from torchax_serve.runtime.eager import EagerReference
from torchax_serve.sampling_params import SamplingParams

PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):")
TOKEN_IDS = ((5, 6, 7), (11,) * 20)
"""Prompts of a bundle without a tokenizer."""


@dataclasses.dataclass(frozen=True)
class BundleComparison:
    """Greedy tokens of a bundle and of eager PyTorch.

    Attributes:
        num_tokens: Number of tokens that were compared.
        num_equal: Number of them before the first difference of a prompt.
        gap: Largest difference of the logits of two tokens that differ, in eager PyTorch; 0 if none does.
    """

    num_tokens: int
    num_equal: int
    gap: float


def compare_bundle(folder: Path, model: str, new_tokens: int = 16, **load_options: Any) -> BundleComparison:
    """Returns how far a bundle and its model in eager PyTorch have the same tokens.

    Args:
        folder: The bundle.
        model: Name of the model that it was exported from.
        new_tokens: Tokens of each answer.
        load_options: Further arguments of `load_model`.

    Raises:
        TorchaxServeError: either cannot be loaded.
    """
    with load_bundle(folder) as bundle:
        loaded = load_model(model, dtype=bundle.dtype_name, **load_options)
        eager = EagerReference(loaded).module
        tokenizer = bundle.tokenizer
        prompts = TOKEN_IDS if tokenizer is None else [tokenizer(text)["input_ids"] for text in PROMPTS]
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        found = [each.token_ids for each in bundle.generate_batch([list(prompt) for prompt in prompts], params)]
    num_equal, gap = 0, 0.0
    for prompt, tokens in zip(prompts, found, strict=True):
        equal, apart = _compared(eager, list(prompt), tokens)
        num_equal, gap = num_equal + equal, max(gap, apart)
    return BundleComparison(sum(map(len, found)), num_equal, gap)


@torch.no_grad()
def _compared(eager: torch.nn.Module, prompt: list[int], tokens: list[int]) -> tuple[int, float]:
    """Returns the number of tokens that eager PyTorch has as well, and the gap of logits at the first other one."""
    logits = eager(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for number, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if int(row.argmax()) != token:
            return number, float(row.max() - row[token])
    return len(tokens), 0.0
