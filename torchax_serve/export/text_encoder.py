"""`BundleTextEncoder`: tokenizer of an encoder's bundle, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.pooling.text_tokenizer import IDS, Row, TextEncoder, lower_cased
from torchax_serve.start.recorded_objects import TokenizerRecord


class BundleTextEncoder(TextEncoder):
    """Makes rows of texts as the tokenizer of transformers does that was exported.

    Args:
        record: The tokenizer; None if the model has none, and texts are token ids.
        described: What the manifest says about it.
        name: Name of the model, for messages.
        lower_case: Whether texts are converted to lower case, except special tokens.
    """

    def __init__(
        self, record: TokenizerRecord | None, described: Mapping[str, Any] | None, name: str, *, lower_case: bool
    ) -> None:
        super().__init__()
        self._name = name
        self._arguments = frozenset({IDS} if described is None else described["arguments"])
        self._special_ids = frozenset([] if described is None else described["special_ids"])
        # Cutting is a state of a tokenizer: the one that cuts is another, used under a lock.
        self._plain: Any = None if record is None else record.tokenizer()
        self._cutting: Any = None if record is None else record.tokenizer()
        if lower_case and record is not None:
            for each in (self._plain, self._cutting):
                lower_cased(each)

    @property
    def arguments(self) -> frozenset[str]:
        """Arguments of the forward that texts have, without the mask."""
        return self._arguments

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return self._special_ids

    def rows_of(self, text: str, pair: str | None, max_len: int | None) -> tuple[Row, int]:
        """Returns as `TextEncoder.rows_of`."""
        found = self._backend().encode(text, pair)
        length = len(found.ids)
        if max_len is not None and length > max_len:
            with self._lock:
                self._cutting.enable_truncation(max_len, strategy="longest_first")
                found = self._cutting.encode(text, pair)
        row = {IDS: list(found.ids), "token_type_ids": list(found.type_ids)}
        return {name: row[name] for name in row if name in self._arguments}, length

    def tokens_of(self, ids: list[int]) -> list[str | None]:
        """Returns the text of each token."""
        return [self._backend().id_to_token(each) for each in ids]

    def _backend(self) -> Any:
        if self._plain is None:
            raise InvalidArgumentError(
                f"{self._name} has no tokenizer, and text needs one; export it with its tokenizer, or give token ids"
            )
        return self._plain
