"""Heads for further tasks: what is listed, a check that can fail, the shipped results; and a few types."""

import dataclasses

import pytest
import torch
import transformers
from thorough import except_for
from transformers.models.auto import modeling_auto

from parity_sweep import check_head, heads_table
from parity_sweep.tiny.heads import head_config
from torchax_serve.parity.tasks import HEADS, shipped

_, SHIPPED = shipped(HEADS)
HANDFUL = (
    "levit: image classification",  # a memo of an attribute
    "dinov3_vit: image",  # one of transformers' decorator
    "rf_detr: object detection",  # boxes sorted by their scores
    "parakeet_rnnt: rnnt",  # a decoder without attention
    "longformer: question answering",  # values of the ids
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", except_for(["dinov3_vit: image", "levit: image classification"], HANDFUL))
def test_head_passes(name):
    assert check_head.check(name).status == "passed"


def test_results_are_of_the_heads_that_transformers_has():
    if shipped(HEADS)[0]["transformers"] == transformers.__version__:
        assert set(SHIPPED) == set(check_head.names())


def test_every_type_of_every_mapping_is_in_some_sweep():
    heads = check_head.heads()
    for name in dir(modeling_auto):
        if not (name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")):
            continue
        mapping = name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        if mapping not in check_head.IN_OTHER_SWEEPS:
            assert mapping.lower().replace("_", " ") in heads, name
    assert len(heads["question answering"]) >= 78 and len(heads["token classification"]) >= 102


def test_other_values_fail(monkeypatch):
    expected = {"logits": torch.ones(2), "labels": torch.tensor([1, 2]), "scores": torch.tensor([float("-inf"), 1.0])}
    same = {**expected, "labels": torch.tensor([1, 2], dtype=torch.int32)}
    assert check_head._difference(same, expected) == (0.0, [])
    for name, value in {
        "logits": torch.tensor([1.0, 1.01]),
        "labels": torch.tensor([1, 3], dtype=torch.int32),
        "scores": torch.tensor([0.0, 1.0]),
    }.items():
        assert [each.partition(":")[0] for each in check_head._difference({**same, name: value}, expected)[1]] == [name]
    assert check_head._difference({"logits": torch.ones(2)}, expected)[1] != []


def test_failures_have_a_cause():
    failed = {name for name, result in SHIPPED.items() if result.status != "passed"}
    assert failed == set(heads_table.CAUSES)


def test_failure_in_the_section():
    passed, failed = (dataclasses.replace(next(iter(SHIPPED.values())), model_type=name) for name in ("a: x", "b: x"))
    failed = dataclasses.replace(failed, status="failed", error="no | such")
    lines = heads_table.section({"a: x": passed, "b: x": failed}).lines
    assert "* `b: x` (failed). no \\| such" in lines
    assert "| x | 2 | 1 |" in lines


@pytest.mark.parametrize(("model_type", "field"), [("d_fine", "num_queries"), ("levit", "depths")])
def test_tiny_configuration_is_smaller(model_type, field):
    small = getattr(head_config(model_type, "image classification"), field)
    assert small < getattr(transformers.AutoConfig.for_model(model_type), field)
