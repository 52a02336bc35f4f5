"""Tiny random models for the engine, and what eager transformers makes of a prompt alone."""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from tiny_models import VOCAB_SIZE, tiny_model

__all__ = ["VOCAB_SIZE", "expected_tokens", "tiny_model"]


@functools.cache
def _eager(name):
    return tiny_model(name)


@functools.cache
def _expected(name, prompt, max_new_tokens):
    ids = torch.tensor([prompt])
    output = _eager(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return tuple(output[0, len(prompt) :].tolist())


def expected_tokens(name, prompt, max_new_tokens):
    """New token ids of greedy decoding by eager transformers in float32."""
    return list(_expected(name, tuple(prompt), max_new_tokens))
