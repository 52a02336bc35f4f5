"""Incremental decoding of tokens; the joined pieces equal the decoded text of all tokens.

Decoding every token separately is wrong (a character may span tokens, and a leading space depends on the token before),
and decoding all tokens at every step takes quadratic time. The usual method in between, of text-generation-inference
and vLLM, decodes a short window of the latest tokens with and without the new one and yields the difference. Three
additions make the result exact:

* the end of the window is held back while it may be an unfinished UTF-8 character;
* if the tokenizer falls back to byte tokens (``<0xE2>``), a run of them is decoded when it has ended, because one
  invalid byte turns the entire run into replacement characters;
* the text-level clean-up of ``clean_up_tokenization_spaces`` runs as a filter that knows how far a replacement reaches.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A UTF-8 character has at most four bytes, so at most three of them can wait for the rest.
_MAX_UNFINISHED = 3
# The window is cut back to the smaller number of tokens when it has reached the larger one. Three bytes are enough for
# a UTF-8 decoder to fall into step whatever stood before, and a token has at least one.
_WINDOW_LEN, _SHORT_WINDOW_LEN = 16, 6
# Decoders that treat the last token like any other: a token that adds no text to what stands before it adds none to
# what comes after it. Others take spaces off the end, which appear once the text goes on.
_NO_END_RULE = frozenset({"ByteLevel", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"})


class Detokenizer:
    """Decodes token ids to pieces of text: ``push`` for every token, ``flush`` once at the end.

    The joined pieces equal ``tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)``; a piece never
    ends inside a character. The work per token does not grow with the number of tokens, except in a run of spaces of a
    tokenizer that strips the end of its text (a few that are written in Python).
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decode_ids, self._token_of = _functions_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        decoders = _decoder_types(tokenizer)
        self._has_byte_tokens = "ByteFallback" in decoders
        self._skips_empty = bool(decoders) and decoders <= _NO_END_RULE
        self._clean_up = _CleanUp(tokenizer) if _cleans_up(tokenizer) else None
        self._token_ids: list[int] = []
        self._window: list[int] = []
        self._byte_run: list[int] = []
        self._window_text = ""
        self._num_held = 0  # characters at the end of _window_text that have not been handed out
        self._emitted: list[str] = []
        self._lost = False  # the tokenizer rewrote text that was already handed out: wait for the end

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that became final, often empty."""
        return self.push_all((token_id,))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Takes tokens; returns the text that became final. Many tokens cost little more than one."""
        new_ids: list[int] = []
        for token_id in token_ids:
            token = self._token(token_id)
            if token is None:
                continue
            self._token_ids.append(token_id)
            if token_id in self._skipped or self._lost:
                continue
            if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
                self._byte_run.append(token_id)
                continue
            new_ids += [*self._byte_run, token_id]
            self._byte_run = []
        return self._cleaned(self._advance(new_ids)) if new_ids else ""

    def flush(self) -> str:
        """Returns the rest of the text, after the last token."""
        text, emitted = self._decode(self._token_ids), "".join(self._emitted)
        if text.startswith(emitted):
            rest = text[len(emitted) :]
        else:
            # Text of an unusual decoder that looks further back than the window; what is out cannot be taken back.
            rest = "" if self._lost else self._window_text[len(self._window_text) - self._num_held :]
        self._emitted = [text]
        self._num_held = 0
        piece = self._cleaned(rest)
        return piece + self._clean_up.flush() if self._clean_up else piece

    def _cleaned(self, piece: str) -> str:
        return self._clean_up.push(piece) if self._clean_up else piece

    def _token(self, token_id: int) -> str | None:
        """Returns the token; None for an id outside the vocabulary, which has no text.

        A padded embedding may give such ids.
        """
        try:
            return self._token_of(token_id)
        except (IndexError, KeyError):
            return None

    def _advance(self, new_ids: list[int]) -> str:
        """Moves the window over `new_ids`; returns the text that became final."""
        window = self._window + new_ids
        text = self._decode(window)
        num_emitted = len(self._window_text) - self._num_held
        if text[:num_emitted] != self._window_text[:num_emitted]:
            self._lost = True
            return ""
        if text == self._window_text and not self._num_held and self._window and self._skips_empty:
            return ""  # so that a run of tokens without text does not make the window long
        num_certain = max(num_emitted, len(text) - _num_unfinished(text))
        piece = text[num_emitted:num_certain]
        self._emitted.append(piece)
        self._window, self._window_text, self._num_held = window, text, len(text) - num_certain
        if len(window) >= _WINDOW_LEN:
            self._cut_window()
        return piece

    def _cut_window(self) -> None:
        """Drops older tokens of the window if the rest decodes to the same end of text."""
        window = self._window[-_SHORT_WINDOW_LEN:]
        text = self._decode(window)
        num_compared = self._num_held + 2
        if len(text) > num_compared and text[-num_compared:] == self._window_text[-num_compared:]:
            self._window, self._window_text = window, text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decode_ids(list(token_ids), skip_special_tokens=self._skip_special_tokens)


