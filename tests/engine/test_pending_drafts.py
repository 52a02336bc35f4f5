"""Drafts for models with recurrent states: the tokens of single steps, and of eager transformers."""

import copy
import dataclasses
import random

import pytest
import torch
import transformers
from adapter_models import PeftModels, ranks
from speculation_requests import answers_of, request, tokens_of
from test_per_sequence import VOCAB_SIZE, tiny
from thorough import thorough
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from weights import draw_matrices

from torchax_serve import EngineOptions, SamplingParams, serve

SIZES = EngineOptions(max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


def asked_of(number, num_new, seed, **options):
    rng = random.Random(seed)
    pieces = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 9))] for _ in range(number)]
    return [
        request(piece * 3 + piece[:2], num_new, seed=i, vocab_size=VOCAB_SIZE, **options)
        for i, piece in enumerate(pieces)
    ]


def eager_tokens(model, asked, num_new):
    prompts = [torch.tensor([each.prompt_ids]) for each in asked]
    with torch.no_grad():
        outputs = [model.generate(ids, max_new_tokens=num_new, do_sample=False) for ids in prompts]
    return [output[0, ids.shape[1] :].tolist() for output, ids in zip(outputs, prompts, strict=True)]


@pytest.fixture(scope="module", params=["falcon_h1", "bloom", *map(thorough, ("mamba", "lfm2_moe", "recurrent_gemma"))])
def pair(request):
    """A model without and one with speculation."""
    options = SIZES, dataclasses.replace(SIZES, speculative=NGRAM)
    models = [serve(tiny(request.param), engine=each) for each in options]
    models[1].engine.check_integrity = True
    assert ("per-sequence" in models[1].engine.description) == (request.param == "bloom")
    yield models
    for model in models:
        model.close()


def accepted(model):
    return model.engine.stats().scheduler.num_accepted_tokens


def test_tokens_are_those_of_single_steps_and_of_eager_transformers(pair):
    plain, speculative = pair
    greedy, sampled = asked_of(4, 30, 0), asked_of(4, 30, 1, temperature=0.4, do_sample=True)
    alone = [tokens_of(speculative, [each])[0] for each in greedy]
    assert alone == eager_tokens(speculative.torch_model, greedy, 30)
    mixed = [each for both in zip(greedy, sampled, strict=True) for each in both]
    before = accepted(speculative)
    assert tokens_of(speculative, mixed) == tokens_of(plain, mixed)
    assert accepted(speculative) > before > 0


