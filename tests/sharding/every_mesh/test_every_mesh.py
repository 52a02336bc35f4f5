"""All types with a table, on five meshes of eight CPU devices, token for token those of one device."""

import pytest

from sharding_rules import TABLES

MESHES = ("1x2", "1x4", "1x8", "2x4", "2x2x2")  # data x model x expert
CHECKS = {"gemma3_text": "gemma3"}  # what `mesh_checks.CONFIGS` calls them, where it is not the type


@pytest.mark.parametrize("model_type", TABLES)
def test_tokens_are_those_of_one_device(on_eight, model_type):
    lines = on_eight("tokens", CHECKS.get(model_type, model_type), ",".join(MESHES))
    assert [line.split()[3] for line in lines] == list(MESHES)
