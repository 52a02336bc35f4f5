"""Answers that a model marks in a text (extractive question answering)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.tasks.batches import run_batches
from torchax_serve.tasks.results import MarkedAnswer

PADDED_TO = 32
"""Tokens between two lengths of windows."""


def marked_answers(
    forward: Callable[[dict[str, Any]], Any],
    tokenizer: Any,
    question: str,
    context: str,
    *,
    top_k: int,
    max_answer_len: int,
    max_len: int | None,
    can_pad: bool,
) -> list[MarkedAnswer]:
    """Returns the best answers to a question in a text, the best first.

    A text that is longer than the model's positions is read in windows that overlap by a quarter, whose scores are
    compared as they are.

    Args:
        forward: Of the model; returns ``start_logits`` and ``end_logits``.
        tokenizer: Fast tokenizer of the model.
        question: The question.
        context: The text.
        top_k: Most answers.
        max_answer_len: Most tokens of an answer.
        max_len: Most tokens of question and text; None for any number.
        can_pad: Whether padding changes no result.

    Raises:
        InvalidArgumentError: the question leaves no room for the text.
        UnsupportedModelError: the tokenizer does not say where tokens are in a text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            "answer: expected a fast tokenizer, which says where tokens are in a text, got another; convert it"
        )
    encoded, inputs = _windows(tokenizer, question, context, max_len=max_len, can_pad=can_pad)
    found: list[MarkedAnswer] = []
    for encoding, output in zip(encoded.encodings, run_batches(inputs, forward), strict=True):
        in_context = np.array([each == 1 for each in encoding.sequence_ids])
        begin, end = (
            _softmax(output[name][0][: len(in_context)].float().numpy(), in_context)
            for name in ("start_logits", "end_logits")
        )
        pairs = np.triu(np.outer(begin, end))
        pairs -= np.triu(pairs, max_answer_len)
        best = heapq.nlargest(top_k, np.ndindex(pairs.shape), key=lambda pair: pairs[pair])
        for first, last in best:
            if pairs[first, last] > 0:
                start, stop = encoding.offsets[first][0], encoding.offsets[last][1]
                found.append(MarkedAnswer(context[start:stop], float(pairs[first, last]), start, stop))
    return sorted(found, key=lambda each: -each.score)[:top_k]


def _windows(
    tokenizer: Any, question: str, context: str, *, max_len: int | None, can_pad: bool
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Returns the encoded question and text, and the inputs of each window, int64[1, tokens].

    Raises:
        InvalidArgumentError: the question leaves no room for the text.
    """
    cut: dict[str, Any] = {}
    if max_len is not None:
        num_of_question = len(tokenizer(question, "")["input_ids"])
        if num_of_question + 8 > max_len:
            raise InvalidArgumentError(
                f"question: expected at most {max_len - 8} tokens, got {num_of_question}; shorten it"
            )
        room = max_len - num_of_question
        cut = {"truncation": "only_second", "max_length": max_len, "stride": min(128, room // 4)}
        cut["return_overflowing_tokens"] = True
    padded = {"padding": "longest", "pad_to_multiple_of": PADDED_TO} if can_pad else {}
    encoded = tokenizer(question, context, return_offsets_mapping=True, **cut)
    kept = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoded]
    inputs = []
    for index in range(len(encoded.encodings)):
        row = {name: (encoded[name][index] if cut else encoded[name]) for name in kept}
        inputs.append(dict(tokenizer.pad([row], return_tensors="pt", **padded)))
    return encoded, inputs


def _softmax(logits: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """Returns probabilities of the kept positions; the others have 0."""
    weights = np.where(is_kept, np.exp(logits - logits[is_kept].max()), 0.0)
    return np.asarray(weights / weights.sum())


def forward_of_module(module: Any) -> Callable[[dict[str, Any]], Any]:
    """Returns the forward of a module, without gradients."""

    def forward(batch: dict[str, Any]) -> Any:
        with torch.no_grad():
            return module(**batch)

    return forward
