"""Plans of engines that speculate: bytes and bounds by hand, and what cannot be planned."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from model_adapters.errors import UnsupportedArgumentError
from model_adapters.loading.model_class import module_of
from torchax_serve.cli.main import app
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning.abstract_model import abstract_model
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.plan import PlanReport, PlanRequest, make_plan
from torchax_serve.planning.report import lines_of
from torchax_serve.planning.roofline import StepBound, decode_bound
from torchax_serve.planning.speculation import DraftSizes, PlannedSpeculation
from torchax_serve.scheduler import SpeculativeConfig

SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
REQUEST = PlanRequest(topology="cpu:1", max_model_len=64, max_num_seqs=4, page_size=16, prefill_lens=())
LAYER = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64
TOKEN_BYTES = 2 * 16 * 4  # of a layer: heads, key and value, float32


def llama(num_layers):
    config = transformers.LlamaConfig(**SIZES, **HEADS, num_hidden_layers=num_layers)
    return module_of(transformers.LlamaForCausalLM, config, torch.float32)


def planned(module, draft=None, **config):
    speculation = PlannedSpeculation(SpeculativeConfig(num_speculative_tokens=3, **config), draft)
    return make_plan(module, "toy", dataclasses.replace(REQUEST, speculation=speculation))


def test_a_draft_models_weights_and_pages_are_counted():
    alone, report = (
        make_plan(llama(2), "toy", REQUEST),
        planned(llama(2), llama(1), method="draft_model", model="small"),
    )
    assert [(p.name, p.num_tokens, p.num_rows) for p in report.programs] == [("decode", 4, 4), ("verify", 16, 4)]
    assert report.draft_weights_bytes == 4 * (LAYER + 2 * 64 * 32 + 3 * 32 + 2 * 4)  # with norms and rotary frequencies
    assert report.draft_pages_bytes == 4 * (64 + 16) * TOKEN_BYTES  # and as many tokens more as there may be drafts
    assert (report.weights_bytes, report.pages_bytes) == (alone.weights_bytes, alone.pages_bytes)
    added = report.draft_weights_bytes + report.draft_pages_bytes + report.temporary_bytes - alone.temporary_bytes
    assert report.total_bytes == alone.total_bytes + added
    assert report.most_slots < alone.most_slots
    assert PlanReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    page = "\n".join(lines_of(report, from_cache=False))
    assert "weights of draft_model small, 3 drafts" in page
    assert "pages of the draft model, for all requests" in page
    assert "verify, 16 tokens" in page


def test_verify_steps_read_weights_and_pages_once():
    report = planned(llama(2), method="ngram")
    decode, verify = report.bounds
    assert (report.draft_weights_bytes, report.draft_pages_bytes, report.draft_bound) == (0, 0, None)
    assert verify.step == "verify"
    assert verify.bytes_read == decode.bytes_read
    products = 2 * LAYER + 64 * 32
    assert verify.flops == 16 * 2 * products + 2 * (2 * 16 * 64 * 4 * 16)


def test_a_model_with_recurrent_layers_verifies_drafts_packed():
    """States are kept behind the tokens that are known, so that they take no more memory than without drafts."""
    config = transformers.Lfm2Config(**SIZES, **HEADS, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    module = module_of(transformers.Lfm2ForCausalLM, config, torch.float32)
    alone, report = make_plan(module, "toy", REQUEST), planned(module, method="ngram")
    assert [(p.name, p.num_tokens, p.num_rows) for p in report.programs] == [("decode", 4, 4), ("verify", 16, 4)]
    assert (report.executor, report.states_bytes) == (alone.executor, alone.states_bytes)
    assert report.executor == "packed" and report.states_bytes > 0
    of_prefix = 32 * 2 * 4  # two inputs of the convolution
    assert report.states_bytes == 5 * of_prefix
    page = "\n".join(lines_of(report, from_cache=False))
    assert f"for each prefix that is kept, as much as {of_prefix // report.token_bytes} tokens of pages" in page


def test_bounds_of_a_round_of_drafts():
    """Tokens of a second are those of the verify step and of all steps of the draft model in front of it."""
    chip = Chip("toy", "cpu", 10**12, 1e9, 1e12)
    draft = abstract_model(llama(1), mesh_of(jax.devices()[:1], {}))
    shapes = (PagedLayerSpec(2, 16, np.dtype("f4"), None),)
    step = decode_bound(draft, chip, shapes, 4, 64)
    bound = DraftSizes(model=draft, pages=shapes).bound(chip, 4, 64, 3)
    assert (bound.step, bound.bytes_read, bound.flops) == ("draft", 3 * step.bytes_read, 3 * step.flops)
    report = planned(llama(2), method="ngram")
    verify = StepBound("verify", 16, 64, 10**6, 1e6, 0.003, "memory")
    drafts = dataclasses.replace(bound, seconds=0.001)
    timed = dataclasses.replace(report, bounds=(report.bounds[0], verify), draft_bound=drafts)
    page = "\n".join(lines_of(timed, from_cache=False))
    assert "3.000 ms  bound by memory" in page
    assert "1.000 ms  for the drafts, before it" in page
    assert "1,000 tokens/s at most if no draft is accepted, 4,000 if all are" in page


def test_a_prediction_layer_is_counted():
    sizes = {**SIZES, **HEADS, "num_key_value_heads": 2, "num_hidden_layers": 2, "moe_intermediate_size": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    config = transformers.Glm4MoeConfig(**sizes, **experts, first_k_dense_replace=1, num_nextn_predict_layers=1)
    module = module_of(transformers.Glm4MoeForCausalLM, config, torch.float32)
    alone, report = make_plan(module, "toy", REQUEST), planned(module, method="mtp")
    layer = sum(tensor.numel() for tensor in module.model.layers[1].state_dict().values())
    rotary = module.model.rotary_emb.inv_freq.numel()
    assert report.draft_weights_bytes == 4 * (layer + 3 * 32 + 2 * 32 * 32 + 2 * 64 * 32 + 2 * rotary)
    assert report.pages_bytes == alone.pages_bytes * 3 // 2
    assert [each.name for each in report.programs] == ["decode", "verify"]


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="got 'eagle3' with a head of EAGLE-3, which is read with its"):
        planned(llama(2), method="eagle3", model="head")
    with pytest.raises(UnsupportedArgumentError, match="expected a configuration with num_nextn_predict_layers 1"):
        planned(llama(2), method="mtp")
    bloom = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    per_sequence = module_of(transformers.BloomForCausalLM, bloom, torch.float32)
    with pytest.raises(UnsupportedArgumentError, match="expected a model that runs packed for a plan with drafts, got"):
        planned(per_sequence, method="ngram")
    with pytest.raises(UnsupportedArgumentError, match="expected a model that runs packed, got small: "):
        planned(llama(2), per_sequence, method="draft_model", model="small")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sharding", "--speculative-config", "{}"], "--speculative-config: expected without --sharding"),
        (["--topology", "cpu:1", "--speculative-config", "{"], "--speculative-config: expected JSON such as"),
        (["--topology", "cpu:1", "--speculative-config", '{"method": "medusa"}'], "Medusa heads are not supported"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, said):
    done = CliRunner().invoke(app, ["plan", *arguments, "--offline"])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
