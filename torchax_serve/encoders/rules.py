"""How embeddings are made of a model's output, as the checkpoint's own files say it.

The files are those of sentence-transformers (Reimers and Gurevych, 2019): ``modules.json`` lists what is done in turn,
and each step has a folder with a configuration.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, UnsupportedModelError

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean")
"""mean: of all tokens; cls: the first; last; max: by dimension; mean_sqrt_len: the sum over the square root of the
number of tokens; weighted_mean: later tokens weigh more, by their place."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling; its weights are in `folder`."""

    folder: Path
    activation: str | None


@dataclasses.dataclass(frozen=True)
class EmbeddingRule:
    """From a model's hidden states to embeddings.

    Attributes:
        pooling: one or several of `POOLINGS`, whose results are joined.
        dense: layers behind it, in order.
        normalize: to length 1, at the end.
        max_len: most tokens of a text; None: what the model takes.
        lower_case: texts are made lower case first.
        prompts: texts that stand before a text, by name.
        default_prompt: name of the one that is used where none is asked for.
    """

    pooling: tuple[str, ...]
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    max_len: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None


def rule_in(folder: Path | None) -> EmbeddingRule | None:
    """What the files in `folder` say; None where there is no ``modules.json``.

    Raises:
        CheckpointError: files that are not readable or lack what they must have.
        UnsupportedModelError: a step that is not known here.
    """
    if folder is None or not (folder / "modules.json").is_file():
        return None
    modules = _json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise CheckpointError(f"{folder / 'modules.json'}: expected a list of modules with a type, get the file again")
    rule = EmbeddingRule(())
    for module in modules:
        kind, path = str(module["type"]).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            rule = _with_texts(rule, folder)
        elif kind == "Pooling":
            rule = dataclasses.replace(rule, pooling=_pooling(_json(path / "config.json"), path / "config.json"))
        elif kind == "Dense":
            rule = dataclasses.replace(rule, dense=(*rule.dense, _dense(path)))
        elif kind == "Normalize":
            rule = dataclasses.replace(rule, normalize=True)
        else:
            raise UnsupportedModelError(
                f"{folder / 'modules.json'} has a module of type {module['type']}, expected Transformer, Pooling, "
                "Dense and Normalize; pass pooling= to leave the file out of account"
            )
    if not rule.pooling:
        raise CheckpointError(f"{folder / 'modules.json'} lists no pooling: pass pooling=, or get the file again")
    return rule


def _with_texts(rule: EmbeddingRule, folder: Path) -> EmbeddingRule:
    texts = _json(folder / "sentence_bert_config.json", optional=True)
    prompts = _json(folder / "config_sentence_transformers.json", optional=True)
    return dataclasses.replace(
        rule,
        max_len=texts.get("max_seq_length"),
        lower_case=bool(texts.get("do_lower_case", False)),
        prompts={name: str(text) for name, text in (prompts.get("prompts") or {}).items()},
        default_prompt=prompts.get("default_prompt_name"),
    )


def _pooling(config: dict[str, Any], file: Path) -> tuple[str, ...]:
    said = config.get("pooling_mode")
    if said is not None:
        names = [said] if isinstance(said, str) else list(said)
        found = tuple(_NAMES.get(name, name) for name in names)
    else:
        found = tuple(name for flag, name in _FLAGS.items() if config.get(flag))
    if not found or set(found) - set(POOLINGS):
        raise CheckpointError(f"{file}: expected a pooling of {', '.join(POOLINGS)}, got {said or 'none'}")
    return found


def _dense(folder: Path) -> Dense:
    config = _json(folder / "config.json")
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: activation {activation}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} holds no model.safetensors, which its layer's weights are expected in")
    return Dense(folder, _ACTIVATIONS[activation])


def _json(file: Path, *, optional: bool = False) -> Any:
    if optional and not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON ({error}): get the file again") from error
