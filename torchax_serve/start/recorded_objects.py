"""What requests of text use of transformers' objects: tokenizer, configuration, defaults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import tokenizers

from model_adapters.errors import UnsupportedModelError
from torchax_serve.start.torch_side import TorchSide

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


def _of_real(name: str) -> property:
    return property(lambda self: getattr(self.real, name), doc=f"Of the tokenizer itself: `{name}`.")


class RecordedTokenizer:
    """The part of a transformers tokenizer that requests of text use, without torch.

    What few of them use is the tokenizer's itself, which loads the torch side.

    Args:
        side: The torch side.
        record: The tokenizer.
        backend: The tokenizer of the record, which another thread makes.
    """

    is_fast = decodes_by_backend = True
    has_own_template_method = clean_up_tokenization_spaces = False
    all_special_ids, bos_token_id, eos_token_id = map(_of_real, ("all_special_ids", "bos_token_id", "eos_token_id"))
    apply_chat_template, convert_tokens_to_ids = map(_of_real, ("apply_chat_template", "convert_tokens_to_ids"))

    def __init__(self, side: TorchSide, record: TokenizerRecord, backend: Future[tokenizers.Tokenizer]) -> None:
        self._side, self._record, self._backend = side, record, backend
        self.chat_template, self.special_tokens_map = record.chat_template, record.special_tokens_map
        self.response_template = record.response_template

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedModelError(
            f"tokenizer: expected what requests of text use of it, got {name}; take the tokenizer of the model itself"
        )

    @property
    def real(self) -> Any:
        """The tokenizer itself."""
        return self._side.get().tokenizer

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend.result()

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, added ones included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_chat_template(self, chat_template: Any = None, tools: Sequence[Any] | None = None) -> Any:
        """Returns the chat template for requests with or without `tools`."""
        if chat_template is not None:
            return self.real.get_chat_template(chat_template, tools)
        return self._record.tools_template if tools else self.chat_template

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the token ids of a text as ``input_ids``; more is up to the tokenizer itself."""
        if not kwargs and len(args) == 1 and isinstance(args[0], list):
            return {"input_ids": [self(each)["input_ids"] for each in args[0]]}
        is_text = len(args) == 1 and isinstance(args[0], str)
        if not is_text or kwargs.keys() - {"add_special_tokens"}:
            return self.real(*args, **kwargs)
        return {"input_ids": self._backend.result().encode(args[0], **kwargs).ids}

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text."""
        return self(text, **kwargs)["input_ids"]

    def convert_ids_to_tokens(self, ids: Any, **kwargs: Any) -> Any:
        """Returns the token with an id; None if there is none."""
        if kwargs or not isinstance(ids, int):
            return self.real.convert_ids_to_tokens(ids, **kwargs)
        return self._backend.result().id_to_token(ids)

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Returns the text of token ids."""
        is_plain = isinstance(token_ids, list) and all(isinstance(each, int) for each in token_ids)
        if not is_plain or kwargs.keys() - {"skip_special_tokens", "clean_up_tokenization_spaces"}:
            return self.real.decode(token_ids, **kwargs)
        if kwargs.get("clean_up_tokenization_spaces"):
            return self.real.decode(token_ids, **kwargs)
        return self._backend.result().decode(token_ids, skip_special_tokens=kwargs.get("skip_special_tokens", False))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)


class RecordedConfig:
    """What was recorded of the configuration of a model of text alone.

    Args:
        values: Attributes by name.
        absent: Names that the configuration does not have.
    """

    def __init__(self, values: Mapping[str, Any], absent: Collection[str] = ()) -> None:
        vars(self).update(values, _absent=frozenset(absent))

    def get_text_config(self, *args: Any, **kwargs: Any) -> RecordedConfig:
        """Returns the configuration itself, as for every model that is recorded."""
        return self

    def __getattr__(self, name: str) -> Any:
        known = vars(self)
        if name.startswith("_") or name in known.get("_absent", ()):
            raise AttributeError(f"the model's configuration has no attribute {name}")
        recorded = ", ".join(each for each in known if each != "_absent")
        raise UnsupportedModelError(
            f"config: expected one of {recorded}, which were recorded, got {name}; serve the model itself for more"
        )


class GenerationValues:
    """Values of a generation config, to be merged with the parameters of a request."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        vars(self).update(values)
        self._defaults = defaults

    def _get_default_generation_params(self) -> Mapping[str, Any]:
        return self._defaults

    def written_into(self, config: Any) -> Any:
        """Returns a copy of `config`, a config of transformers, with these values."""
        merged = copy.deepcopy(config)
        vars(merged).update({name: value for name, value in vars(self).items() if name != "_defaults"})
        return merged
