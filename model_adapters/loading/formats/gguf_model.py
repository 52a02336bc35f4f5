"""The model in a GGUF file: its configuration, the names of its tensors, its tokenizer.

What a key or a name means is taken from the tables of transformers and of the package `gguf`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as hf_gguf
from transformers.integrations import gguf as hf_readers

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.formats.gguf_architectures import (
    ARCHITECTURES,
    Architecture,
    Falcon,
    architecture_of,
    complete,
    config_keys,
    config_values,
)
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.gguf_rope import set_rope
from model_adapters.loading.formats.gguf_words import split_words
from model_adapters.loading.weight_sink import exclusive_load, replaced
from model_adapters.program.turn_ends import ends_among

_INEXACT = ("deci", "minimax-m2", "gemma4", "qwen35", "qwen35moe", "t5", "t5encoder", "umt5")
"""Architectures whose configuration or tensors transformers' tables do not give completely."""

# Keys of an architecture that say the same for all its models or are read from tensors.
_IMPLIED_KEYS = {
    "rope.dimension_count",
    "attention.value_length",
    "attention.key_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.layer_norm_epsilon",
    "attention.causal",
    "use_parallel_residual",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "tensor_data_layout",
    "vocab_size",
}


def require_gguf() -> Any:
    """Returns the package `gguf`.

    Raises UnsupportedModelError with the command that installs it.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UnsupportedModelError(
            "a GGUF file needs the package gguf, which is not installed: pip install gguf"
        ) from error


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Returns the configuration of the model in `file`.

    Raises:
        UnsupportedModelError: an architecture that is not read, or settings of it.
        CheckpointError: metadata that does not make a configuration.
    """
    require_gguf()
    architecture = file.architecture
    if architecture not in (known_names := _known_architectures()):
        known = ", ".join(sorted(known_names))
        raise UnsupportedModelError(
            f"{file.path} is a GGUF file of architecture {architecture!r}, which is not read "
            f"(expected one of {known}): use the model's safetensors folder"
        )
    own = architecture_of(file)
    _check_keys(file, own)
    try:
        if own is not None:
            config = AutoConfig.for_model(own.model_type, **config_values(file, own))
        else:
            with _header_for_transformers(file):
                config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except Exception as error:  # configuration classes check their values with whatever exception they like
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"the header of {file.path} makes no configuration ({lines[0]})") from error
    if "token_embd.weight" in file.tensors:
        config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    for key, name in _EXTRA_KEYS.items():
        value = file.metadata.get(f"{architecture}.{key}")
        if value is not None and hasattr(config, name):
            setattr(config, name, value)
    complete(file, config)
    set_rope(file, config)
    known_ends = _ends_of(file, config.eos_token_id)
    config.eos_token_id = known_ends if len(known_ends) > 1 else config.eos_token_id
    return config


_CONTROL = 3
"""Type of control tokens in `tokenizer.ggml.token_type`."""


