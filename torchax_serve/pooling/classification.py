"""Labels of texts and tokens, and ranking of documents for a query."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.pooling.batching import Text, checked_texts, rows_of, run
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_tokenizer import Row, TextEncoder

HEADS = {
    "classify": "ForSequenceClassification",
    "rerank": "ForSequenceClassification",
    "classify_tokens": "ForTokenClassification",
}
"""Ending of the class of models that have a task."""
_WHAT = {"classify": "classifies texts", "rerank": "scores pairs of texts", "classify_tokens": "classifies tokens"}


@dataclasses.dataclass(frozen=True)
class Classification:
    """Labels of a text.

    Attributes:
        label: Label with the highest score.
        score: Score of that label.
        scores: Scores of all labels.
    """

    label: str
    score: float
    scores: dict[str, float]


@dataclasses.dataclass(frozen=True)
class TokenLabel:
    """Label of a token."""

    token_id: int
    text: str | None  # text of the token; None if token ids were given
    label: str
    score: float


@dataclasses.dataclass(frozen=True)
class RankedDocument:
    """A document with its score for the query, and its index in the caller's list."""

    index: int
    document: str
    score: float


@dataclasses.dataclass(frozen=True)
class TextHead:
    """A model as one that labels texts or tokens.

    Attributes:
        name: Name of the model, for messages.
        class_name: Class of its module, which says what it can do.
        program: Its forwards.
        tokenizer: Of the texts.
        pad_id: Padding token; None if texts are not padded.
        max_len: Most tokens of a text; None for any number.
        labels: Names of the labels by index.
        problem_type: As in the configuration.
        pair_activation: What is applied to the score of a pair, by its name in the model's files.
        lack: What its load report says about a missing head.
    """

    name: str
    class_name: str
    program: TextProgram
    tokenizer: TextEncoder
    pad_id: int | None
    max_len: int | None
    labels: Mapping[int, str]
    problem_type: str | None
    pair_activation: str
    lack: str = ""


def classify(head: TextHead, texts: str | Sequence[Text], *, truncate: bool | int) -> Any:
    """See `torchax_serve.EncoderModel.classify`."""
    requested = checked_texts(texts)
    require(head, "classify")
    rows, _ = rows_of(head.tokenizer, requested, None, max_len=head.max_len, truncate=truncate)
    logits = text_logits(head, rows)
    names = _names(head, logits.shape[-1])
    found = [_classification(names, row) for row in _activated(head, logits)]
    return found[0] if isinstance(texts, str) else found


def classify_tokens(head: TextHead, texts: str | Sequence[Text], *, truncate: bool | int) -> Any:
    """See `torchax_serve.EncoderModel.classify_tokens`."""
    requested = checked_texts(texts)
    require(head, "classify_tokens")
    rows, _ = rows_of(head.tokenizer, requested, None, max_len=head.max_len, truncate=truncate)
    found: list[Any] = [None] * len(rows)
    for batch in run(head.program, rows, head.tokenizer.arguments, pad_id=head.pad_id):
        logits = np.asarray(batch.fields["logits"], np.float32)
        for number, index in enumerate(batch.indices):
            scores = _softmax(logits[number, : len(rows[index]["input_ids"])])
            found[index] = _token_labels(head, requested[index], rows[index], scores)
    return found[0] if isinstance(texts, str) else found


