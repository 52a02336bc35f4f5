"""Settings for reading texts, from files of sentence-transformers.

They are length, case, prompts and dimensions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, UnsupportedModelError

_TEXT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""File names in the order in which they are tried, for every type of model."""

_ALWAYS_THERE = {"query": "", "document": ""}
"""Prompt names of every model of sentence-transformers; empty unless its files set them."""

_OLD_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
_OUTPUTS = {"feature-extraction": "last_hidden_state", "fill-mask": "logits"}
"""What a model computes of each token, by the task in its files."""
# Settings of the torch module, which change no result here.
_OF_TORCH = {"attn_implementation", "add_pooling_layer", "torch_dtype", "dtype", "device_map", "use_safetensors"}
_OF_TORCH |= {"low_cpu_mem_usage", "trust_remote_code"}
_OF_PADDING = {"padding_side", "padding", "use_fast", "trust_remote_code"}


@dataclasses.dataclass(frozen=True)
class TextRule:
    """Rule of how texts are tokenized, and of how much of an embedding is returned.

    Attributes:
        has_files: Whether there are files of sentence-transformers, by which texts that are too long are cut.
        max_len: Most tokens of a text; None follows the model.
        lower_case: Whether texts are converted to lower case.
        prompts: Texts in front of each text, by name.
        default_prompt: Name of the prompt that is used by default.
        truncate_dim: Number of leading values of an embedding to return; None returns all.
        max_active_dims: Most values of a sparse embedding, the largest; None for any number.
        similarity: Name of the similarity of embeddings; None follows their kind.
    """

    has_files: bool = False
    max_len: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    similarity: str | None = None


def text_rule(
    root: Path, folder: Path, *, task: str = "feature-extraction", others: frozenset[str] = frozenset()
) -> TextRule:
    """Reads the files: those of the checkpoint in `root`, those of the model in `folder`.

    `task` is the one by which the modules behind the model read it, `others` are settings of texts that another rule
    reads.

    Raises:
        CheckpointError: a file that is not readable, or has values of another type.
        UnsupportedModelError: a setting that is not supported.
    """
    file = texts_file(folder)
    texts = read_json(file, optional=True)
    checked = {name: value for name, value in texts.items() if name not in others}
    max_len = _checked_texts(checked, file, folder, task)
    of_all = root / "config_sentence_transformers.json"
    settings = read_json(of_all, optional=True)
    prompts = {**_ALWAYS_THERE, **_prompts(settings.get("prompts"), of_all)}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{of_all}: default_prompt_name is {default!r}, expected one of {', '.join(map(repr, prompts))}"
        )
    return TextRule(
        has_files=True,
        max_len=max_len,
        lower_case=bool(texts.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        truncate_dim=positive(settings.get("truncate_dim"), "truncate_dim", of_all),
        max_active_dims=positive(settings.get("max_active_dims"), "max_active_dims", of_all),
        similarity=_similarity(settings.get("similarity_fn_name"), of_all),
    )


def texts_file(folder: Path) -> Path:
    """Returns the file about texts of the model in `folder`, which may not exist."""
    found = (folder / name for name in _TEXT_FILES if (folder / name).is_file())
    return next(found, folder / _TEXT_FILES[0])


def _prompts(value: Any, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or any(not isinstance(text, str | None) for text in value.values()):
        raise CheckpointError(f"{file}: prompts is {value!r:.80}, expected texts by name")
    return {name: text or "" for name, text in value.items()}


def _similarity(value: Any, file: Path) -> str | None:
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{file}: similarity_fn_name is {value!r:.80}, expected a name")
    return None if value is None else {"dot_product": "dot"}.get(value, value)


def positive(value: Any, name: str, file: Path) -> int | None:
    """Returns a setting that is a positive number or None; else raises CheckpointError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise CheckpointError(f"{file}: {name} is {value!r}, expected a positive number")
    return value


def _checked_texts(texts: Mapping[str, Any], file: Path, folder: Path, task: str) -> int | None:
    """Returns the most tokens of a text by ``sentence_bert_config.json``.

    Raises UnsupportedModelError for unsupported settings.
    """
    texts = {_OLD_NAMES.get(name, name): value for name, value in texts.items()}
    of_tokenizer = dict(texts.get("processor_kwargs") or {})
    by_tokenizer = of_tokenizer.pop("model_max_length", None)
    of_torch, of_config = texts.get("model_kwargs") or {}, texts.get("config_kwargs") or {}
    config = read_json(folder / "config.json", optional=True) if of_config else {}
    method = {"method": "forward", "method_output_name": _OUTPUTS[task]}
    modalities = texts.get("modality_config") or {"text": method}
    usual = {
        "transformer_task": texts.get("transformer_task", task) == task,
        "module_output_name": texts.get("module_output_name", "token_embeddings") == "token_embeddings",
        "modality_config": modalities.get("text") == method and "message" not in modalities,
        "processor_kwargs": set(of_tokenizer) <= _OF_PADDING,
        "model_kwargs": set(of_torch) <= _OF_TORCH,
        "config_kwargs": all(config.get(key) == value for key, value in of_config.items() if key not in _OF_TORCH),
    }
    honoured = {"max_seq_length", "do_lower_case", "unpad_inputs", *usual}
    wrong = [name for name, is_usual in usual.items() if not is_usual]
    wrong += [name for name, value in texts.items() if name not in honoured and value]
    if wrong:
        raise UnsupportedModelError(
            f"{file}: {wrong[0]} is {repr(texts[wrong[0]])[:120]}, which is not honoured here; pass pooling= to leave "
            "the files of sentence-transformers out of account"
        )
    return positive(by_tokenizer or texts.get("max_seq_length"), "max_seq_length", file)


def read_json(file: Path, *, optional: bool = False) -> Any:
    """Returns the JSON object in `file`; an `optional` missing file is empty.

    Raises CheckpointError for a file that is missing or no JSON object.
    """
    if optional and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} lacks {file.name}, which modules.json asks for: get it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable as JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}: get the file again")
    return content
