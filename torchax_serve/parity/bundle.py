"""Compares a bundle's greedy tokens with those of its model in eager PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_adapters.loading import load_model
from torchax_serve.export.bundle_encoder import BundleEncoder
from torchax_serve.export.bundle_model import BundleModel, load_bundle
from torchax_serve.export.layout import TEXTS
from torchax_serve.pooling.batching import rows_of, run
from torchax_serve.pooling.embedding import HIDDEN
from torchax_serve.pooling.module_texts import part_of
from torchax_serve.runtime.eager import EagerReference
from torchax_serve.runtime.model_runtime import ModelRuntime
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
        assert isinstance(bundle, BundleModel)
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


@dataclasses.dataclass(frozen=True)
class TextComparison:
    """Outputs of a bundle that reads texts, and of eager PyTorch.

    Attributes:
        field: What was compared: hidden states or logits.
        num_texts: Number of texts.
        difference: Largest difference, relative to the largest value.
    """

    field: str
    num_texts: int
    difference: float


@torch.no_grad()
def compare_texts(folder: Path, model: str, **load_options: Any) -> TextComparison:
    """Returns how far outputs of an encoder's bundle are from eager PyTorch's.

    Args:
        folder: The bundle.
        model: Name of the model that it was exported from.
        load_options: Further arguments of `load_model`.

    Raises:
        TorchaxServeError: either cannot be loaded.
    """
    with load_bundle(folder) as bundle:
        assert isinstance(bundle, BundleEncoder)
        loaded = load_model(model, dtype=bundle.dtype_name, **load_options)
        runtime = ModelRuntime(loaded.module, loaded.weights)
        field = bundle.manifest[TEXTS]["field"]
        part = part_of(runtime) if field == HIDDEN else ""
        eager = EagerReference(loaded).module.get_submodule(part)
        head = bundle._head()
        texts = TOKEN_IDS if bundle.tokenizer is None else PROMPTS
        rows, _ = rows_of(head.tokenizer, texts, None, max_len=head.max_len, truncate=True)
        differences = []
        for batch in run(head.program, rows, head.tokenizer.arguments, pad_id=head.pad_id):
            found = np.asarray(batch.fields[field], np.float32)
            for number, index in enumerate(batch.indices):
                given = {name: torch.tensor([values]) for name, values in rows[index].items()}
                wanted = eager(**given)[field][0].float().numpy()
                got = found[number][: len(wanted)] if field == HIDDEN else found[number]
                differences.append(float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max())))
    return TextComparison(field, len(rows), max(differences))


@torch.no_grad()
def _compared(eager: torch.nn.Module, prompt: list[int], tokens: list[int]) -> tuple[int, float]:
    """Returns the number of eager PyTorch's tokens matched, and the first gap of logits."""
    logits = eager(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for number, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if int(row.argmax()) != token:
            return number, float(row.max() - row[token])
    return len(tokens), 0.0
