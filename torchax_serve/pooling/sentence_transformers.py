"""Pooling layers of a checkpoint, read from files of sentence-transformers.

The format is that of sentence-transformers (Reimers and Gurevych, 2019). ``modules.json`` lists the layers in order,
each layer has a folder with a configuration, and two files next to the model configure how texts are tokenized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.modules_json import MODULES, ModuleEntry, modules_root, read_modules
from torchax_serve.pooling.layers import ACTIVATIONS, Layer
from torchax_serve.pooling.methods import POOLINGS
from torchax_serve.pooling.text_rule import TextRule, read_json, text_rule, texts_file
from torchax_serve.pooling.token_rule import MODEL_TYPES, TokenRule, prompts_with_prefixes, token_rule

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_POOLING_KEYS = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *_FLAGS}
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
_PLACES = {"module_input_name", "module_output_name"}
_TOKENS, _TEXT = "token_embeddings", "sentence_embedding"
_SPLADE_KEYS = {"pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension"}
_OF_TOKENS = frozenset({"query_length", "document_length", "query_expansion"})
"""Settings of texts that multi-vector models alone have."""
_KINDS = "Transformer, Pooling, SpladePooling, MultiVectorMask, Dense, LayerNorm, Normalize and Dropout of "
_KINDS += "sentence_transformers"
_PYLATE_DENSE = "pylate.models.Dense.Dense"
_POOLS = ("pooling", "splade")
"""Kinds of layers that make one embedding of those of the tokens."""


@dataclasses.dataclass(frozen=True)
class LayerFiles:
    """File with the weights of a layer, and their shapes by name."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class EmbeddingRule:
    """Rule from a model's hidden states to embeddings.

    Attributes:
        layers: Layers in their order.
        files: Weight file of each layer; None for a layer without weights.
        text: How texts are tokenized.
        tokens: Which tokens have an embedding, of a multi-vector model; None: each text has one.
    """

    layers: tuple[Layer, ...]
    files: tuple[LayerFiles | None, ...]
    text: TextRule = dataclasses.field(default_factory=TextRule)
    tokens: TokenRule | None = None


def rule_in(folder: Path | None) -> EmbeddingRule | None:
    """Reads the rule from the checkpoint in `folder`; None if there is no ``modules.json``.

    Raises:
        CheckpointError: files that are not readable or incomplete.
        UnsupportedModelError: an unknown layer or setting.
    """
    root = None if folder is None else modules_root(folder)
    if root is None or folder is None:
        return None
    file = root / "config_sentence_transformers.json"
    settings, modules = read_json(file, optional=True), read_modules(root / MODULES)
    masks = [root / each.path / "config.json" for each in modules if each.type.endswith(".MultiVectorMask")]
    if masks or settings.get("model_type") in MODEL_TYPES:
        return _multi_vector(root, folder, modules, settings, read_json(masks[0]) if masks else None)
    steps: list[tuple[Layer, LayerFiles | None]] = []
    for module in modules:
        steps += _layers_of(module, root, has_pooled=any(layer.kind in _POOLS for layer, _ in steps))
    kinds = [layer.kind for layer, _ in steps]
    if (num_pooled := sum(kind in _POOLS for kind in kinds)) != 1:
        raise CheckpointError(
            f"{root / MODULES}: expected one module of type Pooling, got {num_pooled}; pass pooling=, or get the file "
            "again"
        )
    if "splade" in kinds[1:]:
        raise UnsupportedModelError(
            f"{root / MODULES}: expected SpladePooling right behind the model, whose logits it reads, got {kinds[0]} "
            "between them"
        )
    task = "fill-mask" if kinds[0] == "splade" else "feature-extraction"
    text = text_rule(root, folder, task=task)
    return EmbeddingRule(tuple(step[0] for step in steps), tuple(step[1] for step in steps), text)


def _multi_vector(
    root: Path,
    folder: Path,
    modules: Sequence[ModuleEntry],
    settings: Mapping[str, Any],
    mask: Mapping[str, Any] | None,
) -> EmbeddingRule:
    """Returns the rule of a multi-vector model, whose layers read hidden states of tokens."""
    steps: list[tuple[Layer, LayerFiles | None]] = []
    for module in modules:
        steps += _layers_of(module, root, has_pooled=False, default=_TOKENS)
    if any(layer.kind in _POOLS for layer, _ in steps):
        raise UnsupportedModelError(f"{root / MODULES}: expected no pooling in a multi-vector model, got one")
    if mask is None:  # PyLate scales embeddings outside of its modules
        steps.append((Layer("normalize"), None))
    text = text_rule(root, folder, others=_OF_TOKENS)
    text = dataclasses.replace(text, prompts=prompts_with_prefixes(text.prompts, settings))
    file = root / "config_sentence_transformers.json"
    tokens = token_rule(read_json(texts_file(folder), optional=True), settings, mask, file)
    return EmbeddingRule(tuple(step[0] for step in steps), tuple(step[1] for step in steps), text, tokens)


