"""Tokenizer on the `tokenizers` library alone, equal to the transformers one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import tokenizers

from torchax_serve.start.torch_side import Deferred, TorchSide

PROBES = (
    "Hello, world!",
    "  two  spaces\n\tand a tab ",
    "Grüße, 你好, 🙂 e\u0301",
    "x=3;y=40 <s></s> [CLS] \\n don't .",
    "",
)
"""Texts on which both tokenizers have to agree before one is recorded."""


@dataclasses.dataclass(frozen=True)
class TokenizerRecord:
    """What a fast tokenizer of transformers was made of.

    Attributes:
        backend: The `tokenizers` tokenizer as JSON.
        chat_template: Chat template without tools; None if there is none.
        tools_template: Chat template for tools.
        special_tokens_map: Special tokens by name.
        response_template: How answers spell reasoning and tool calls; None if the checkpoint does not say.
    """

    backend: str
    chat_template: str | None
    tools_template: str | None
    special_tokens_map: dict[str, Any]
    response_template: dict[str, Any] | None = None

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the tokenizer, which neither cuts nor pads."""
        made = tokenizers.Tokenizer.from_str(self.backend)
        made.no_truncation()
        made.no_padding()
        return made


class RecordedTokenizer(Deferred):
    """The part of a transformers tokenizer that text requests use, without torch.

    Args:
        side: The torch side.
        pick: Returns the tokenizer of a loaded model.
        record: The tokenizer.
        backend: The tokenizer of the record, which another thread makes.
    """

    has_own_template_method = False
    decodes_by_backend = True

    def __init__(
        self,
        side: TorchSide,
        pick: Callable[[Any], Any],
        record: TokenizerRecord,
        backend: Future[tokenizers.Tokenizer],
    ) -> None:
        recorded = {
            "is_fast": True,
            "chat_template": record.chat_template,
            "special_tokens_map": record.special_tokens_map,
            "response_template": record.response_template,
            "clean_up_tokenization_spaces": False,
        }
        super().__init__(side, pick, recorded)
        vars(self).update(_record=record, _backend=backend)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self.made().backend_tokenizer if self.is_loaded else self._backend.result()

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Added tokens by id."""
        if self.is_loaded:
            return dict(self.made().added_tokens_decoder)
        return dict(self._backend.result().get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, added ones included."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def get_chat_template(self, chat_template: Any = None, tools: Sequence[Any] | None = None) -> Any:
        """Returns the chat template for requests with or without `tools`."""
        if self.is_loaded or chat_template is not None:
            return self.made().get_chat_template(chat_template, tools)
        return self._record.tools_template if tools else self._record.chat_template

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the token ids of a text as ``input_ids``; more is up to the torch side."""
        if not self.is_loaded and not kwargs and len(args) == 1 and isinstance(args[0], list):
            return {"input_ids": [self(each)["input_ids"] for each in args[0]]}
        is_text = len(args) == 1 and isinstance(args[0], str)
        if self.is_loaded or not is_text or kwargs.keys() - {"add_special_tokens"}:
            return self.made()(*args, **kwargs)
        return {"input_ids": self._backend.result().encode(args[0], **kwargs).ids}

    def convert_ids_to_tokens(self, ids: Any, **kwargs: Any) -> Any:
        """Returns the token with an id; None if there is none."""
        if self.is_loaded or kwargs or not isinstance(ids, int):
            return self.made().convert_ids_to_tokens(ids, **kwargs)
        return self._backend.result().id_to_token(ids)

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Returns the text of token ids."""
        is_plain = isinstance(token_ids, list) and all(isinstance(each, int) for each in token_ids)
        if self.is_loaded or not is_plain or kwargs.keys() - {"skip_special_tokens", "clean_up_tokenization_spaces"}:
            return self.made().decode(token_ids, **kwargs)
        if kwargs.get("clean_up_tokenization_spaces"):
            return self.made().decode(token_ids, **kwargs)
        return self._backend.result().decode(token_ids, skip_special_tokens=kwargs.get("skip_special_tokens", False))

    def __len__(self) -> int:
        return len(self.made())