class NoText:
    """Replacement of `Detokenizer` for models without a tokenizer: tokens have no text."""

    def push(self, token_id: int) -> str:
        """Returns an empty text."""
        return ""

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Returns an empty text."""
        return ""

    def flush(self) -> str:
        """Returns an empty text."""
        return ""


def _num_unfinished(text: str) -> int:
    """Returns how many characters at the end of `text` may belong to an unfinished one."""
    tail = text[-_MAX_UNFINISHED:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))


def _functions_of(tokenizer: Any) -> tuple[Callable[..., str], Callable[[int], str | None]]:
    """Returns functions that decode token ids without clean-up, and that return a token.

    They are those of the `tokenizers` library where the tokenizer's own only call these, at a multiple of their time.
    """
    if _decodes_by_backend(type(tokenizer)):
        backend = tokenizer.backend_tokenizer
        return backend.decode, backend.id_to_token
    return functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False), tokenizer.convert_ids_to_tokens


def _decodes_by_backend(kind: type[Any]) -> bool:
    """Returns whether a class of tokenizers decodes by its backend.

    It does if it is one of transformers' and nothing is overridden.
    """
    names = ("decode", "_decode", "convert_ids_to_tokens")
    own = {getattr(getattr(kind, name, None), "__module__", None) for name in names}
    is_plain = own <= {"transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"}
    return is_plain or getattr(kind, "decodes_by_backend", False)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the ids that ``skip_special_tokens=True`` leaves out."""
    if getattr(tokenizer, "is_fast", False):
        return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


def _decoder_types(tokenizer: Any) -> frozenset[str]:
    """Returns the names of the `tokenizers` decoders of `tokenizer`.

    The set is empty for a tokenizer written in Python. A ``Strip`` that strips the end counts as ``StripEnd``.
    """
    if not getattr(tokenizer, "is_fast", False) or tokenizer.backend_tokenizer.decoder is None:
        return frozenset()
    decoder = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return frozenset("StripEnd" if part.get("stop") else part["type"] for part in parts)


def _cleans_up(tokenizer: Any) -> bool:
    """Returns whether ``tokenizer.decode`` runs `clean_up_tokenization` on its text.

    The rule is that of transformers 5.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    if not getattr(tokenizer, "is_fast", False):
        return True
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return type(tokenizer.backend_tokenizer.model).__name__ != "BPE" or bool(forced)


class _CleanUp:
    """Applies ``tokenizer.clean_up_tokenization`` to text that arrives in pieces.

    It removes spaces in a row of replacements, each of which matches a space and at most three characters after it:
    `` .`` `` ?`` `` !`` `` ,`` `` ' `` `` n't`` `` 'm`` `` 's`` `` 've`` `` 're``. Text may be cut where no match, not
    even one that forms after earlier replacements, can reach over the cut: behind three characters that are no spaces,
    or behind a character that begins or continues none of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._clean_up = tokenizer.clean_up_tokenization
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes a piece; returns the clean text that no later piece can change."""
        first_new = len(self._held)
        text = self._held + piece
        for end in range(len(text), first_new, -1):
            if self._may_cut(text[max(0, end - 3) : end]):
                self._held = text[end:]
                return str(self._clean_up(text[:end]))
        self._held = text
        return ""

    def flush(self) -> str:
        """Returns the rest of the clean text."""
        text, self._held = self._held, ""
        return str(self._clean_up(text))

    @staticmethod
    def _may_cut(last: str) -> bool:
        return last[-1] not in " 'nvr" or (len(last) == 3 and " " not in last)


class StopStrings:
    """Ends a text, which arrives in pieces, before the first of several stop strings.

    Text that may be the start of a stop string is held back until that is decided. Of several matches the one that is
    complete first counts, and of those that end together the longest, so the result does not depend on the pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Takes a piece; returns the text that is final, and nothing once a stop string was `found`.

        Where the piece may not end the text, stop strings that are complete with it are text.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = [(start + len(stop), start, stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if matches and may_end:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text that was held back and is no stop string."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that starts a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> tuple[str, str | None]:
    """Returns `text` up to the first stop string, and that string or None; see `StopStrings`."""
    stops = StopStrings(stop_strings)
    shown = stops.push(text)
    return (shown, stops.found) if stops.found is not None else (shown + stops.flush(), None)