def _layers_of(
    module: ModuleEntry, root: Path, *, has_pooled: bool, default: str = _TEXT
) -> list[tuple[Layer, LayerFiles | None]]:
    """Returns the layers of a module, which reads `default` unless its files name an input."""
    kind, path = module.type.rpartition(".")[2], root / module.path
    if not module.type.startswith("sentence_transformers.") and module.type != _PYLATE_DENSE:
        kind = ""  # code of somebody's own, whatever its name
    if module.is_transformer or kind == "Dropout" or (kind == "MultiVectorMask" and default == _TOKENS):
        return []
    if kind == "Pooling":
        return [(_pooling(read_json(path / "config.json"), path / "config.json"), None)]
    if kind == "SpladePooling":
        return [(_splade(read_json(path / "config.json"), path / "config.json"), None)]
    if kind == "Dense":
        config = read_json(path / "config.json")
        _check_place({"module_input_name": default} | config, path / "config.json", has_pooled=has_pooled)
        return [(_dense(config, path / "config.json"), LayerFiles(path, _dense_shapes(config, path / "config.json")))]
    if kind == "LayerNorm":
        _check_place({"module_input_name": default}, path, has_pooled=has_pooled)
        size = _size(read_json(path / "config.json"), "dimension", path / "config.json")
        return [(Layer("layer_norm"), LayerFiles(path, {"norm.weight": (size,), "norm.bias": (size,)}))]
    if kind == "Normalize":
        config = {"module_input_name": default} | read_json(path / "config.json", optional=True)
        _check_place(config, path / "config.json", has_pooled=has_pooled)
        return [(Layer("normalize"), None)]
    raise UnsupportedModelError(
        f"{root / MODULES} has a module of type {module.type}, expected {_KINDS}; pass pooling= to leave the file out "
        "of account"
    )


def _check_place(config: Mapping[str, Any], file: Path, *, has_pooled: bool) -> None:
    """Raises for a layer that reads or writes other features than the layers before it."""
    read = config.get("module_input_name") or _TEXT
    written = config.get("module_output_name") or read
    expected = _TEXT if has_pooled else _TOKENS
    if (read, written) != (expected, expected):
        raise UnsupportedModelError(
            f"{file}: expected a module that reads and writes {expected} at its place in {MODULES}, got one that reads "
            f"{read} and writes {written}; pass pooling= to leave the file out of account"
        )


def _check_keys(config: Mapping[str, Any], known: set[str], file: Path) -> None:
    if unknown := sorted(set(config) - known):
        raise UnsupportedModelError(
            f"{file}: expected {', '.join(sorted(known))}, got {', '.join(unknown)}, which would not be honoured; pass "
            "pooling= to leave the file out of account"
        )


def _pooling(config: dict[str, Any], file: Path) -> Layer:
    _check_keys(config, _POOLING_KEYS, file)
    value = config.get("pooling_mode")
    if value is not None:
        names = [value] if isinstance(value, str) else list(value)
        found = tuple(_NAMES.get(name, name) for name in names)
    else:
        found = tuple(name for flag, name in _FLAGS.items() if config.get(flag)) or ("mean",)
    if not found or set(found) - set(POOLINGS):
        raise CheckpointError(f"{file}: expected a pooling of {', '.join(POOLINGS)}, got {value}")
    return Layer("pooling", found, reads_prompt=bool(config.get("include_prompt", True)))


def _splade(config: dict[str, Any], file: Path) -> Layer:
    _check_keys(config, _SPLADE_KEYS, file)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise CheckpointError(
            f"{file}: expected pooling_strategy max or sum and activation_function relu or log1p_relu, got "
            f"{strategy!r} and {activation!r}"
        )
    return Layer("splade", (strategy,), activation=activation)


def _dense(config: dict[str, Any], file: Path) -> Layer:
    _check_keys(config, _DENSE_KEYS | _PLACES, file)
    value = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = value.rpartition(".")[2]
    if not value.startswith("torch.") or name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{file}: activation {value}, expected torch.nn's {', '.join(ACTIVATIONS)}")
    return Layer("dense", activation=name, has_residual=bool(config.get("use_residual", False)))


def _dense_shapes(config: dict[str, Any], file: Path) -> dict[str, tuple[int, ...]]:
    num_in, num_out = _size(config, "in_features", file), _size(config, "out_features", file)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (num_out, num_in)}
    if config.get("bias", True):
        shapes["linear.bias"] = (num_out,)
    if config.get("use_residual") and num_in != num_out:
        shapes["residual.weight"] = (num_out, num_in)
    return shapes


def _size(config: Mapping[str, Any], name: str, file: Path) -> int:
    found = config.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise CheckpointError(f"{file}: {name} is {found!r}, expected a positive number: get the file again")
    return found
