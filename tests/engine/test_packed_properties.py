"""What packed models of every kind keep: the tokens of eager PyTorch where pages, snapshots and drafts move requests.

Each kind is a row of `TYPES`, each property a test. Bundles, second starts and meshes of the same kinds are in
`tests/export/test_recurrent_bundles.py`, `tests/start/test_starts_of_types.py` and `tests/sharding`.
"""

import contextlib
import dataclasses
import functools

import pytest
import test_recurrent_layers as recurrent
import test_sparse_indexers as sparse
import torch
from engine_models import tiny_model
from test_recurrent_layers import eager_tokens, prompts, tokens
from thorough import except_for
from weights import draw_matrices

from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.kv_cache.memory import MemoryBudget

INDEXED = ["deepseek_v32", "glm_moe_dsa", "deepseek_v4", "qwen4_exp_text"]
"""Index keys in pages, also for layers that take the tokens of others, entries of blocks, and states beside them."""
RECURRENT = ["inkling2_text", "inkling2_loop_text", "qwen3_5_text", "kimi_linear", "mamba2", "nemotron_h", "lfm2"]
"""Windows, and layers that run several times; delta rules with one decay and with many; state spaces; convolutions."""
TYPES = [*INDEXED, *RECURRENT]
WITH_PAGES = [each for each in TYPES if each != "mamba2"]
OPTIONS = EngineOptions(max_model_len=128, max_num_seqs=4, page_size=8, max_num_batched_tokens=20)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
NUM_PAGES, NUM_SNAPSHOTS = 26, 3  # of layers that see all of a text; the longest requests have 16 pages
NUM_LONG = 48  # of as many requests as there are slots, for which there are not enough pages
NUM_SHORT = 4
REPEATING = ("deepseek_v4", "qwen4_exp_text", "inkling2_text")
"""Types whose random weights write what stands in a text before, as trained ones do: n-grams draft for them."""
TOGETHER = prompts(30, 25, 28, 31, 27, 26)
ONE_BY_ONE = prompts(*(40 + number % 6 for number in range(20)))
SHARED = prompts(60)[0][::-1]  # which begins as no other one
REPEATED = [ids * 3 for ids in prompts(5, 9, 7)]
ASKED = {
    "together": (TOGETHER, NUM_LONG),
    "one by one": (ONE_BY_ONE, NUM_SHORT),
    "shared": ([SHARED], NUM_LONG),
    "repeated": (REPEATED, NUM_LONG),
}


def tiny(model_type):
    model = (sparse if model_type in INDEXED else recurrent).tiny(model_type)
    if model_type == "qwen4_exp_text":  # else it repeats nothing, so that no draft is right
        torch.manual_seed(4)
        draw_matrices(model, std=0.05)
    return model


def has_states(model_type):
    return model_type in RECURRENT or model_type == "qwen4_exp_text"


@functools.cache
def expected(model_type, kind):
    """What eager PyTorch makes of prompts of `ASKED`."""
    model, (asked, num_new) = tiny(model_type), ASKED[kind]
    return [eager_tokens(model, ids, num_new) for ids in asked]


@contextlib.contextmanager
def served(model_type, **options):
    """A model whose pages and snapshots are not enough for as many requests as there are slots."""
    own = MemoryBudget.plan

    def plan(sizes, shapes, budget_bytes):
        made = own(sizes, shapes, budget_bytes)
        groups = (
            dataclasses.replace(group, num_pages=min(group.num_pages, NUM_PAGES if group.window is None else 10**6))
            for group in made.groups
        )
        return dataclasses.replace(made, groups=tuple(groups))

    def num_snapshots(sizes, *args, **kwargs):
        return 1 + NUM_SNAPSHOTS * sizes.enable_prefix_caching

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBudget, "plan", plan)
        patch.setattr(MemoryBudget, "num_snapshots", num_snapshots)
        with serve(tiny(model_type), engine=dataclasses.replace(OPTIONS, **options)) as model:
            model.engine.check_integrity = True
            assert "not packed" not in model.engine.description
            yield model


@pytest.fixture(scope="module")
def scarce(request):
    """A type, and its model with little memory on the device and enough on the host."""
    with served(request.param, kv_offloading_bytes=1 << 20) as model:
        yield request.param, model


@pytest.fixture(scope="module")
def drafting(request):
    """A type, and its model with little memory and drafts that are looked up."""
    with served(request.param, speculative=NGRAM) as model:
        yield request.param, model


def stats_of(model):
    return model.stats().scheduler


IN_SCARCE = ["deepseek_v4", "qwen3_5_text"]


