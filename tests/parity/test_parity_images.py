"""The harness for images and text: a check that can fail, inputs that fit, and a handful of types."""

import pytest
import torch

from model_adapters.errors import UnsupportedModelError
from parity_sweep import check_images, models_page
from parity_sweep.tiny import images, media_prompts
from torchax_serve.parity import tasks

# Grids read on the host; images left out by their values. The rest of the mapping is checked by the sweep.
HANDFUL = ("qwen2_5_vl", "idefics3")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", HANDFUL)
def test_type_passes(model_type):
    result = check_images.check(model_type)
    assert result.status == "passed", result
    assert result.executor == "packed" and result.engine_equal


def test_every_feature_has_a_placeholder():
    model = images.image_model("gemma3")
    first, second = (images.inputs_of(model, "gemma3", index) for index in range(2))
    assert int((first["input_ids"] == model.config.image_token_id).sum()) == 4
    assert not torch.equal(first["pixel_values"], second["pixel_values"])
    both = media_prompts.batched([first, second])
    assert both["input_ids"].shape == both["attention_mask"].shape == both["token_type_ids"].shape
    assert both["pixel_values"].shape[0] == 2 and int(both["attention_mask"].sum(1).min()) < both["input_ids"].shape[1]


def test_model_that_ignores_images_is_refused(monkeypatch):
    model = images.image_model("llava")
    monkeypatch.setattr(check_images, "MIN_LOGIT_CHANGE", 1e9)
    with pytest.raises(UnsupportedModelError, match="gives the same logits for another image"):
        check_images.expect(model, "llava")


def test_passed_types_were_compared():
    _, results = tasks.shipped("images")
    assert set(results) <= set(tasks.TASKS["images"].types())
    assert len(results) > 80
    passed = [result for result in results.values() if result.status == "passed"]
    for result in passed:
        assert result.forward_difference <= 1e-4 and result.unbatched_equal, result
        assert result.padded_equal or (result.padded_equal is None and result.notes), result
    for result in results.values():
        assert result.status == "passed" or result.error or "differ" in models_page.describe_tokens(result), result