def _ends_of(file: GgufFile, eos: Any) -> list[int]:
    """Returns the ids of tokens that end an answer, by the header and among control tokens."""
    found = [eos, *(file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{name}") or () for name in ("tokens", "token_type"))
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    found += [control[text] for text in ends_among(control)]
    return list(dict.fromkeys(end for end in found if end is not None))


_SIZES = ("block_count", "embedding_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
"""Keys that a file must have, as in llama.cpp: configurations have numbers of other models in their place."""


def _check_keys(file: GgufFile, own: Architecture | None) -> None:
    """Raises CheckpointError for numbers of the architecture that are missing or no sizes."""
    read, given = config_keys(own) if own else _config_keys(file.architecture), file.metadata.get

    def require(key: str, value: Any, *, is_integer: bool) -> None:
        values = value if isinstance(value, list) and value else [value]
        kinds = (int,) if is_integer else (int, float)
        if not all(isinstance(each, kinds) and math.isfinite(each) and each > 0 for each in values):
            got = "none" if value is None else repr(value)
            raise CheckpointError(
                f"{file.path}: expected {file.architecture}.{key} as a positive number in the header, got {got}: "
                "get the file again"
            )

    for key in _SIZES:
        if key in read:
            require(key, given(f"{file.architecture}.{key}"), is_integer=True)
    num_layers, stated = file.num_layers, given(f"{file.architecture}.block_count")
    if (
        "block_count" in read and num_layers and isinstance(stated, int) and stated > num_layers
    ):  # a class would be built with all of them
        raise CheckpointError(
            f"{file.path}: expected {file.architecture}.block_count of at most {num_layers} in the header, for as many "
            f"layers are in the file, got {stated}: get the file again"
        )
    epsilons = [key for key in _EPSILONS if given(f"{file.architecture}.{key}") is not None]
    needed = [key for key in _EPSILONS if key in read]
    for key in epsilons or needed:
        require(key, given(f"{file.architecture}.{key}"), is_integer=False)
    for key, is_integer in (("context_length", True), ("rope.freq_base", False)):  # these have defaults
        if (value := given(f"{file.architecture}.{key}")) is not None:
            require(key, value, is_integer=is_integer)


def _config_keys(architecture: str) -> set[str]:
    """Returns the keys of an architecture's configuration that transformers reads."""
    renamed = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    table: Any = hf_gguf.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return set(table.get(renamed, {}))


# Keys that transformers' table lacks, and attributes of configurations.
_EXTRA_KEYS = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _known_architectures() -> set[str]:
    names = set(require_gguf().MODEL_ARCH_NAMES.values())
    same = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
    by_transformers = {name for name in names if same.get(name, name) in hf_gguf.GGUF_SUPPORTED_ARCHITECTURES}
    return by_transformers - set(_INEXACT) | ARCHITECTURES.keys()


def generation_config_of(config: PreTrainedConfig) -> GenerationConfig:
    """Returns the generation configuration.

    A GGUF file has one of its own only in special tokens.
    """
    return GenerationConfig.from_model_config(config)


def tokenizer_of(file: GgufFile) -> Any:
    """Returns transformers' tokenizer of the vocabulary in `file`, with its chat template.

    None without vocabulary.

    Raises:
        CheckpointError: the vocabulary makes no tokenizer.
    """
    if not file.metadata.get("tokenizer.ggml.tokens"):
        return None
    reads_file_itself = hasattr(hf_readers, "convert_gguf_tokenizer")  # as recent releases do
    header = file if architecture_of(file) is None else _like_a_known_one(file)
    try:
        with _header_for_transformers(header, with_vocabulary=not reads_file_itself):
            found = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
        split_words(found, file.metadata)
        return found
    except Exception as error:  # of the library of tokenizers, which has no class for it
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"the vocabulary of {file.path} makes no tokenizer ({type(error).__name__}: {lines[0]}): get the file again"
        ) from error


def _like_a_known_one(file: GgufFile) -> GgufFile:
    """Returns the header under an architecture that transformers reads, for the tokenizer."""
    name = "gemma2" if file.architecture == "gemma" else "llama"
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith(f"{file.architecture}.")}
    return GgufFile(file.path, {**metadata, "general.architecture": name}, file.tensors)


@dataclass(frozen=True)
class _HeaderField:
    """A value of the header in the form of `gguf.ReaderField`."""

    parts: list[Any]
    data: list[int]
    types: list[int]

    @classmethod
    def of(cls, value: Any) -> _HeaderField:
        values = value if isinstance(value, list) else [value]
        kinds = {bool: 7, int: 4, float: 6, str: 8}
        kind = kinds[type(values[0])] if values else 4
        parts = [each.encode() if isinstance(each, str) else [each] for each in values]
        return cls(parts, list(range(len(parts))), [9, kind] if isinstance(value, list) else [kind])


_VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "scores"))


