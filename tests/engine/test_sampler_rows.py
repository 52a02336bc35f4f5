"""Each row of a batch against transformers' own processors on that row, and against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampler_oracle import Row, adjusted_scores, processed_scores
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare
from thorough import pairs
from transformers import GenerationConfig

from torchax_serve.sampling import BatchSampler
from torchax_serve.sampling.processors import process
from torchax_serve.sampling.sample import sample
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.truncation import top_candidates, truncate
from torchax_serve.sampling.types import SamplerSpec
from torchax_serve.scheduler import INVALID_TOKEN, PlanRow

STOPS = (2, 5)
CASES = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "temperature": 0.3},
    {"top_k": 119},
    {"top_k": 140},
    {"top_k": 299, "temperature": 2.0},
    {"top_k": 10_000},
    {"top_p": 0.8, "temperature": 0.2},
    {"top_p": 0.8},
    {"top_p": 0.99, "temperature": 5.0},
    {"top_p": 1e-6},
    {"top_k": 12, "top_p": 0.6, "temperature": 1.4},
    {"top_k": 160, "top_p": 0.9, "temperature": 1.4},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_h": 0.4},
    {"top_h": 0.8, "temperature": 1.3, "top_k": 60, "top_p": 0.9},
    {"typical_p": 0.4},
    {"typical_p": 0.5, "top_k": 20},
    {"epsilon_cutoff": 0.02},
    {"epsilon_cutoff": 0.99},
    {"eta_cutoff": 0.05},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0.9, "top_k": 30},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2, "frequency_penalty": 0.7, "top_p": 0.9},
    {"frequency_penalty": -1.3, "repetition_penalty": 1.2},
    {"logit_bias": {3: 100, 8: -100, 9: 0.5}},
    {"logit_bias": {3: 4}, "repetition_penalty": 1.5, "presence_penalty": 1, "top_k": 9},
    {"allowed_token_ids": [3, 8, 9, 60], "top_k": 2},
    {"allowed_token_ids": [3, 8], "logit_bias": {3: -5}},
    {"suppress_tokens": [0, 3, 100_000], "top_p": 0.5},
    {"min_new_tokens": 7, "top_k": 40},
    {"min_new_tokens": 6},
]


VOCAB_SIZE, NUM_ROWS = 300, 16


@pytest.fixture(scope="module")
def programs():
    return Sampler(NUM_ROWS, VOCAB_SIZE)


@pytest.fixture
def sampler(programs):
    """With no request in it, and with programs that are compiled once for all tests."""
    programs.reset()
    return programs


def choose(sampler, plan_rows, logits, **kwargs):
    """With the logits padded to one number of rows."""
    padded = np.full((NUM_ROWS, VOCAB_SIZE), np.nan, np.float32)
    padded[: len(logits)] = logits
    return sampler.sample(plan_rows, jnp.asarray(padded), **kwargs)


@jax.jit
def all_scores(options, state, logits):
    return truncate(options, process(options, state, logits), level="history")


def check_scores(cases, vocab_size, round_to=None):
    rng = np.random.default_rng(vocab_size)
    sampler = Sampler(len(cases), vocab_size)
    rows = [
        Row(case, tuple(rng.integers(0, 12, 5).tolist()), tuple(rng.integers(0, 12, 6).tolist()), stop_ids=STOPS)
        for case in cases
    ]
    for slot, row in enumerate(rows):
        sampler.assign_slot(slot, row.params(vocab_size), row.prompt, row.outputs)
    options, _ = sampler.slots.rows([row.plan_row(slot) for slot, row in enumerate(rows)], len(rows))
    logits = rng.normal(size=(len(rows), vocab_size), scale=3).astype(np.float32)
    logits = logits if round_to is None else np.round(logits / round_to) * np.float32(round_to)
    scores = np.asarray(all_scores(options, sampler.state, logits))
    for index, row in enumerate(rows):
        is_drawn = sampler.slots.rows([row.plan_row(index)], 1)[1].level != "greedy"
        expected = processed_scores(row, logits[index]) if is_drawn else adjusted_scores(row, logits[index])
        message = str(row.options)
        np.testing.assert_array_equal(np.isneginf(scores[index]), np.isneginf(expected), err_msg=message)
        np.testing.assert_allclose(scores[index], expected, rtol=1e-6, atol=1e-6, err_msg=message)
    return scores


@pytest.mark.parametrize("vocab_size", [100, 300, 700])
def test_each_row_is_processed_as_transformers_does(vocab_size):
    """Vocabularies that are all candidates, that are cut by comparing pairs, and bit by bit."""
    check_scores(CASES, vocab_size)


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"repetition_penalty": 1.3}], ids=str)
def test_tokens_that_may_not_come_first(sampler, options):
    rows = [Row(options, outputs=outputs, not_first=(9, 40, 100_000)) for outputs in ((), (9,), (), (4, 9))]
    logits = np.random.default_rng(3).normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32)
    logits[:, 9], logits[:, 40], logits[:, 41] = 50, 30, 20
    for slot, row in enumerate(rows):
        sampler.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt, row.outputs)
    plan_rows = [row.plan_row(slot) for slot, row in enumerate(rows)]
    tokens = np.asarray(choose(sampler, plan_rows, logits).tokens)[: len(rows)].tolist()
    assert tokens == [int(adjusted_scores(row, logits[index]).argmax()) for index, row in enumerate(rows)]
    assert tokens == [41, 9, 41, 9]
    late = [plan_rows[1], plan_rows[3]]
    assert sampler.slots.rows(late, 2)[1].level != "penalties" or "repetition_penalty" in options


@pytest.mark.parametrize("num_values", [5, 10**6])
def test_the_best_columns_are_found_in_two_levels(num_values):
    scores = np.random.default_rng(0).integers(0, num_values, (8, 9001)).astype(np.float32)
    scores[1, 50:] = -np.inf
    by_id, ids, descending = map(np.asarray, jax.jit(top_candidates, static_argnums=1)(scores, 128))
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :128]
    np.testing.assert_array_equal(descending, np.take_along_axis(scores, order, 1))
    finite = np.isfinite(by_id)
    assert finite.sum() == 7 * 128 + 50
    for row in range(8):
        expected = np.sort(order[row][np.isfinite(scores[row, order[row]])])
        np.testing.assert_array_equal(ids[row, finite[row]], expected)
        np.testing.assert_array_equal(by_id[row, finite[row]], scores[row, expected])


@pytest.mark.parametrize("round_to", [0.25, 4.0])
def test_equal_scores_are_cut_where_transformers_cuts_them(round_to, monkeypatch):
    """Hundreds of tokens may tie with the k-th best, or at the edge of a nucleus: more than the candidates hold."""
    # torch.sort leaves the order of equal numbers to the CPU's vector instructions; this pins it.
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    cases = [case for case in CASES if "top_h" not in case]  # which of equal tokens torch.topk takes, nothing pins
    num_kept = np.isfinite(check_scores(cases, 700, round_to)).sum(-1)
    overflowing = [kept > 128 for case, kept in zip(cases, num_kept, strict=True) if 0 < case.get("top_k", 0) < 128]
    assert any(overflowing) or round_to == 0.25, "the case that matters is really there"


def test_penalties_follow_their_definitions_over_random_histories(sampler):
    """Greedy rows step by step: outputs grow, requests come, are preempted, and go on in another slot."""
    vocab_size, num_slots = 40, 6  # few tokens, so that they repeat: the others are never the best
    rng = np.random.default_rng(5)
    rows = {}

    def new_request():
        options = {
            "repetition_penalty": float(rng.uniform(0.5, 2)),
            "presence_penalty": float(rng.uniform(-2, 2)),
            "frequency_penalty": float(rng.uniform(-2, 2)),
            "logit_bias": {int(token): float(rng.uniform(-3, 3)) for token in rng.integers(0, vocab_size, 3)},
            "min_new_tokens": int(rng.integers(0, 6)),
        }
        chosen = [name for name in options if rng.random() < 0.6]
        prompt = tuple(rng.integers(0, vocab_size, rng.integers(1, 6)).tolist())
        return Row({name: options[name] for name in chosen}, prompt, (), stop_ids=STOPS)

    def give(slot, row):
        sampler.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt, row.outputs)
        rows[slot] = row

    num_checked = 0
    for _ in range(60):
        for slot in range(num_slots):
            if slot not in rows or rng.random() < 0.05:
                give(slot, new_request())
        if rng.random() < 0.3:  # two of them are preempted and come back in each other's slot
            one, other = rng.permutation(num_slots)[:2].tolist()
            row_of_one, row_of_other = rows[one], rows[other]
            give(one, row_of_other)
            give(other, row_of_one)
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
        logits = np.full((num_slots, VOCAB_SIZE), -50, np.float32)
        logits[:, :vocab_size] = rng.normal(size=(num_slots, vocab_size))
        sampled = choose(sampler, [rows[slot].plan_row(slot) for slot in slots], logits)
        for index, slot in enumerate(slots):
            row, token = rows[slot], int(sampled.tokens[index])
            assert token == adjusted_scores(row, logits[index]).argmax(), row
            rows[slot] = Row(row.options, row.prompt, (*row.outputs, token), stop_ids=STOPS)
            num_checked += token != logits[index].argmax()
    assert num_checked > 50, "penalties have changed what is chosen"


@pytest.fixture(scope="module")
def many():
    """A sampler of many rows, for statistics."""
    return Sampler(4096, 300)


OPTIONS = [
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "typical_p": 0.8, "repetition_penalty": 1.5, "frequency_penalty": 1},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {9: 4}},
]


@pytest.mark.parametrize(("over", "options"), pairs(["positions", "seeds"], OPTIONS, one_in=4), ids=str)
def test_draws_follow_the_distribution_of_transformers_scores(many, options, over):
    num_draws, logits = 4096, np.random.default_rng(1).normal(size=300, scale=2).astype(np.float32)
    many.reset()
    # One row that any level but the last would not cover, so that one program draws for all cases.
    options = {"eta_cutoff": 1e-7, **options}
    row = Row(options, (7, 8), (9, 9, 3))
    plan_rows = []
    for slot in range(num_draws if over == "seeds" else 1):
        many.assign_slot(slot, Row(options, seed=slot).params(300), row.prompt, row.outputs)
    for index in range(num_draws):
        ahead = index if over == "positions" else 0
        plan_rows.append(row.plan_row(index if over == "seeds" else 0)._replace(context_len=4 + ahead))
    tokens = np.asarray(many.sample(plan_rows, jnp.broadcast_to(jnp.asarray(logits), (num_draws, 300))).tokens)
    counts = np.bincount(tokens, minlength=300)
    probabilities = softmax(processed_scores(row, logits).astype(np.float64))
    assert counts[probabilities == 0].sum() == 0
    rare = probabilities * num_draws < 5  # the test wants five expected draws a bin, so the rare tokens share one
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(probabilities[~rare], probabilities[rare].sum()) * num_draws
    kept = expected > 0
    assert chisquare(observed[kept], expected[kept]).pvalue > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50, "top_p": 0.9, "temperature": 1.5},
        {"temperature": 2.0, "top_p": 0.98, "typical_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_a_seed_draws_what_it_draws_in_generate(sampler, options):
    """Against the sampling of `generate` on a batch of one; and again behind a preemption halfway."""
    num_steps, seed = 12, 2**40 + 7
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB_SIZE, 5).tolist()
    all_logits = rng.normal(size=(num_steps, VOCAB_SIZE), scale=2).astype(np.float32)
    row = Row(options, tuple(prompt), seed=seed)
    config = GenerationConfig(do_sample=True, max_new_tokens=num_steps, **options)
    batch = BatchSampler(config, np.array([prompt]), vocab_size=VOCAB_SIZE, seed=seed)
    expected = [int(batch.sample(jnp.asarray(logits[None]))[0][0]) for logits in all_logits]
    sampler.assign_slot(1, row.params(VOCAB_SIZE), prompt)
    sampler.assign_slot(0, Row({"temperature": 0.9}, seed=3).params(VOCAB_SIZE), prompt)
    outputs = []
    for index, logits in enumerate(all_logits):
        if index == num_steps // 2:
            sampler.assign_slot(2, row.params(VOCAB_SIZE), prompt, outputs)
        slot = 1 if index < num_steps // 2 else 2
        plan_row = PlanRow(0, slot, len(prompt) + index - 1, 1, None, True)
        beside = PlanRow(1, 0, 20 + index, 1, None, True)
        tokens = choose(sampler, [beside, plan_row], [logits[::-1], logits]).tokens
        outputs.append(int(tokens[1]))
    assert outputs == expected
    assert len(set(outputs)) > 6


def test_log_probabilities_are_those_of_the_model(sampler):
    rng = np.random.default_rng(2)
    wanted = [{"logprobs": 3, "temperature": 0.01, "top_k": 1}, {"logprobs": 0, "suppress_tokens": [4]}, {}]
    for slot, options in enumerate(wanted):
        sampler.assign_slot(slot, Row(options).params(VOCAB_SIZE), (7, 8))
    rows = [Row({}).plan_row(slot) for slot in range(3)]
    logits = rng.normal(size=(NUM_ROWS, VOCAB_SIZE), scale=3).astype(np.float32)
    logits[1, 4] = 30  # suppressed, and likely all the same
    sampled = sampler.sample(rows, jnp.asarray(logits))
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    order = np.argsort(-expected, axis=-1)[:, :20]
    np.testing.assert_array_equal(sampled.logprobs.top_ids[:3], order[:3])
    np.testing.assert_allclose(sampled.logprobs.top[:3], np.take_along_axis(expected, order, 1)[:3], atol=1e-5)
    chosen = np.take_along_axis(expected, np.asarray(sampled.tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(sampled.logprobs.chosen[:3], chosen[:3], atol=1e-5)
    assert [sampler.slots.num_top(slot) for slot in range(3)] == [3, 0, None]
    assert sampler.sample(rows[2:], jnp.asarray(logits)).logprobs is None


@pytest.mark.parametrize("num_top", [0, 7])
def test_log_probabilities_of_a_prompt_are_those_of_the_model(sampler, num_top):
    logits = np.random.default_rng(3).normal(size=(9, VOCAB_SIZE), scale=3).astype(np.float32)
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    following, last = np.arange(9, dtype=np.int32) + 5, np.array([2, 7], np.int32)
    logprobs, of_last = sampler.prompt_logprobs(jnp.asarray(logits), following, last, num_top, 8)
    np.testing.assert_array_equal(of_last, logits[last])
    np.testing.assert_allclose(logprobs.chosen[:8], expected[np.arange(8), following[:8]], atol=1e-5)
    if num_top:
        order = np.argsort(-expected, axis=-1)[:8, :num_top]
        np.testing.assert_array_equal(logprobs.top_ids[:8, :num_top], order)
        found = logprobs.top[:8, :num_top]
        np.testing.assert_allclose(found, np.take_along_axis(expected[:8], order, 1), atol=1e-5)


def test_rows_that_cannot_be_chosen_for_are_told_and_disturb_nobody(sampler):
    vocab_size = VOCAB_SIZE
    greedy, drawn = {}, {"temperature": 1.0, "top_k": 20}
    bad = np.zeros((6, vocab_size), np.float32)
    bad[0, 7] = np.nan
    bad[1] = -np.inf
    bad[2] = np.inf
    bad[3] = np.nan
    bad[4, 250] = np.inf  # something to choose, if not to draw
    logits = np.concatenate([bad, bad, np.random.default_rng(0).normal(size=(2, vocab_size))]).astype(np.float32)
    rows = [Row(greedy if slot < 6 or slot == 12 else drawn, seed=slot) for slot in range(14)]
    for slot, row in enumerate(rows):
        sampler.assign_slot(slot, row.params(vocab_size), row.prompt)
    tokens = np.asarray(choose(sampler, [row.plan_row(slot) for slot, row in enumerate(rows)], logits).tokens)
    invalid = [True, True, True, True, False, False]
    np.testing.assert_array_equal(tokens[:6] == INVALID_TOKEN, invalid)
    np.testing.assert_array_equal(tokens[6:12] == INVALID_TOKEN, [*invalid[:4], True, False])
    assert tokens[4] == 250
    # The next step embeds the last tokens, so all of them are some.
    np.testing.assert_array_equal(np.asarray(sampler.last_tokens)[:14], np.maximum(tokens[:14], 0))
    calm = choose(sampler, [rows[slot].plan_row(slot) for slot in (12, 13)], logits[12:])
    np.testing.assert_array_equal(tokens[12:14], calm.tokens[:2])


def test_nothing_left_to_choose_is_told(sampler):
    for slot, options in enumerate([{}, {"temperature": 1.0}]):
        options = {**options, "allowed_token_ids": [3], "bad_words_ids": [[8, 3]]}
        sampler.assign_slot(slot, Row(options).params(VOCAB_SIZE), (7, 8))
    tokens = choose(sampler, [Row({}).plan_row(slot) for slot in range(2)], np.zeros((2, VOCAB_SIZE))).tokens
    assert tokens.tolist()[:2] == [INVALID_TOKEN] * 2


def test_padding_and_rows_that_do_not_sample_write_nothing(sampler):
    for slot in range(NUM_ROWS):
        sampler.assign_slot(slot, Row({"frequency_penalty": 1}).params(VOCAB_SIZE), (7, 8))
    logits = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[:, 9], logits[1, 11] = 1, 2
    prefill = PlanRow(0, 0, 0, 1, (7,), False)
    choose(sampler, [prefill, Row({}).plan_row(1)], logits)
    assert sampler.last_tokens.tolist() == [0, 11, *[0] * (NUM_ROWS - 2)]
    counts = np.asarray(sampler.state.tables.counts)
    assert (counts.sum(), counts[1, 11]) == (1, 1)


def test_warm_up_compiles_all_that_traffic_needs(caplog):
    """Counted by ourselves, and by what JAX says that it compiles."""
    vocab_size, num_rows = 100, 4
    device = jax.devices()[0]  # logits belong to the device that the weights are on
    sampler = Sampler(num_rows, vocab_size, max_len=128)
    for task in sampler.compile_tasks(jax.ShapeDtypeStruct((num_rows, vocab_size), np.float32)):
        task.compile()
    assert sampler.state.tables is None
    assert sampler.num_programs == 4, "three to sample, one for log-probabilities"
    rng, cases = np.random.default_rng(0), [*CASES, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[4, 5]]}]

    def step():
        rows = [Row({**cases[rng.integers(len(cases))], "logprobs": int(rng.integers(21))}) for _ in range(num_rows)]
        for slot, row in enumerate(rows):
            sampler.assign_slot(slot, row.params(vocab_size), row.prompt)
        plan_rows = [row.plan_row(slot) for slot, row in enumerate(rows)]
        logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
        sampler.sample(plan_rows, jax.device_put(logits, device))

    with jax.log_compiles():
        for _ in range(20):
            step()
        sampler.reset()
        for _ in range(20):
            step()
    assert sampler.num_programs == 4
    assert [record.args[0] for record in caplog.records if record.msg.startswith("Compiling")] == []


def test_steps_in_one_program_are_the_steps_one_by_one(sampler):
    """With the state given to another program that chooses several tokens, and taken back from it."""
    rows = [Row({"temperature": 1.0, "top_k": 9}, seed=1), Row({}, seed=2), Row({"top_p": 0.9}, seed=3)]
    all_logits = np.random.default_rng(6).normal(size=(4, NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    plan_rows = [row.plan_row(slot) for slot, row in enumerate(rows)]

    def begin():
        sampler.reset()
        for slot, row in enumerate(rows):
            sampler.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)

    begin()
    one_by_one = [
        sampler.sample(plan_rows, jnp.asarray(logits), ahead).tokens for ahead, logits in enumerate(all_logits)
    ]
    begin()
    options, draws = sampler.fused_options(plan_rows, NUM_ROWS)
    assert draws

    @jax.jit
    def several(options, state):
        def step(carry, logits):
            lengths, state = carry
            sampled, state = sample(SamplerSpec("sampled"), options.advanced(lengths), state, logits)
            return (lengths + 1, state), sampled.tokens

        lengths = jnp.array([row.context_len + row.num_tokens for row in plan_rows] + [0] * (NUM_ROWS - len(plan_rows)))
        (_, state), tokens = jax.lax.scan(step, (lengths, state), all_logits)
        return tokens, state

    tokens, state = several(options, sampler.take_state("sampled"))
    sampler.set_state(state)
    np.testing.assert_array_equal(tokens[:, :3], np.stack(one_by_one)[:, :3])
    np.testing.assert_array_equal(sampler.last_tokens[:3], tokens[-1, :3])
    for options in ({"logprobs": 0}, {"no_repeat_ngram_size": 2}, {"presence_penalty": 0.5}):
        sampler.assign_slot(1, Row(options).params(VOCAB_SIZE), (7, 8))
        assert sampler.fused_options(plan_rows, NUM_ROWS) is None, "they want more than tokens of each step"


def test_the_lowest_level_that_covers_every_row():
    sampler = Sampler(4, 40)
    cases = [{}, {"top_k": 3}, {"presence_penalty": 1}, {"min_new_tokens": 2}]
    for slot, options in enumerate(cases):
        sampler.assign_slot(slot, Row(options, stop_ids=STOPS).params(40), (7, 8))

    def level(*slots, ahead=0):
        return sampler.slots.rows([Row({}).plan_row(slot) for slot in slots], 8, ahead)[1].level

    assert [level(), level(0), level(0, 1), level(0, 1, 2), level(3)] == [
        "greedy",
        "greedy",
        "sampled",
        "penalties",
        "penalties",
    ]
    assert [level(3, ahead=1), level(3, ahead=2)] == ["penalties", "greedy"], "once it may end it is a greedy row"


def test_several_steps_ahead_are_the_steps_one_by_one(sampler):
    row = Row({"temperature": 1.0}, seed=5)
    sampler.assign_slot(0, row.params(VOCAB_SIZE), row.prompt)
    all_logits = np.random.default_rng(0).normal(size=(5, 1, VOCAB_SIZE)).astype(np.float32)
    first = row.plan_row(0)
    one_by_one = [
        int(choose(sampler, [first._replace(context_len=first.context_len + index)], logits).tokens[0])
        for index, logits in enumerate(all_logits)
    ]
    ahead = [int(choose(sampler, [first], logits, ahead=index).tokens[0]) for index, logits in enumerate(all_logits)]
    assert ahead == one_by_one
    options, _ = sampler.slots.rows([first], 1)
    np.testing.assert_array_equal(options.advanced(3).ints, sampler.slots.rows([first], 1, 3)[0].ints)


def test_options_kept_on_the_device_are_those_of_each_step(sampler):
    """They are placed once, whatever is decoded, until a slot is given to another request."""
    rows = [Row({"temperature": 1.0}, seed=1), Row({}, prompt=(3, 4, 5, 6)), Row({"top_p": 0.9}, seed=3)]
    for slot, row in enumerate(rows):
        sampler.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    plan_rows = [row.plan_row(slot) for slot, row in enumerate(rows)]
    kept, draws = sampler.fused_options(plan_rows, NUM_ROWS)
    for step in range(3):
        now = [row._replace(context_len=row.context_len + step) for row in plan_rows]
        assert sampler.fused_options(now, NUM_ROWS)[0] is kept
        lengths = np.array([row.context_len + 1 for row in now] + [0] * (NUM_ROWS - len(now)))
        expected, batch_rows = sampler.slots.rows(now, NUM_ROWS)
        jax.tree.map(np.testing.assert_array_equal, kept.advanced(lengths), expected)
        assert draws == (batch_rows.level == "sampled")
    sampler.assign_slot(1, Row({"top_k": 5}, seed=9).params(VOCAB_SIZE), (1, 2))
    changed, _ = sampler.fused_options(plan_rows, NUM_ROWS)
    assert changed.int_column("top_k")[1] == 5
