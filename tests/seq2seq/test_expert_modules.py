"""Switch Transformers and NLLB-MoE, whose experts are modules in a loop over those that tokens chose."""

import copy

import pytest
import torch
import transformers
from thorough import thorough

from model_adapters.errors import UnsupportedModelError
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import random_model
from torchax_serve import EngineOptions, serve

CLASSES = {
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "nllb-moe": "NllbMoeForConditionalGeneration",
}
NEW = 4
ENGINE = EngineOptions(max_model_len=16, max_num_seqs=2, page_size=4, max_num_batched_tokens=16, max_encoder_len=16)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def drawn(model_type, **overrides):
    config = tiny_config(model_type, as_decoder=False, overrides=overrides)
    model = random_model(getattr(transformers, CLASSES[model_type]), config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    for name in ("forced_bos_token_id", "num_beams", "max_length"):
        setattr(model.generation_config, name, None)
    return model


def sources(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 96, (length,), generator=generator) for length in lengths]


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("switch_transformers", {"expert_capacity": 2}),  # some tokens find no room
        thorough("nllb-moe", {"moe_token_dropout": 0.2, "num_experts": 3}),
    ],
)
def test_tokens_match_eager_transformers(model_type, overrides):
    model = drawn(model_type, **overrides)
    assert any("Experts" in type(module).__name__ for module in model.modules())
    rows, options = sources(12, 7), {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        wanted = copy.deepcopy(model).generate(**padded(rows), **options)
        alone = [copy.deepcopy(model).generate(**padded([row]), **options)[0, 1:].tolist() for row in rows]
    with serve(model, engine=ENGINE) as served:
        assert torch.equal(served.generate(**padded(rows), **options), wanted)
        config = copy.deepcopy(served.generation_config)
        config.update(max_new_tokens=NEW, min_new_tokens=NEW)
        streams = [served.iter_tokens(row.tolist(), config) for row in rows]
        assert [list(stream) for stream in streams] == alone


def test_expert_capacity_that_depends_on_other_requests_is_refused():
    model = drawn("nllb-moe", moe_eval_capacity_token_fraction=0.5)
    with serve(model, engine=ENGINE) as served, pytest.raises(UnsupportedModelError, match=r"fraction: expected 1\.0"):
        served.generate(**padded(sources(5)), max_new_tokens=2)