@contextlib.contextmanager
def _header_for_transformers(file: GgufFile, *, with_vocabulary: bool = False) -> Iterator[None]:
    """Gives transformers the header that was read already.

    `gguf.GGUFReader` takes seconds for a vocabulary.

    transformers reads the configuration's keys and the tensors' names from it, and in older releases the vocabulary.
    """
    large = () if with_vocabulary else _VOCABULARY
    metadata = {key: value for key, value in file.metadata.items() if key not in large}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens:
        metadata.setdefault(f"{file.architecture}.vocab_size", len(tokens))
    fields = {key: _HeaderField.of(value) for key, value in metadata.items() if value != [] and _is_plain(value)}
    fields.setdefault("general.name", _HeaderField.of("model"))
    reader = SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=name) for name in file.tensors])
    with exclusive_load(), replaced(require_gguf(), "GGUFReader", lambda path, *args, **kwargs: reader):
        yield


def _is_plain(value: Any) -> bool:
    return not (isinstance(value, list) and any(isinstance(each, list) for each in value))


def processor_of(file: GgufFile, config: PreTrainedConfig) -> Any:
    """Returns transformers' object that undoes what llama.cpp's converter changed.

    It is that of an architecture's tensors.
    """
    settings = {**config.to_dict(), "n_head": getattr(config, "num_attention_heads", None)}
    own = architecture_of(file)
    by_name = {**hf_gguf.TENSOR_PROCESSORS, "falcon": Falcon}
    return (own.processor if own else by_name.get(file.architecture, hf_gguf.TensorProcessor))(config=settings)


def tensor_names(file: GgufFile, module: PreTrainedModel, processor: Any) -> dict[str, str]:
    """Returns the parameter of `module` for each tensor of the file that has one.

    Args:
        file: The header.
        module: The model on the meta device.
        processor: From `processor_of`.
    """
    gguf = require_gguf()
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.get_tensor_name_map(architecture, module.config.get_text_config().num_hidden_layers)
    names: dict[str, str] = {}
    for parameter in module.state_dict():
        _add_name(names, table, processor, parameter)
    known = {}
    for name in file.tensors:
        found = names.get(name) or names.get(name.removesuffix(".weight"))
        if found is not None:
            known[name] = found
    return known


def _add_name(names: dict[str, str], table: Any, processor: Any, parameter: str) -> None:
    """Adds the tensors of one parameter.

    They are found by its name, or by the part of it behind a submodule's name.
    """
    prefix, rest = "", parameter
    while rest:
        name = processor.preprocess_name(rest)
        stem, dot, kind = name.rpartition(".")
        is_plain = dot and kind in ("weight", "bias")
        found = table.get_name(stem if is_plain else name)
        suffix = f".{kind}" if is_plain else ""
        if found is not None:
            names.setdefault(found + suffix, prefix + name)
            return
        before = len(names)
        processor.perform_fallback_tensor_mapping(names, suffix, prefix, name)
        if len(names) > before:
            return
        head, _, rest = rest.partition(".")
        prefix += f"{head}."


def unused_keys(file: GgufFile) -> list[str]:
    """Returns the keys of the header about the architecture that nothing reads."""
    architecture = file.architecture
    own = architecture_of(file)
    known = (config_keys(own) if own else _config_keys(architecture)) | _IMPLIED_KEYS
    keys = [key.removeprefix(f"{architecture}.") for key in file.metadata if key.startswith(f"{architecture}.")]
    return sorted(key for key in keys if key not in known and not key.startswith("rope."))


def file_in(folder: Path) -> Path | None:
    """Returns the only GGUF file of `folder` that is a language model; None without any.

    Raises:
        CheckpointError: several of them.
    """
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.lower().startswith("mmproj"))
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(files)} GGUF files ({', '.join(path.name for path in files[:4])}): name one of them"
        )
    return files[0] if files else None
