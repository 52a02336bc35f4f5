"""Tokenizes texts and cuts those that are longer than a model reads."""

from __future__ import annotations

import abc
import copy
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, normalizers

from model_adapters.errors import InvalidArgumentError

if TYPE_CHECKING:
    from model_adapters.loading import LoadedModel

logger = logging.getLogger("torchax_serve")

IDS, MASK = "input_ids", "attention_mask"

Row = dict[str, list[int]]
"""A tokenized text: lists of equal length by argument of the forward."""


class TextEncoder(abc.ABC):
    """Makes rows of token ids of texts that are not generated from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_warned = False

    @property
    @abc.abstractmethod
    def arguments(self) -> frozenset[str]:
        """Arguments of the forward that texts have, without the mask."""

    @property
    @abc.abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""

    @abc.abstractmethod
    def rows_of(self, text: str, pair: str | None, max_len: int | None) -> tuple[Row, int]:
        """Returns the row of a text or pair, cut to `max_len` tokens, and its full length.

        Raises:
            InvalidArgumentError: the model has no tokenizer.
        """

    @abc.abstractmethod
    def tokens_of(self, ids: list[int]) -> list[str | None]:
        """Returns the text of each token."""

    def prompt_len(self, prompt: str, max_len: int | None) -> int:
        """Returns the number of tokens at the start of a text that belong to `prompt`.

        They are the tokens of `prompt` without an end token.
        """
        ids = self.rows_of(prompt, None, max_len)[0][IDS]
        return len(ids) - (1 if ids and ids[-1] in self.special_ids else 0)

    def warn_once(self, message: str) -> None:
        """Logs a warning once."""
        with self._lock:
            had_warned, self._has_warned = self._has_warned, True
        if not had_warned:
            logger.warning("%s", message)


class TextTokenizer(TextEncoder):
    """The tokenizer of transformers of one model.

    Fast tokenizers store the length at which they cut as state, which all threads share. Texts that are cut therefore
    go through a copy of the tokenizer, under a lock.

    Args:
        loaded: the model.
        lower_case: convert texts to lower case, except special tokens, as sentence-transformers does.
        prefixes: texts whose first token is one of the vocabulary and may not be taken apart, as PyLate's are.
    """

    def __init__(self, loaded: LoadedModel, *, lower_case: bool = False, prefixes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._loaded, self._lower_case, self._prefixes = loaded, lower_case, prefixes

    def rows_of(self, text: str, pair: str | None, max_len: int | None) -> tuple[Row, int]:
        """Returns as `TextEncoder.rows_of`."""
        given = (text,) if pair is None else (text, pair)
        if self._lower_case or self._prefixes:
            with self._lock:
                row = _row(self._own(*given, verbose=False))
        else:
            row = _row(self._shared()(*given, verbose=False))
        length = len(row[IDS])
        if max_len is not None and length > max_len:
            with self._lock:
                row = _row(self._own(*given, truncation="longest_first", max_length=max_len, verbose=False))
        return row, length

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """Arguments of the forward for texts but the mask; token ids alone without a tokenizer."""
        return frozenset({IDS} if self._loaded.tokenizer() is None else self.rows_of("a", None, None)[0])

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self._shared().all_special_ids)

    def tokens_of(self, ids: list[int]) -> list[str | None]:
        """Returns the text of each token."""
        return list(self._shared().convert_ids_to_tokens(ids))

    def _shared(self) -> Any:
        tokenizer = self._loaded.tokenizer()
        if tokenizer is None:
            raise InvalidArgumentError(
                f"{self._loaded.source.name} has no tokenizer, and text needs one; put its tokenizer files next to the "
                "weights, or give token ids"
            )
        return tokenizer

    @functools.cached_property
    def _own(self) -> Any:
        found = copy.deepcopy(self._shared())
        keep_prefixes(found, self._prefixes)
        if not self._lower_case:
            return found
        if not found.is_fast:
            found.do_lower_case = True
            return found
        lower_cased(found.backend_tokenizer)
        return found


def keep_prefixes(tokenizer: Any, prefixes: tuple[str, ...]) -> None:
    """Makes special tokens of the first tokens of prefixes that would be taken apart."""
    vocab = tokenizer.get_vocab()
    wanted = []
    for prefix in filter(str.strip, prefixes):
        token = next((each for each in (prefix, prefix.split(None, 1)[0]) if each in vocab), None)
        if token is not None and tokenizer.tokenize(token) != [token]:
            wanted.append(AddedToken(token, normalized=False, special=True))
    if wanted:
        tokenizer.add_tokens(wanted, special_tokens=True)


def lower_cased(backend: Any) -> None:
    """Makes a tokenizer convert texts to lower case, except special tokens."""
    if not _makes_lower_case(backend.normalizer):
        further = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *further])


def _row(found: Any) -> Row:
    return {name: list(found[name]) for name in found if name != MASK}


def _makes_lower_case(normalizer: Any) -> bool:
    is_sequence = isinstance(normalizer, normalizers.Sequence)
    parts: Any = normalizer if is_sequence else [normalizer]
    return any(isinstance(each, normalizers.Lowercase) for each in parts)