def test_rows_that_need_more_than_tokens_share_the_steps(pair):
    plain, speculative = pair
    penalised = asked_of(1, 30, 2, repetition_penalty=1.4)
    scored = asked_of(1, 30, 3, logprobs=2)
    asked = [*penalised, *scored, *asked_of(1, 30, 4)]
    before = accepted(speculative)
    found, wanted = answers_of(speculative, asked), answers_of(plain, asked)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for ours, theirs in zip(found[1][1], wanted[1][1], strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert accepted(speculative) > before


def test_states_catch_up_when_prompts_arrive_and_requests_end_inside_drafts(pair):
    """Steps between verify steps find states that have all tokens."""
    plain, speculative = pair
    first, later = asked_of(3, 40, 5), asked_of(6, 12, 6)
    wanted, wanted_later = tokens_of(plain, first), tokens_of(plain, later)
    handles = speculative.engine.submit_all(first)
    got = [[], [], []]
    for index, each in enumerate(later):
        of = index % 3
        got[of] += [token for _, new in zip(range(1 + index), handles[of], strict=False) for token in new.token_ids]
        assert speculative.engine.submit(each).result() == wanted_later[index]
    for tokens, handle in zip(got, handles, strict=True):
        tokens += [token for new in handle for token in new.token_ids]
    assert got == wanted
    # Where drafts are rejected, rows may be at their ends for all that the scheduler knows, and are left out of plans.
    lengths = (5, 14, 23, 32)
    drawn = [asked_of(4, num_new, 9, temperature=2.0, do_sample=True)[i] for i, num_new in enumerate(lengths)]
    wanted_drawn = tokens_of(plain, [*drawn, *later])
    handles = speculative.engine.submit_all(drawn)
    assert [speculative.engine.submit(each).result() for each in later] == wanted_drawn[4:]
    assert [handle.result() for handle in handles] == wanted_drawn[:4]
    prompt = first[0]
    for stop in dict.fromkeys(wanted[0]):
        ends = request(prompt.prompt_ids, 40, vocab_size=VOCAB_SIZE, stop_token_ids=[stop])
        assert tokens_of(speculative, [ends])[0] == wanted[0][: wanted[0].index(stop) + 1]


@pytest.mark.parametrize("name", ["falcon_h1", thorough("bloom")])
def test_preempted_and_late_requests_keep_their_tokens(name):
    with serve(tiny(name), engine=SIZES) as plain:
        asked = asked_of(9, 34, 7, temperature=0.5, do_sample=True)
        wanted, plan = tokens_of(plain, asked), plain.engine._runner._cache.plan
        states = plain.engine._runner._cache.state_bytes
    few = 17 * sum(shape.page_bytes(plan.page_size) for shape in plan.shapes) + states
    options = dataclasses.replace(SIZES, kv_cache_memory_bytes=few, speculative=NGRAM)
    rng = random.Random(1)
    with serve(tiny(name), engine=options) as model:
        model.engine.check_integrity = True
        late = [rng.random() < 0.3 for _ in asked]
        limits = [dataclasses.replace(each.params.given, timeout_s=0.3 * rng.random()) for each in asked]
        params = [dataclasses.replace(each.params, given=given) for each, given in zip(asked, limits, strict=True)]
        sent = [
            dataclasses.replace(each, params=own) if is_late else each
            for each, own, is_late in zip(asked, params, late, strict=True)
        ]
        handles = model.engine.submit_all(sent)
        for handle, whole in zip(handles, wanted, strict=True):
            tokens = handle.result()
            assert tokens == (whole[: len(tokens)] if handle.finish_reason == "deadline" else whole)
        stats = model.engine.stats().scheduler
        assert stats.num_preemptions > 0 and stats.num_accepted_tokens > 0


@pytest.mark.skipif("lfm3" not in CONFIG_MAPPING, reason="this release of transformers has no LFM3")
def test_pending_tokens_see_what_a_window_shows_them():
    """They are computed again, so that pages in front of the window are needed for longer."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12}
    kinds = {"layer_types": ["conv", "sliding_attention", "full_attention"], "max_position_embeddings": 128}
    config = transformers.AutoConfig.for_model("lfm3", **sizes, **heads, **kinds, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_matrices(module, std=0.2)
    eager, asked = copy.deepcopy(module), asked_of(3, 50, 9)
    options = dataclasses.replace(SIZES, page_size=4, speculative=NGRAM)
    with serve(module, engine=options) as model:
        assert "per-sequence" not in model.engine.description
        assert {group.num_behind for group in model.engine._scheduler.config.groups} == {4}
        assert [tokens_of(model, [each])[0] for each in asked] == eager_tokens(eager, asked, 50)
        assert accepted(model) > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_drafts_are_verified_with_the_adapter_of_their_row(tmp_path):
    """Pending tokens, too: their states are those that the adapter makes."""
    targets = {"target_modules": ["q_proj", "o_proj", "in_proj", "down_proj"]}
    configs = {name: {**config, **targets} for name, config in ranks(2).items()}
    peft = PeftModels(tiny("falcon_h1"), tmp_path, configs)
    prompts = [list(each.prompt_ids) for each in asked_of(3, 24, 10)]
    params = [SamplingParams(max_new_tokens=24, temperature=0.0, adapter=name) for name in (*peft.names, None)]
    engine = dataclasses.replace(SIZES, speculative=NGRAM)
    with serve(tiny("falcon_h1"), engine=engine, adapters=peft.folders(), max_lora_rank=4) as model:
        model.engine.check_integrity = True
        answers = [answer.token_ids for answer in model.generate_batch(prompts, params)]
        assert model.stats().scheduler.num_accepted_tokens > 0
    wanted = [peft.tokens(each.adapter, prompt, 24) for each, prompt in zip(params, prompts, strict=True)]
    assert answers == wanted and len(set(map(tuple, wanted))) == 3


@pytest.mark.thorough
def test_a_draft_model_drafts_for_a_recurrent_model():
    config = {"method": "draft_model", "model": tiny("llama"), "num_speculative_tokens": 3, "adaptive": False}
    asked = asked_of(3, 20, 8)
    with serve(tiny("falcon_h1"), engine=dataclasses.replace(SIZES, speculative=config)) as model:
        assert tokens_of(model, asked) == eager_tokens(model.torch_model, asked, 20)
        assert model.engine.stats().scheduler.num_draft_tokens > 0
