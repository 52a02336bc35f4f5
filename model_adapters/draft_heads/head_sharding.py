"""Layout of a draft head on the mesh of its model.

It has the rules of the model's layers where names agree, and else those that follow from shapes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from model_adapters.bridge.views import named_tensors
from model_adapters.draft_heads.eagle3 import Eagle3Head
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.sharding.model_sharding import ModelSharding
from sharding_rules import TABLES, Rule, TensorPlacement
from sharding_rules.shape_inference import infer_rules

VOCABULARY = Rule(r".*(embed_tokens|lm_head|shared_head\.head)\.weight", ("vocab", "embed"))
"""Embedding and head that the files of a draft head have themselves."""

_LAYER = re.compile(r"(?:.*\.)?(?:layers\.\d+|midlayer)\.(.+)")
"""Name of a tensor of a decoder layer; behind it is its name in the layer."""


def head_sharding(
    head: PreTrainedModel, on_mesh: ModelSharding, model_type: str, shared: Mapping[str, str], *, refuse_uneven: bool
) -> ModelSharding:
    """Returns how a head lies on the mesh of its model.

    Args:
        head: The head, on the meta device.
        on_mesh: How the model lies there.
        model_type: Type of the model's decoder.
        shared: Names of its tensors that are the model's, with the model's names; they stay where the model has them.
        refuse_uneven: As of `load_model`.

    Raises:
        InvalidArgumentError: zeros would be added, which was refused.
    """
    is_llama = isinstance(head, Eagle3Head)  # whatever the model is
    rules = TABLES["llama"].rules if is_llama else _layer_rules(on_mesh.placed)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(head).items()}
    known = [_rule_of(name, rules) for name in shapes if name not in shared]
    of_model = [_named(name, on_mesh.placed[theirs].rule) for name, theirs in shared.items()]
    first = [rule for rule in (*known, *of_model) if rule is not None]
    table = infer_rules(shapes, head.config.hidden_size, f"the draft head {type(head).__name__}", first)
    named = TABLES.get("llama" if is_llama else model_type)
    if named is not None:
        table = dataclasses.replace(table, pads=named.pads)
    sharding = ModelSharding.of(head, on_mesh.mesh, refuse_uneven=refuse_uneven, table=table)
    placed = dict(sharding.placed)
    for name, theirs in shared.items():
        placed[name] = dataclasses.replace(on_mesh.placed[theirs], name=name)
    return dataclasses.replace(sharding, placed=placed)


def assistant_sharding(loaded: LoadedModel, target: LoadedModel, shared: Mapping[str, str]) -> ModelSharding | None:
    """Returns how an assistant lies beside its model on a mesh; None for one device.

    Args:
        loaded: The assistant, loaded on the mesh of the model; it is the submodule ``assistant`` of the head.
        target: The served model.
        shared: As of `head_sharding`.
    """
    own, on_mesh = loaded.sharding, target.sharding
    if own is None or on_mesh is None:
        return None
    of_parts = {f"assistant.{name}": each for name, each in own.placed.items()}
    of_parts |= {name: on_mesh.placed[theirs] for name, theirs in shared.items()}
    placed = {name: dataclasses.replace(each, name=name) for name, each in of_parts.items()}
    attributes = tuple((f"assistant.{name}", attribute, value) for name, attribute, value in own.attributes)
    return dataclasses.replace(own, placed=placed, attributes=attributes)


def _layer_rules(placed: Mapping[str, TensorPlacement]) -> list[Rule]:
    """Returns the rules of a model's layers, by the names that tensors have in a layer."""
    found: dict[tuple[str, int], Rule] = {}
    for name, each in placed.items():
        if match := _LAYER.fullmatch(name):
            found.setdefault((match[1], len(each.shape)), _named(f"layers.0.{match[1]}", each.rule))
    return list(found.values())


def _rule_of(name: str, rules: Sequence[Rule]) -> Rule | None:
    """Returns the rule of a tensor by its name in a layer, or its own; None if there is none."""
    match = _LAYER.fullmatch(name)
    wanted = name if match is None else f"layers.0.{match[1]}"
    rule = next((rule for rule in (*rules, VOCABULARY) if re.fullmatch(rule.pattern, wanted)), None)
    return None if rule is None else _named(name, rule)


def _named(name: str, rule: Rule) -> Rule:
    return dataclasses.replace(rule, pattern=re.escape(name), optional=False)
