"""Embeddings of each token, and scores by late interaction (ColBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.pooling.batching import Text, checked_texts, rows_of
from torchax_serve.pooling.embedding import Embedder, chosen_prompt
from torchax_serve.pooling.text_tokenizer import IDS, MASK, Row
from torchax_serve.pooling.token_rule import VectorTokens

Task = Literal["query", "document"]
TASKS: tuple[Task, ...] = ("query", "document")


def embed_tokens(
    embedder: Embedder,
    texts: str | Sequence[Text],
    *,
    task: Task = "document",
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate: bool | int | None = None,
    normalize: bool | None = None,
) -> list[np.ndarray]:
    """Returns embeddings of the tokens of texts, float32[num_tokens, dim] each.

    Args:
        embedder: Of a multi-vector model, by whose files tokens have a vector or none, or of any model that computes
            hidden states, which all tokens have then.
        texts: One text or several; a list of token ids may replace a text, and gets no prompt.
        task: How a multi-vector model reads texts.
        prompt: Text in front of each text.
        prompt_name: Name of one of the checkpoint's prompts; None: of a multi-vector model that named as the task.
        truncate: As of `embedding.embed`.
        normalize: Scale to length 1; None follows the checkpoint's files.

    Raises:
        InvalidArgumentError: an unknown task or prompt; an empty or too long text.
        UnsupportedModelError: a model with sparse embeddings.
    """
    if task not in TASKS:
        raise InvalidArgumentError(f"task: expected query or document, got {task!r}")
    if embedder.is_sparse:
        raise UnsupportedModelError(
            f"embed_tokens: expected a model with dense embeddings, got {embedder.name}, whose embeddings are sparse; "
            "call embed_sparse()"
        )
    tokens = embedder.tokens
    if tokens is not None and prompt is None and prompt_name is None:
        prompt_name = task
    front = chosen_prompt(embedder.rule, prompt, prompt_name)
    prompted = [front + each if isinstance(each, str) else each for each in checked_texts(texts)]
    max_len = embedder.max_len if tokens is None else _max_len(tokens, task, embedder.max_len)
    cuts = embedder.rule.has_files if truncate is None else truncate
    rows, cut = rows_of(embedder.tokenizer, prompted, None, max_len=max_len, truncate=cuts)
    if cut and truncate is None:
        embedder.tokenizer.warn_once(
            f"{embedder.name}: texts are cut to {max_len} tokens, as its files say; {len(cut)} of {len(rows)} are "
            "longer"
        )
    if tokens is None:
        return embedder.token_values(rows, normalize=normalize)
    rows = [_expanded(row, tokens, embedder.pad_id, task) for row in rows]
    found = embedder.token_values(rows, normalize=normalize)
    return [values[_have_vectors(row, tokens, task)] for values, row in zip(found, rows, strict=True)]


def maxsim(query: np.ndarray, document: np.ndarray) -> float:
    """Returns the sum over tokens of a query of the best inner product with one of a document.

    Args:
        query: float32[num_tokens, dim].
        document: float32[num_tokens, dim]; the score of one without tokens is the smallest number.
    """
    if not len(document):
        return float(np.finfo(np.float32).min)
    return float((query @ document.T).max(1).sum())


def _max_len(tokens: VectorTokens, task: Task, limit: int | None) -> int | None:
    """Returns the most tokens of a text before it is made longer; None for any number."""
    rule = tokens.rule
    own = rule.document_length if task == "document" else rule.query_length
    if task == "query" and rule.expansion is not None:
        if rule.expansion.is_fixed:
            own = rule.expansion.length
        elif own is not None:
            own = max(own, rule.expansion.length)
    limits = [each for each in (own, limit) if each is not None]
    return min(limits, default=None)


def _expanded(row: Row, tokens: VectorTokens, pad_id: int, task: Task) -> Row:
    """Returns the row of a query with the tokens that are added to it."""
    expansion = tokens.rule.expansion
    if task != "query" or expansion is None or tokens.expansion_id is None:
        return row
    missing = max(0, expansion.length - len(row[IDS]))
    attended = [1] * len(row[IDS]) + [int(expansion.attends)] * missing
    longer = {name: values + [0] * missing for name, values in row.items() if name != IDS}
    return longer | {IDS: row[IDS] + [tokens.expansion_id] * missing, MASK: attended}


def _have_vectors(row: Row, tokens: VectorTokens, task: Task) -> np.ndarray:
    """Returns which tokens of a row have a vector, bool[len]."""
    ids = np.asarray(row[IDS])
    found = np.ones(len(ids), bool)
    if task in tokens.rule.skiplist_tasks and tokens.skipped_ids:
        found &= ~np.isin(ids, sorted(tokens.skipped_ids))
    if task == "document" and tokens.rule.kept_ids:
        found &= np.isin(ids, tokens.rule.kept_ids)
    return found
