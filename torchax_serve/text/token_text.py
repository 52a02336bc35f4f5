"""Text and bytes of single tokens, for log-probabilities.

The bytes of an answer's tokens join to its text.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of each token of a tokenizer.

    Exact for tokenizers whose decoder joins its tokens: byte-level BPE, and SentencePiece with or without byte tokens.
    Of others, a token's bytes are those of its text when it is decoded by itself.

    Args:
        tokenizer: A tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        names = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in names
        self._spaces = tuple(space for decoder in decoders if (space := _replaced_by_space(decoder)) is not None)
        self._has_byte_tokens = "ByteFallback" in names
        self._added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        self._cache: dict[int, bytes] = {}

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token.

        vLLM, too, takes texts of more than that per token for too long.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def __call__(self, token_id: int) -> bytes:
        """Returns the bytes of a token; none for an id outside the vocabulary."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._bytes_of(token_id)
        return found

    def text(self, token_id: int) -> str:
        """Returns the text of a token; bytes that are no UTF-8 by themselves are replaced."""
        return self(token_id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        try:
            token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError):
            token = None
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_level_table()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._spaces:
            for space in self._spaces:
                token = token.replace(space, " ")
            return token.encode("utf-8", "replace")
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text.encode("utf-8", "replace")


def _decoders(tokenizer: Any) -> list[dict[str, Any]]:
    if not getattr(tokenizer, "is_fast", False) or tokenizer.backend_tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    decoders: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return decoders


def _replaced_by_space(decoder: dict[str, Any]) -> str | None:
    """Returns the character that a decoder writes as a space; None if there is none."""
    if decoder["type"] == "Metaspace":
        return str(decoder["replacement"])
    if decoder["type"] == "Replace" and decoder["content"] == " ":
        found: str | None = decoder["pattern"].get("String")
        return found
    return None


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary, as GPT-2 wrote them.

    Printable bytes of Latin-1 stand for themselves; the others follow from U+0100 on, in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}
