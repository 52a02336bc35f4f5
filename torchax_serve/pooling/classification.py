"""Labels of texts and tokens, and ranking of documents for a query."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from torchax_serve.pooling.batching import Text, checked_texts, limit_of, rows_of, run
from torchax_serve.pooling.embedding import pad_id_of
from torchax_serve.pooling.text_rule import read_json
from torchax_serve.pooling.text_tokenizer import Row, TextTokenizer
from torchax_serve.runtime.model_runtime import ModelRuntime


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


def classify(loaded: LoadedModel, runtime: ModelRuntime, texts: str | Sequence[Text], *, truncate: bool) -> Any:
    """See `torchax_serve.EncoderModel.classify`."""
    requested = checked_texts(texts)
    _require(loaded, runtime, "ForSequenceClassification", "classify", "classifies texts")
    rows, _ = rows_of(tokenizer_of(loaded), requested, None, max_len=limit_of(loaded, runtime), truncate=truncate)
    logits = text_logits(loaded, runtime, rows)
    names = _names(runtime, logits.shape[-1])
    found = [_classification(names, row) for row in _activated(runtime, logits)]
    return found[0] if isinstance(texts, str) else found


def classify_tokens(loaded: LoadedModel, runtime: ModelRuntime, texts: str | Sequence[Text], *, truncate: bool) -> Any:
    """See `torchax_serve.EncoderModel.classify_tokens`."""
    requested = checked_texts(texts)
    _require(loaded, runtime, "ForTokenClassification", "classify_tokens", "classifies tokens")
    tokenizer = tokenizer_of(loaded)
    rows, _ = rows_of(tokenizer, requested, None, max_len=limit_of(loaded, runtime), truncate=truncate)
    found: list[Any] = [None] * len(rows)
    for batch in run(runtime, rows, tokenizer.arguments, pad_id=pad_id_of(loaded, runtime)):
        logits = np.asarray(batch.fields["logits"], np.float32)
        for number, index in enumerate(batch.indices):
            scores = _softmax(logits[number, : len(rows[index]["input_ids"])])
            found[index] = _token_labels(loaded, runtime, requested[index], rows[index], scores)
    return found[0] if isinstance(texts, str) else found


def rerank(
    loaded: LoadedModel,
    runtime: ModelRuntime,
    query: str,
    documents: Sequence[str],
    *,
    top_k: int | None,
    score_pairs: Callable[[Sequence[tuple[str, str]]], np.ndarray],
) -> list[RankedDocument]:
    """See `torchax_serve.EncoderModel.rerank`; `score_pairs` returns the scores of pairs of texts."""
    _require(loaded, runtime, "ForSequenceClassification", "rerank", "scores pairs of texts")
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


def score_pairs(
    loaded: LoadedModel, runtime: ModelRuntime, pairs: Sequence[tuple[str, str]], *, truncate: bool | None
) -> np.ndarray:
    """Returns the scores float32[num_pairs] of pairs of texts by a cross-encoder.

    Errors are those of `rerank`.
    """
    _require(loaded, runtime, "ForSequenceClassification", "rerank", "scores pairs of texts")
    tokenizer, max_len = tokenizer_of(loaded), limit_of(loaded, runtime)
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    rows, cut = rows_of(tokenizer, queries, documents, max_len=max_len, truncate=truncate is not False)
    if cut and truncate is None:
        tokenizer.warn_once(
            f"{loaded.source.name}: pairs are cut to {max_len} tokens, as by sentence-transformers; {len(cut)} of "
            f"{len(rows)} are longer"
        )
    logits = text_logits(loaded, runtime, rows)
    if logits.shape[-1] != 1:
        raise UnsupportedModelError(
            f"rerank: expected a cross-encoder with one score for a pair, got {type(runtime.program.module).__name__} "
            f"with {logits.shape[-1]} labels; call classify()"
        )
    return _scores_of_pairs(loaded, runtime, logits[:, 0])


def text_logits(loaded: LoadedModel, runtime: ModelRuntime, rows: Sequence[Row]) -> np.ndarray:
    """Returns the logits of texts, float32[num_rows, num_labels]."""
    found: list[Any] = [None] * len(rows)
    for batch in run(runtime, rows, tokenizer_of(loaded).arguments, pad_id=pad_id_of_head(loaded, runtime)):
        logits = np.asarray(batch.fields["logits"], np.float32)
        for number, index in enumerate(batch.indices):
            found[index] = logits[number]
    return np.stack(found)


def pad_id_of_head(loaded: LoadedModel, runtime: ModelRuntime) -> int | None:
    """Returns the padding token of a head that reads one token of a text; None if texts are not padded for it.

    Such a head finds the last token by the config's pad_token_id.
    """
    knows_padding = getattr(runtime.config.get_text_config(), "pad_token_id", None) is not None
    is_plain = knows_padding and not runtime.program.names.has_encoder
    return pad_id_of(loaded, runtime) if is_plain else None


def _require(loaded: LoadedModel, runtime: ModelRuntime, ending: str, name: str, what: str) -> None:
    class_name = type(runtime.program.module).__name__
    if not class_name.endswith(ending):
        raise UnsupportedModelError(
            f"{name}: expected a model that {what} (…{ending}), got {class_name}{loaded.report.lack}"
        )


def _names(runtime: ModelRuntime, num_labels: int) -> list[str]:
    known: Any = runtime.config.id2label or {}
    return [str(known.get(index, f"LABEL_{index}")) for index in range(num_labels)]


def _activated(runtime: ModelRuntime, logits: np.ndarray) -> np.ndarray:
    """Returns scores as transformers' text-classification pipeline does.

    The activation follows the configuration's ``problem_type``.
    """
    kind = runtime.config.problem_type
    if kind == "regression":
        return logits
    if kind == "multi_label_classification" or (kind is None and logits.shape[-1] == 1):
        return _sigmoid(logits)
    return _softmax(logits)


def tokenizer_of(loaded: LoadedModel) -> TextTokenizer:
    """Returns the tokenizer of texts to label, made once for each model."""
    return loaded.once(TextTokenizer, lambda: TextTokenizer(loaded))


def _scores_of_pairs(loaded: LoadedModel, runtime: ModelRuntime, logits: np.ndarray) -> np.ndarray:
    """Returns scores as cross-encoders of sentence-transformers do.

    They are sigmoids, unless the checkpoint turns the activation off.
    """
    settings = getattr(runtime.config, "sentence_transformers", None) or {}
    name = settings.get("activation_fn") or getattr(runtime.config, "sbert_ce_default_activation_function", None)
    if name is None and loaded.files_folder is not None:
        name = read_json(loaded.files_folder / "config_sentence_transformers.json", optional=True).get("activation_fn")
    kind = "Sigmoid" if name is None else str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(
            f"rerank: expected an activation Sigmoid or Identity in the model's files, got {name}"
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


def _token_labels(
    loaded: LoadedModel, runtime: ModelRuntime, text: Text, row: Row, scores: np.ndarray
) -> list[TokenLabel]:
    names = _names(runtime, scores.shape[-1])
    tokenizer: Any = loaded.tokenizer() if isinstance(text, str) else None
    ids = row["input_ids"]
    hidden = set() if tokenizer is None else set(tokenizer.all_special_ids)
    words = [None] * len(ids) if tokenizer is None else tokenizer.convert_ids_to_tokens(ids)
    return [
        TokenLabel(token, word, names[int(each.argmax())], float(each.max()))
        for token, word, each in zip(ids, words, scores, strict=True)
        if token not in hidden
    ]
