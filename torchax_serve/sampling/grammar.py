"""Grammar masks of answers, by llguidance.

Grammars are compiled once and cached by their text.
"""

from __future__ import annotations

import collections
import copy
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, NoTokenLeftError, UnsupportedModelError
from torchax_serve.sampling.grammar_check import grammar_error
from torchax_serve.sampling.json_schema import closed

MAX_CACHED = 128
"""Most compiled grammars that are kept."""

# Text as models write it. Free whitespace would let a model write it without end.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Returns the grammar of JSON texts that follow the closed form of a JSON schema.

    It is that of `torchax_serve.sampling.json_schema.closed`.
    """
    from llguidance import LLMatcher

    options: Any = JSON_OPTIONS
    return str(LLMatcher.grammar_from_json_schema(json.dumps(closed(schema)), overrides=options))


def regex_grammar(pattern: str) -> str:
    """Returns the grammar of texts that match a regular expression of Rust's syntax.

    Look-around is not part of that syntax.
    """
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Returns the grammar of a list of texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_grammar(text: str) -> str:
    """Returns the grammar in Lark's syntax or, where it has ``::=``, in that of GBNF."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(lark_text(text)))


def lark_text(text: str) -> str:
    """Returns a grammar in Lark's syntax; one with ``::=`` is translated from GBNF."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # a parser without an error class of its own
        raise InvalidArgumentError(f"expected a grammar of Lark or GBNF, got neither ({error})") from error


class GrammarMasks:
    """Masks of one request (`torchax_serve.sampling.token_masks.TokenMasks`).

    Args:
        matcher: Matcher of llguidance at the beginning of the grammar, used by this request only.
        eos_ids: Tokens that end an answer, which may follow a complete one.
        after: Returns the number of tokens in front of the grammar, None while they go on; for reasoning.
    """

    def __init__(
        self,
        matcher: Any,
        eos_ids: Collection[int],
        after: Callable[[Sequence[int]], int | None] | None = None,
    ) -> None:
        self._matcher, self._eos_ids = matcher, tuple(eos_ids)
        self._after = after
        self._num_consumed = 0

    def fill(self, bitmask: np.ndarray, output_ids: Sequence[int]) -> None:
        """Implements `TokenMasks.fill`.

        Raises:
            NoTokenLeftError: The grammar allows no token, or takes too much work.
        """
        if self._after is not None:
            begin = self._after(output_ids)
            if begin is None:
                return
            self._num_consumed, self._after = begin, None
        new = list(output_ids[self._num_consumed :])
        self._num_consumed = len(output_ids)
        if new and not self._matcher.consume_tokens(new):
            raise NoTokenLeftError(["masks"], len(output_ids), self._matcher.get_error()[:200])
        if self._matcher.is_stopped() and not self._matcher.is_error():
            bitmask[:] = 0
            for token_id in self._eos_ids:
                bitmask.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
            return
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if self._matcher.is_error():
            raise NoTokenLeftError(["masks"], len(output_ids), self._matcher.get_error()[:200])


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer: A fast tokenizer of transformers.
        vocab_size: Number of columns of the logits.
        eos_ids: Tokens that end an answer.

    Raises:
        UnsupportedModelError: The tokenizer is written in Python.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError("expected a fast tokenizer for answers held to a grammar, got one in Python")
        if not eos_ids:
            raise UnsupportedModelError("expected a model with an end-of-sequence token for answers held to a grammar")
        from llguidance import LLTokenizer

        self._eos_ids = tuple(eos_ids)
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        try:
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(self._eos_ids))
        except Exception as error:  # such as a decoder that llguidance does not know
            raise UnsupportedModelError(
                f"expected a tokenizer that llguidance reads, for answers held to a grammar, got another ({error})"
            ) from error
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def masks(
        self, grammar: str, after: Callable[[Sequence[int]], int | None] | None = None
    ) -> Callable[[], GrammarMasks]:
        """Returns a function that makes the masks of one request.

        Args:
            grammar: A grammar of this module's functions.
            after: As in `GrammarMasks`.

        Raises:
            InvalidArgumentError: The grammar is not valid, or takes too long to compile.
        """
        matcher = self._matcher(grammar)
        return lambda: GrammarMasks(matcher.deep_copy(), self._eos_ids, after)

    def _matcher(self, grammar: str) -> Any:
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
        if (error := grammar_error(grammar)) is not None:
            raise InvalidArgumentError(f"expected a grammar that can be compiled, got one that cannot: {error[:500]}")
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise InvalidArgumentError(
                f"expected a grammar that can be compiled, got one that cannot: {matcher.get_error()[:500]}"
            )
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher
