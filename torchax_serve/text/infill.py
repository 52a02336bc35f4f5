"""Prompts to fill in the middle (FIM), by the tokenizer's own tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, whose answers follow the prefix, which stands behind the suffix
)
"""Tokens in front of the text before the gap, of the one behind it, and of the answer, by family of models."""
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
"""Tokens in front of the name of a repository."""
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
"""Tokens in front of a file."""
_ENDS = (*_REPOSITORY, *_FILE, "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>")
"""Tokens that end an answer besides those of the model."""


_OF_FILES = (_REPOSITORY, _FILE)
_ALL = {*_ENDS, *(text for marks in _MARKS for text in marks if text)}


class ContextFile(NamedTuple):
    """A file of the same project, which stands in front of the prompt."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class FimTokens:
    """Ids of the tokens with which a tokenizer marks the parts of a prompt.

    Attributes:
        prefix, suffix: In front of the text before the gap, and of the one behind it.
        middle: In front of the answer; None where it follows the prefix, which then stands behind the suffix.
        repository, file: In front of the name of a repository, and of a file; None for none.
        ends: Tokens that end an answer besides those of the model.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> FimTokens | None:
        """Returns the tokens of a tokenizer; None if it has none."""
        if tokenizer is None:
            return None
        known = {text: token_id for text in _ALL if (token_id := _id_of(tokenizer, text)) is not None}
        for prefix, suffix, middle in _MARKS:
            if {prefix, suffix, middle or prefix} <= known.keys():
                repository, file = (next((known[text] for text in each if text in known), None) for each in _OF_FILES)
                ends = tuple(known[text] for text in _ENDS if text in known)
                return cls(known[prefix], known[suffix], known.get(middle), repository, file, ends)
        return None

    def prompt_ids(
        self, tokenizer: Any, before: str, behind: str, *, start: str = "", files: Sequence[ContextFile] = ()
    ) -> list[int]:
        """Returns the token ids of a prompt, which ends where the answer begins.

        Args:
            tokenizer: The tokenizer.
            before: Text before the gap.
            behind: Text behind the gap.
            start: Beginning of the text in the gap, which the answer continues.
            files: Files in front of it.
        """

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

        front = self._file_ids(encode, files)
        of_prefix, of_suffix = [self.prefix, *encode(before)], [self.suffix, *encode(behind)]
        if self.middle is None:
            return [*_bos(tokenizer), *front, *of_suffix, *of_prefix, *encode(start)]
        return [*_bos(tokenizer), *front, *of_prefix, *of_suffix, self.middle, *encode(start)]

    def _file_ids(self, encode: Any, files: Sequence[ContextFile]) -> list[int]:
        """Returns the tokens of files in front, by marks or, without any, as text."""
        if not files:
            return []
        if self.file is None:
            return [token_id for file in files for token_id in encode(f"{file.text}\n")]
        found = [] if self.repository is None else [self.repository, *encode("myproject\n")]
        for file in files:
            found += [self.file, *encode(f"{file.name}\n{file.text}\n")]
        return [*found, self.file, *encode("filename\n")]


def _id_of(tokenizer: Any, text: str) -> int | None:
    """Returns the id of a token; None if there is none of this text."""
    token_id = tokenizer.convert_tokens_to_ids(text)
    return token_id if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text else None


def _bos(tokenizer: Any) -> list[int]:
    """Returns the token with which the tokenizer begins each text, if it has one."""
    ids = list(tokenizer("a")["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and ids and ids[0] == bos else []