def rerank(
    query: str,
    documents: Sequence[str],
    *,
    top_k: int | None,
    score_pairs: Callable[[Sequence[tuple[str, str]]], np.ndarray],
) -> list[RankedDocument]:
    """Implements `torchax_serve.EncoderModel.rerank` by the scores of `score_pairs`."""
    if not isinstance(query, str) or not query:
        raise InvalidArgumentError(f"query: expected some text, got {query!r}")
    if isinstance(documents, str) or not documents or not all(isinstance(each, str) for each in documents):
        raise InvalidArgumentError(f"documents: expected a list of texts, at least one, got {documents!r}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InvalidArgumentError(f"top_k: expected a positive number or None for all, got {top_k!r}")
    pairs = list(documents)
    scores = score_pairs([(query, document) for document in pairs])
    order = sorted(range(len(pairs)), key=lambda index: -scores[index])
    return [RankedDocument(index, pairs[index], float(scores[index])) for index in order[:top_k]]


def score_pairs(head: TextHead, pairs: Sequence[tuple[str, str]], *, truncate: bool | int | None) -> np.ndarray:
    """Returns the scores float32[num_pairs] of pairs of texts by a cross-encoder.

    Errors are those of `rerank`.
    """
    require(head, "rerank")
    tokenizer, max_len = head.tokenizer, head.max_len
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    rows, cut = rows_of(tokenizer, queries, documents, max_len=max_len, truncate=True if truncate is None else truncate)
    if cut and truncate is None:
        tokenizer.warn_once(
            f"{head.name}: pairs are cut to {max_len} tokens, as by sentence-transformers; {len(cut)} of "
            f"{len(rows)} are longer"
        )
    logits = text_logits(head, rows)
    if logits.shape[-1] != 1:
        raise UnsupportedModelError(
            f"rerank: expected a cross-encoder with one score for a pair, got {head.class_name} "
            f"with {logits.shape[-1]} labels; call classify()"
        )
    return _scores_of_pairs(head, logits[:, 0])


def text_logits(head: TextHead, rows: Sequence[Row]) -> np.ndarray:
    """Returns the logits of texts, float32[num_rows, num_labels]."""
    found: list[Any] = [None] * len(rows)
    for batch in run(head.program, rows, head.tokenizer.arguments, pad_id=head.pad_id):
        logits = np.asarray(batch.fields["logits"], np.float32)
        for number, index in enumerate(batch.indices):
            found[index] = logits[number]
    return np.stack(found)


def require(head: TextHead, task: str) -> None:
    """Raises UnsupportedModelError unless the class of the model has a task."""
    if not head.class_name.endswith(HEADS[task]):
        raise UnsupportedModelError(
            f"{task}: expected a model that {_WHAT[task]} (…{HEADS[task]}), got {head.class_name}{head.lack}"
        )


def _names(head: TextHead, num_labels: int) -> list[str]:
    return [head.labels.get(index, f"LABEL_{index}") for index in range(num_labels)]


def _activated(head: TextHead, logits: np.ndarray) -> np.ndarray:
    """Returns scores as transformers' text-classification pipeline does.

    The activation follows the configuration's ``problem_type``.
    """
    kind = head.problem_type
    if kind == "regression":
        return logits
    if kind == "multi_label_classification" or (kind is None and logits.shape[-1] == 1):
        return _sigmoid(logits)
    return _softmax(logits)


def _scores_of_pairs(head: TextHead, logits: np.ndarray) -> np.ndarray:
    """Returns scores as cross-encoders of sentence-transformers do.

    They are sigmoids, unless the checkpoint turns the activation off.
    """
    kind = head.pair_activation.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(
            f"rerank: expected an activation Sigmoid or Identity in the model's files, got {head.pair_activation}"
        )
    return _sigmoid(logits) if kind == "Sigmoid" else logits


def _softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _classification(names: list[str], scores: np.ndarray) -> Classification:
    best = int(scores.argmax())
    return Classification(names[best], float(scores[best]), dict(zip(names, scores.tolist(), strict=True)))


def _token_labels(head: TextHead, text: Text, row: Row, scores: np.ndarray) -> list[TokenLabel]:
    names = _names(head, scores.shape[-1])
    is_text, ids = isinstance(text, str), row["input_ids"]
    hidden = head.tokenizer.special_ids if is_text else frozenset()
    words = head.tokenizer.tokens_of(ids) if is_text else [None] * len(ids)
    return [
        TokenLabel(token, word, names[int(each.argmax())], float(each.max()))
        for token, word, each in zip(ids, words, scores, strict=True)
        if token not in hidden
    ]
