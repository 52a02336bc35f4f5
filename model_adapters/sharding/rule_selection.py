"""Rules of a model: from our table for its type, or from the model itself.

Without a table they are those of recurrent layers, of the model's own parallel plan and of its shapes, in this order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from model_adapters.sharding.recurrent_rules import recurrent_rules
from sharding_rules import TABLES, Rule, RuleTable
from sharding_rules.hf_tp_plans import rules_from_tp_plan
from sharding_rules.shape_inference import infer_rules


def rules_for(module: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], num_shards: int = 1) -> RuleTable:
    """Returns the rule table of `module`, whose tensors have `shapes`.

    Recurrent layers whose heads `num_shards` devices divide have rules of their own. What the model's own plan does not
    name is laid out by shape.
    """
    config = module.config.get_text_config(decoder=True)
    table = TABLES.get(config.model_type)
    # Not of a model with media encoders, which the table does not cover.
    if table is not None and config is module.config and (found := _with_head(table, module, shapes)) is not None:
        return found
    tp_plan = getattr(config, "base_model_tp_plan", None) or {}
    ep_plan = getattr(config, "base_model_ep_plan", None) or {}
    part = "" if config is module.config or module.config.is_encoder_decoder else _decoder_name(module)
    plan = rules_from_tp_plan(tp_plan, ep_plan, config.model_type, shapes, part)
    first = (*_vocabulary(module, shapes), *recurrent_rules(module, num_shards), *plan)
    return infer_rules(shapes, getattr(config, "hidden_size", None), config.model_type, first)


def _with_head(table: RuleTable, module: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> RuleTable | None:
    """Returns `table` with rules for the head of `module`; None if it has other names.

    Of heads, tables know that of language models alone.
    """
    if module.base_model is module:
        return table
    patterns = [re.compile(rule.pattern) for rule in table.rules]
    known = {name for name in shapes if any(pattern.fullmatch(name) for pattern in patterns)}
    base = f"{module.base_model_prefix}."
    if not any(name.startswith(base) for name in known):
        return None
    head = {name: shape for name, shape in shapes.items() if name not in known and not name.startswith(base)}
    inferred = infer_rules(head, getattr(module.config, "hidden_size", None), table.family)
    return dataclasses.replace(table, rules=(*table.rules, *inferred.rules))


def _decoder_name(module: PreTrainedModel) -> str:
    """Returns the name of the part of `module` under its text configuration; empty for all."""
    decoder = module.get_decoder()
    return next((name for name, part in module.named_modules() if part is decoder), "")


def input_embeddings(module: PreTrainedModel) -> torch.nn.Module | None:
    """Returns what embeds the model's words; None where its class does not say."""
    try:
        return module.get_input_embeddings()
    except NotImplementedError:
        return None


def _vocabulary(module: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    """Returns rules for the embedding table and the head, which plans of base models omit.

    There are none for other forms.
    """
    parts = (input_embeddings(module), module.get_output_embeddings())
    names = [f"{name}.weight" for name, child in module.named_modules() if any(child is part for part in parts)]
    axes = ("vocab", "embed")
    return [Rule(re.escape(name), axes, True, "plan of the model") for name in names if len(shapes.get(name, ())) == 2]
