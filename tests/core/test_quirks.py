"""Quirks: one record for each architecture, of types that transformers has, with no field that nobody reads."""

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from model_adapters import quirks
from model_adapters.quirks.quirk import Quirk
from torchax_serve.cli.shared.parity_status import quirk_of_type
from torchax_serve.parity.tasks import TASKS, all_shipped

ROOT = Path(__file__).parents[2]
FILES = {name: importlib.import_module(f"model_adapters.quirks.{name}") for name in quirks.names()}
WITH_QUIRK = sorted(name for name, file in FILES.items() if hasattr(file, "QUIRK"))


def folders_of_transformers():
    """Folders of modeling code, of the installed version and of all that the shipped results are of."""
    types = set(CONFIG_MAPPING_NAMES)
    for task in TASKS:
        for _, results in all_shipped(task):
            types |= set(results)
    return {model_type_to_module_name(name) for name in types}


@pytest.mark.parametrize("name", WITH_QUIRK)
def test_a_quirk_says_something_and_is_of_an_architecture_of_transformers(name):
    file = FILES[name]
    assert isinstance(file.QUIRK, Quirk) and file.QUIRK.summary() and file.__doc__
    architectures = {folder for folder, shared in quirks.SAME_AS.items() if shared == name} or {name}
    assert architectures <= folders_of_transformers()


def test_files_without_a_quirk_are_used_by_several():
    for name in FILES.keys() - set(WITH_QUIRK) - {"quirk"}:
        assert len(quirks.architectures_of(name)) > 2, name


def test_shared_files_are_those_of_quirks_and_shadow_none():
    assert set(quirks.SAME_AS.values()) <= set(WITH_QUIRK)
    assert not quirks.SAME_AS.keys() & FILES.keys()


def test_every_field_is_read_outside_of_its_file():
    read = set()
    for package in ("model_adapters", "torchax_serve"):
        for path in (ROOT / package).rglob("*.py"):
            names = ("self",) if path.name == "quirk.py" else ("quirk",)
            attributes = (x for x in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(x, ast.Attribute))
            read |= {node.attr for node in attributes if is_quirk(node.value, names)}
    fields = {field.name for field in dataclasses.fields(Quirk)}
    assert fields - read == set()


def is_quirk(node, names):
    """Whether an expression is a quirk: the result of ``of`` or ``of_type``, or a variable of `names`."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in ("of", "of_type", "_of_folder")
    return isinstance(node, ast.Name) and node.id in names


def test_no_table_of_types_stands_elsewhere():
    for path in ("program/padding_safety.py", "caches/native_cache.py", "caches/encoder_mask.py"):
        assert "frozenset" not in (ROOT / "model_adapters" / path).read_text("utf-8"), path


def test_types_and_modules_have_the_quirk_of_their_folder():
    assert quirks.of_type("openai-gpt").causal_without_mask
    assert quirks.of_type("seamless_m4t_v2") is quirks.of_type("seamless_m4t")
    assert not quirks.of_type("llama").summary() and not quirks.of_type("tiny_example").summary()
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 32}
    assert not quirks.of(transformers.DistilBertModel(transformers.DistilBertConfig(**sizes))).summary()

    class Derived(transformers.MptModel):
        pass

    model = Derived(transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32))
    assert quirks.of(model) is quirks.of_type("mpt") and quirks.of(model).right_aligned_cache


@pytest.mark.parametrize(
    ("class_name", "has_reason"), [("MllamaForCausalLM", False), ("MllamaForConditionalGeneration", True)]
)
def test_a_reason_may_hold_for_some_models_of_an_architecture(class_name, has_reason):
    model = object.__new__(getattr(transformers, class_name))
    vars(model)["config"] = getattr(transformers, class_name).config_class()
    assert (quirks.of(model).native_cache_reason_of(model) is not None) == has_reason


def test_the_command_line_shows_a_quirk():
    assert quirk_of_type("llama") == {}
    assert quirk_of_type("doge") == {
        "file": "model_adapters/quirks/doge.py",
        "reason": (FILES["doge"].__doc__ or "").partition("\n")[0],
        "mixes_neighbours": "yes",
        "keeps_value_heads": "yes",
    }
    assert quirk_of_type("aria")["methods"] == "AriaGroupedExpertsGemm.forward"
