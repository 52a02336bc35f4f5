"""Tiny causal configurations have a layer of every kind that the code of their type tells apart."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
from transformers import configuration_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from parity_sweep.tiny.config import tiny_config
from torchax_serve.parity.tasks import CAUSAL, TASKS

KINDS = frozenset(configuration_utils.ALLOWED_LAYER_TYPES)
LISTS = {"layer_types": ("layer_types", "layers_block_type"), "mlp_layer_types": ("mlp_layer_types",)}
"""Fields of a configuration with a kind for each layer, by the first of those that are read alike."""
NAMED = re.compile(r"\b(mlp_)?(layer_types?|layers_block_type|block_type|attention_type)\b")
PARTS = {
    "hybrid": {"full_attention", "linear_attention"},
    "hybrid_sliding": {"sliding_attention", "linear_attention"},
}
"""Kinds of layers that have the parts of others."""

_WINDOWS = "its checkpoints have no windows; the task `configurations` has them"
EXCEPTIONS = {
    "qwen2": ({"sliding_attention"}, _WINDOWS),
    "qwen3": ({"sliding_attention"}, _WINDOWS),
    "dots3_note_text": ({"full_attention"}, "its configuration makes layers of this kind `indexed_attention`"),
    "minimax_m3_vl_text": (
        {"minimax_m3_sparse"},
        "its default has none, and caches here have no form for them; with them, a padded batch has other tokens",
    ),
}
"""Kinds that a tiny text configuration lacks, and why, by its type."""


def known_kinds(source):
    """Kinds that a modeling file compares with, or has a mask of, by the list that they are in."""
    found = {name: set() for name in LISTS}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            if NAMED.search(text):
                group = "mlp_layer_types" if "mlp_layer_type" in text else "layer_types"
                found[group] |= constants(node) & KINDS
        elif isinstance(node, ast.Dict) and node.keys and None not in node.keys:
            keys = set().union(*map(constants, node.keys))
            if len(keys) == len(node.keys) and keys <= KINDS:
                found["layer_types"] |= keys
    return found


def constants(node):
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def lacked(known, config):
    """Kinds of `known` that no layer of a configuration has; one without a list has layers of one kind."""
    found = set()
    for group, names in LISTS.items():
        lists = [getattr(config, name, None) or () for name in names]
        kinds = set().union(*lists)
        if kinds:
            found |= known[group] - kinds.union(*(PARTS.get(kind, ()) for kind in kinds))
    return found


@functools.cache
def modeling_source(config_class):
    """Source of the modeling file beside a configuration's; None if there is none."""
    folder = Path(importlib.import_module(config_class.__module__).__file__).parent
    file = folder / f"modeling_{folder.name}.py"
    return file.read_text() if file.is_file() else None


def text_config(model_type):
    try:
        return tiny_config(model_type).get_text_config()
    except Exception:  # test_parity_table has these
        return None


def test_every_kind_of_layer_is_in_the_tiny_configuration():
    checked, wrong = 0, {}
    for model_type in TASKS[CAUSAL].types():
        config = text_config(model_type)
        source = None if config is None else modeling_source(type(config))
        if source is None:
            continue
        known = known_kinds(source)
        excepted, _ = EXCEPTIONS.get(config.model_type, (set(), ""))
        if missing := lacked(known, config) - excepted:
            wrong[model_type] = sorted(missing)
        checked += len(set().union(*known.values())) > 1
    assert not wrong
    assert checked > 40


@pytest.mark.parametrize("model_type", EXCEPTIONS)
def test_exceptions_are_needed(model_type):
    kinds, _ = EXCEPTIONS[model_type]
    config = tiny_config(model_type)
    assert lacked(known_kinds(modeling_source(type(config))), config) == kinds


def test_kinds_are_read_from_code():
    source = """
class Layer:
    def __init__(self, config, index):
        self.is_attention = config.layer_types[index] != "conv"
        self.mlp = A() if config.mlp_layer_types[index] == "sparse" else B()
masks = {"full_attention": make(), "sliding_attention": make()}
unknown = {"full_attention": 1, "name": 2}
"""
    known = known_kinds(source)
    assert known == {
        "layer_types": {"conv", "full_attention", "sliding_attention"},
        "mlp_layer_types": {"sparse"},
    }
    config = CONFIG_MAPPING["llama"]()
    config.layer_types, config.mlp_layer_types = ["full_attention"] * 2, ["sparse"] * 2
    assert lacked(known, config) == {"conv", "sliding_attention"}
    config.layer_types, config.mlp_layer_types = ["conv", "hybrid_sliding", "full_attention"], ["sparse", "dense"]
    assert lacked(known, config) == set()