@pytest.mark.parametrize("scarce", except_for(IN_SCARCE, WITH_PAGES), indirect=True)
def test_preempted_requests_keep_their_tokens(scarce):
    """They find what they had computed: no two prompts begin alike.

    Nemotron-H limits the time steps of prompts, and not those of generated tokens, which it computes again here.
    """
    model_type, model = scarce
    before = stats_of(model)
    assert tokens(model, TOGETHER, NUM_LONG) == expected(model_type, "together")
    after = stats_of(model)
    assert after.num_preemptions > before.num_preemptions
    assert after.num_hit_tokens > before.num_hit_tokens


@pytest.mark.parametrize("scarce", except_for(IN_SCARCE, TYPES), indirect=True)
def test_evicted_prefixes_come_back_from_host_memory(scarce):
    model_type, model = scarce
    before = [usage.num_loaded for usage in stats_of(model).pages]
    for _ in range(2):
        found = [tokens(model, [ids], NUM_SHORT)[0] for ids in ONE_BY_ONE]
        assert found == expected(model_type, "one by one")
    loaded = [usage.num_loaded for usage in stats_of(model).pages]
    assert len(loaded) == len(model.engine._runner._cache.plan.groups) + has_states(model_type)
    assert all(after > earlier for after, earlier in zip(loaded, before, strict=True))


@pytest.mark.parametrize("scarce", except_for(IN_SCARCE, TYPES), indirect=True)
def test_answers_to_one_prompt_share_it(scarce):
    """Answers that are asked for together, and a fork of one that has already some tokens."""
    model_type, model = scarce
    (wanted,) = expected(model_type, "shared")
    before = stats_of(model).num_hit_tokens
    params = SamplingParams(max_new_tokens=6, temperature=1, top_k=1, ignore_eos=True, n=3)
    answers = model.generate_batch([SHARED], params)
    assert [list(answer.token_ids) for answer in answers] == [wanted[:6]] * 3
    # Behind the last page but one is a snapshot; pages are shared up to the last token, which each computes.
    assert stats_of(model).num_hit_tokens - before == 2 * (48 if has_states(model_type) else 59)
    params = SamplingParams(max_new_tokens=NUM_LONG, temperature=0, ignore_eos=True)
    first = model.iter_tokens(SHARED, params=params)
    begun = [next(first) for _ in range(5)]
    fork = model.iter_tokens(SHARED, params=params, fork_of=first)
    assert list(fork) == wanted == begun + list(first)


@pytest.mark.parametrize("model_type", except_for(["qwen3_5_text"], WITH_PAGES))
def test_preempted_requests_begin_again(model_type):
    """From their first token, where no prefix is kept."""
    with served(model_type, enable_prefix_caching=False) as model:
        assert tokens(model, TOGETHER, NUM_LONG) == expected(model_type, "together")
        assert stats_of(model).num_preemptions > 0
        assert stats_of(model).num_hit_tokens == 0


@pytest.mark.parametrize("drafting", except_for(["qwen4_exp_text"], TYPES), indirect=True)
def test_drafts_change_no_token(drafting):
    """Of requests alone, and of texts that repeat themselves, side by side."""
    model_type, model = drafting
    before, wanted = stats_of(model), expected(model_type, "repeated")
    assert tokens(model, REPEATED[:1], NUM_LONG) == wanted[:1]
    assert tokens(model, REPEATED, NUM_LONG) == wanted
    after = stats_of(model)
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert 0 < accepted < drafted or model_type not in REPEATING  # some are taken back


@pytest.mark.parametrize("drafting", except_for(["qwen4_exp_text"], WITH_PAGES), indirect=True)
def test_requests_are_preempted_between_drafts(drafting):
    model_type, model = drafting
    before = stats_of(model)
    assert tokens(model, TOGETHER, NUM_LONG) == expected(model_type, "together")
    after = stats_of(model)
    assert after.num_preemptions > before.num_preemptions
    assert after.num_draft_tokens > before.num_draft_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", TYPES)
def test_a_draft_model_changes_no_token(model_type):
    """A model without states drafts for itself; another one has a model without states."""
    draft = tiny_model("llama") if has_states(model_type) else tiny(model_type)
    drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3, "adaptive": False}
    with serve(tiny(model_type), engine=dataclasses.replace(OPTIONS, speculative=drafts)) as model:
        model.engine.check_integrity = True
        assert tokens(model, TOGETHER, NUM_LONG) == expected(model_type, "together")
        stats = stats_of(model)
    assert stats.num_draft_tokens > 0
    assert has_states(model_type) or stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
