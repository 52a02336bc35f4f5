"""Tokens that end an answer by the model's tokenizer, besides those of its configuration."""

from __future__ import annotations

import weakref
from typing import Any

from model_adapters.program.turn_ends import ends_among

_found: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the tokenizer's ``eos`` and of its template's ends of a turn.

    These are the special tokens in the template that end a turn in all vocabularies.
    """
    if not hasattr(tokenizer, "special_tokens_map") or not hasattr(tokenizer, "added_tokens_decoder"):
        return ()  # none, or one of another library, which names no special tokens
    eos = tokenizer.special_tokens_map.get("eos_token")
    key = (getattr(tokenizer, "chat_template", None), None if eos is None else str(eos))
    known = _found.get(tokenizer)
    if known is None or known[0] != key:
        known = _found[tokenizer] = (key, _ends_of(tokenizer, *key))
    return known[1]


def _ends_of(tokenizer: Any, template: Any, eos: str | None) -> tuple[int, ...]:
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    shown = [special[text] for text in ends_among(special) if isinstance(template, str) and text in template]
    own = None if eos is None else special.get(eos, _id_of(tokenizer, eos))
    return tuple(dict.fromkeys(shown if own is None else [own, *shown]))


def _id_of(tokenizer: Any, text: str) -> int | None:
    if getattr(tokenizer, "is_fast", False):
        found: int | None = tokenizer.backend_tokenizer.token_to_id(text)
        return found
    own = tokenizer.eos_token_id
    return own if isinstance(own, int) else None
