"""Settings of multi-vector models (ColBERT), from files of sentence-transformers and PyLate."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError
from torchax_serve.pooling.text_rule import positive

MODEL_TYPES = ("MultiVectorEncoder", "ColBERT")
"""Types in ``config_sentence_transformers.json``; the second is PyLate's, until its release 3."""
_PYLATE = (
    *("query_length", "document_length", "query_prefix", "document_prefix", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens"),
)
"""Settings of PyLate's own, next to the prompts."""


@dataclasses.dataclass(frozen=True)
class Expansion:
    """How queries are made longer by tokens with vectors (Khattab and Zaharia, 2020).

    Attributes:
        length: Tokens of a query, special ones included.
        is_fixed: Whether longer queries are cut to it.
        attends: Whether other tokens attend to those added.
        token: What is added; None: the mask token, or the end token without one.
    """

    length: int
    is_fixed: bool = True
    attends: bool = False
    token: str | None = None


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Rule of which tokens of queries and documents have a vector.

    Attributes:
        query_length: Most tokens of a query; None follows the model.
        document_length: Most tokens of a document; None follows the model.
        expansion: How queries are made longer; None: they are not.
        skiplist_words: Tokens without a vector.
        skiplist_tasks: For which of ``query`` and ``document`` they have none.
        kept_ids: Token ids that alone have a vector in documents; empty: all have.
        prefixes: Prompts whose first token the tokenizer may not take apart.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    kept_ids: tuple[int, ...] = ()
    prefixes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class VectorTokens:
    """The tokens of a `TokenRule` in a model's vocabulary.

    Attributes:
        rule: The rule.
        expansion_id: Token that is added to queries; None: none is.
        skipped_ids: Tokens without a vector.
    """

    rule: TokenRule
    expansion_id: int | None
    skipped_ids: frozenset[int]

    @classmethod
    def of(cls, rule: TokenRule, tokenizer: Any, name: str) -> VectorTokens:
        """Returns the ids by a tokenizer of transformers; words that are no token are left out.

        Raises:
            CheckpointError: the vocabulary lacks the token that is added to queries.
        """
        unknown: int | None = tokenizer.unk_token_id
        find: Callable[[str], int | None] = tokenizer.convert_tokens_to_ids
        skipped = {find(word) for word in rule.skiplist_words if find(word) != unknown or word == tokenizer.unk_token}
        expansion_id = None
        if rule.expansion is not None:
            token = rule.expansion.token
            fallback = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
            expansion_id = fallback if token is None else find(token)
            if expansion_id is None or (expansion_id == unknown and token != tokenizer.unk_token):
                raise CheckpointError(
                    f"{name}: query_expansion adds {token or 'the mask token'!r} to queries, expected a token of the "
                    "vocabulary"
                )
        return cls(rule, expansion_id, frozenset(id_ for id_ in skipped if id_ is not None))


def token_rule(
    texts: Mapping[str, Any], settings: Mapping[str, Any], mask: Mapping[str, Any] | None, file: Path
) -> TokenRule:
    """Returns the rule of a checkpoint's files.

    Args:
        texts: Content of ``sentence_bert_config.json``.
        settings: Content of `file`, ``config_sentence_transformers.json``, in which PyLate has its settings.
        mask: Configuration of the module MultiVectorMask; None without one, as in PyLate's files.
        file: For messages.

    Raises:
        CheckpointError: a value of another type.
    """
    legacy = {name: settings[name] for name in _PYLATE if settings.get(name) is not None}
    has_own = "query_expansion" in texts or not any(name in settings for name in _PYLATE)
    expansion = _expansion(texts.get("query_expansion"), file) if has_own else _of_pylate(legacy, file)
    prefixes = tuple(str(legacy[name]) for name in ("query_prefix", "document_prefix") if legacy.get(name))
    words: Any = (mask or {}).get("skiplist_words")
    if mask is None:
        words = legacy.get("skiplist_words", list(string.punctuation))
    tasks: Any = (mask or {}).get("skiplist_tasks") or ["document"]
    return TokenRule(
        query_length=None if expansion is not None and not has_own else _len("query_length", texts, legacy, file),
        document_length=_len("document_length", texts, legacy, file),
        expansion=expansion,
        skiplist_words=_texts("skiplist_words", words or [], file),
        skiplist_tasks=_texts("skiplist_tasks", [tasks] if isinstance(tasks, str) else tasks, file),
        kept_ids=tuple((mask or {}).get("keep_only_token_ids") or ()),
        prefixes=prefixes,
    )


def prompts_with_prefixes(prompts: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns prompts with PyLate's prefixes of queries and documents in front."""
    found = dict(prompts)
    for name, task in (("query_prefix", "query"), ("document_prefix", "document")):
        if prefix := settings.get(name):
            found[task] = str(prefix) + found.get(task, "").removeprefix(str(prefix))
    return found


def _expansion(value: Any, file: Path) -> Expansion | None:
    if value is None:
        return None
    known = {"strategy", "attend", "token", "length"}
    is_known = isinstance(value, dict) and set(value) <= known and value.get("strategy") in ("fixed", "min")
    if not is_known or not isinstance(value.get("attend", False), bool):
        raise CheckpointError(
            f"{file}: query_expansion is {value!r:.120}, expected strategy fixed or min, length, attend and token"
        )
    length = positive(value.get("length"), "query_expansion.length", file) or 32
    return Expansion(length, value["strategy"] == "fixed", value.get("attend", False), value.get("token"))


def _of_pylate(legacy: Mapping[str, Any], file: Path) -> Expansion | None:
    """Returns the expansion of PyLate's settings, which is on unless they say otherwise."""
    if legacy.get("do_query_expansion") is False:
        return None
    length = positive(legacy.get("query_length"), "query_length", file) or 32
    return Expansion(length, attends=bool(legacy.get("attend_to_expansion_tokens", False)))


def _len(name: str, texts: Mapping[str, Any], legacy: Mapping[str, Any], file: Path) -> int | None:
    return positive(texts.get(name, legacy.get(name)), name, file)


def _texts(name: str, value: Any, file: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise CheckpointError(f"{file}: {name} is {value!r:.80}, expected a list of texts")
    return tuple(value)
