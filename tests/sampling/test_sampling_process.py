"""Scores against transformers' own LogitsProcessorList: the same -inf, the same numbers, over growing histories."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sampling_reference import (
    Batch,
    compiled_choose,
    left_padded_prompts,
    prepared_config,
    processors_of,
    reference_scores,
)
from thorough import except_for, pairs

from torchax_serve.sampling.transformers_behaviour import installed_rules

SMALL, LARGE = 40, 700  # thresholds by comparing pairs, and bit by bit with candidates behind top-k
BATCH, PROMPT_LEN, NUM_STEPS = 3, 6, 4

SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_k_of_all": {"top_k": 10_000},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "top_p_of_almost_nothing": {"top_k": 0, "top_p": 1e-6},
    "top_k_top_p": {"top_k": 12, "top_p": 0.6, "temperature": 1.4},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "min_p_of_the_best": {"min_p": 1.0},
    "typical_p": {"top_k": 0, "typical_p": 0.4},
    "typical_p_behind_top_k": {"top_k": 20, "typical_p": 0.5},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.02},
    "epsilon_cutoff_above_the_best": {"top_k": 0, "epsilon_cutoff": 0.99},
    "eta_cutoff": {"top_k": 0, "eta_cutoff": 0.05},
    "top_h": {"top_k": 0, "top_h": 0.4},
    "top_h_behind_suppressed": {"top_h": 0.9, "suppress_tokens": list(range(8, SMALL))},
    "everything": {
        "temperature": 0.9,
        "top_h": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-3,
        "eta_cutoff": 1e-3,
        "renormalize_logits": True,
    },
}
ALL_MODES = {
    "nothing": {},
    "sequence_bias": {"sequence_bias": [[[3], 2.5], [[4, 3], -3.0], [[3, 4, 6], 7.0], [[6, 3], 1.0], [[7, 3], 2.0]]},
    "bias_prefix_fills_the_prompt": {"sequence_bias": [[[3] * PROMPT_LEN + [4], 5.0]]},
    "bias_longer_than_any_row": {"sequence_bias": [[[3] * 60, 5.0], [[4], 1.0]]},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_bonus": {"repetition_penalty": 0.6},
    "no_repeat_1gram": {"no_repeat_ngram_size": 1},
    "no_repeat_2gram": {"no_repeat_ngram_size": 2},
    "no_repeat_3gram": {"no_repeat_ngram_size": 3},
    "no_repeat_ngram_longer_than_prompt": {"no_repeat_ngram_size": PROMPT_LEN + 2},
    "no_repeat_ngram_longer_than_any_row": {"no_repeat_ngram_size": 60},
    "bad_words": {"bad_words_ids": [[3], [2], [4, 6], [6, 4, 3], [6, 6]]},
    "min_length": {"min_length": PROMPT_LEN + 2},
    "min_new_tokens": {"min_new_tokens": 2},
    "min_new_tokens_one_eos": {"min_new_tokens": 2, "eos_token_id": 4},
    "forced_eos": {"forced_eos_token_id": 5, "max_new_tokens": 3},
    "forced_eos_list": {"forced_eos_token_id": [5, 9], "max_new_tokens": 3},
    "forced_bos_and_begin": {"forced_bos_token_id": 7, "begin_suppress_tokens": [3]},
    "remove_invalid_values": {"remove_invalid_values": True, "bad_words_ids": [[3]], "suppress_tokens": [8]},
    "length_penalty": {"exponential_decay_length_penalty": (1, 1.7)},
    "length_penalty_of_infinite": {"exponential_decay_length_penalty": (1, 1.7), "bad_words_ids": [[4], [5, 6]]},
    "suppress": {"suppress_tokens": [0, 3, 39, 10_000]},
    "suppress_nothing": {"suppress_tokens": []},
    "begin_suppress": {"begin_suppress_tokens": [0, 3]},
    "renormalize": {"renormalize_logits": True, "suppress_tokens": [3]},
}

DIFFERENT_MODES = (
    "sequence_bias",
    "bias_longer_than_any_row",
    "repetition_penalty",
    "no_repeat_2gram",
    "no_repeat_ngram_longer_than_prompt",
    "bad_words",
    "min_length",
    "min_new_tokens",
    "forced_eos_list",
    "forced_bos_and_begin",
    "remove_invalid_values",
    "length_penalty",
    "suppress",
)


def check_steps(options, vocab_size, seed, *, prompt_len=PROMPT_LEN, round_to=None, num_steps=NUM_STEPS):
    """Runs some steps on random logits and appends random tokens, whatever the scores; returns all scores."""
    rng = np.random.default_rng(seed)
    prompt, mask = left_padded_prompts(rng, BATCH, prompt_len, num_tokens=9)
    config = prepared_config(vocab_size, prompt_len, options)
    processors = processors_of(config, vocab_size, prompt, mask)
    batch = Batch(config, prompt, vocab_size=vocab_size, seed=seed, attention_mask=mask)
    tokens, all_scores = prompt, []
    for _ in range(num_steps):
        logits = rng.normal(size=(BATCH, vocab_size), scale=3).astype(np.float32)
        logits = logits if round_to is None else np.round(logits / round_to) * np.float32(round_to)
        scores = np.asarray(batch.chosen(logits)[1])
        expected = reference_scores(processors, tokens, logits)
        np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(expected))
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
        all_scores.append(scores)
        chosen = rng.integers(0, 9, BATCH)
        tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
        batch.append(chosen)
    return np.stack(all_scores)


@pytest.mark.parametrize("name", except_for(DIFFERENT_MODES, ALL_MODES))
def test_processor_of_every_mode(name):
    check_steps(ALL_MODES[name], SMALL, seed=len(name))


@pytest.mark.parametrize(("name", "vocab_size"), pairs(SAMPLING, [SMALL, LARGE], one_in=2))
def test_processor_of_sampling(name, vocab_size):
    check_steps({"do_sample": True, **SAMPLING[name]}, vocab_size, seed=len(name), num_steps=2)


def test_greedy_ignores_sampling_options_as_transformers_does():
    check_steps({"do_sample": False, "temperature": 0.5, "top_p": 0.5, "top_k": 3}, SMALL, seed=0)


def test_forced_bos_after_a_prompt_of_one_token():
    scores = check_steps({"forced_bos_token_id": 7, "begin_suppress_tokens": [3]}, SMALL, seed=0, prompt_len=1)
    assert (scores[0].argmax(-1) == 7).all()
    assert np.isneginf(scores[1][:, 3]).all()


@pytest.fixture
def stable_sort(monkeypatch):
    """torch.sort leaves the order of equal numbers to the CPU's vector instructions; this pins it."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


@pytest.mark.parametrize("round_to", [0.25, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 50},  # rounded to 4.0, hundreds of tokens tie with the 50th: more than the candidates hold
        {"top_k": 50, "top_p": 0.9, "typical_p": 0.95},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "top_p": 1e-6},
        {"top_k": 0, "typical_p": 0.6},
        {"top_k": 0, "min_p": 0.2, "eta_cutoff": 0.01},
    ],
    ids=str,
)
def test_equal_scores_are_cut_where_transformers_cuts_them(options, round_to, stable_sort):
    check_steps({"do_sample": True, **options}, LARGE, seed=3, round_to=round_to, num_steps=3)


def test_ties_overflow_the_candidates():
    """The case above that matters is really there."""
    scores = check_steps({"do_sample": True, "top_k": 50}, LARGE, seed=3, round_to=4.0, num_steps=1)
    assert (np.isfinite(scores).sum(-1) > 128).any()


def test_top_k_sorts_no_whole_row():
    """XLA's CPU backend has a top-k kernel, and falls back to sorting the row where it does not see the pattern."""
    config = prepared_config(LARGE, 2, {"do_sample": True, "top_k": 50, "top_p": 0.9, "typical_p": 0.9, "top_h": 0.9})
    batch = Batch(config, np.zeros((1, 2), np.int32), vocab_size=LARGE)
    arguments = batch._options.rows, batch.state.sampler, jnp.zeros((1, LARGE))
    program = compiled_choose.lower(batch._spec, *arguments).compile().as_text()
    sorts = [line for line in program.splitlines() if " sort(" in line]
    assert all(f",{LARGE}]" not in line for line in sorts)
    assert "TopK" in program


def test_bfloat16_logits_are_processed_in_float32():
    config = prepared_config(SMALL, 2, {"do_sample": True, "temperature": 0.3})
    batch = Batch(config, np.zeros((1, 2), np.int32), vocab_size=SMALL)
    logits = jnp.linspace(-3, 3, SMALL, dtype=jnp.bfloat16)[None]
    scores = batch.chosen(logits)[1]
    assert scores.dtype == jnp.float32
    expected = np.asarray(logits, np.float32) / np.float32(0.3)
    kth = np.sort(expected)[:, [-min(50, SMALL)]]  # transformers' default top_k
    np.testing.assert_allclose(scores, np.where(expected < kth, -np.inf, expected), rtol=1e-6)


number = st.floats(0.05, 0.95)
OPTIONS = st.fixed_dictionaries(
    {"do_sample": st.booleans()},
    optional={
        "temperature": st.floats(0.2, 3),
        "top_k": st.sampled_from([0, 1, 3, 20, 64, 300]),
        "top_p": number,
        "min_p": st.floats(0, 0.5),
        "top_h": number,
        "typical_p": number,
        "epsilon_cutoff": st.floats(1e-4, 0.1),
        "eta_cutoff": st.floats(1e-4, 0.1),
        "repetition_penalty": st.floats(0.5, 2),
        "no_repeat_ngram_size": st.sampled_from([0, 1, 2, 3]),
        "min_length": st.integers(0, PROMPT_LEN + 3),
        "min_new_tokens": st.integers(0, 3),
        "max_new_tokens": st.integers(3, 8),
        "bad_words_ids": st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=4).filter(
            lambda words: any(word not in ([2], [5]) for word in words)
        ),
        "sequence_bias": st.lists(
            st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.floats(-5, 5)).map(list),
            min_size=1,
            max_size=4,
        ),
        "suppress_tokens": st.lists(st.integers(6, 39), max_size=5),
        "begin_suppress_tokens": st.lists(st.integers(0, 39), max_size=5),
        "forced_eos_token_id": st.sampled_from([2, [2, 5]]),
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 2), st.floats(0.9, 1.5)),
        "remove_invalid_values": st.booleans(),
        "renormalize_logits": st.booleans(),
    },
)


RANDOM = {"options": OPTIONS, "seed": st.integers(0, 2**31), "vocab_size": st.sampled_from([SMALL, LARGE])}


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(**RANDOM)
def test_some_random_combinations(options, seed, vocab_size):
    check_combination(options, seed, vocab_size)


@pytest.mark.thorough
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(**RANDOM)
def test_random_combinations(options, seed, vocab_size):
    check_combination(options, seed, vocab_size)


def check_combination(options, seed, vocab_size):
    # Older releases make nan of a banned eos and then raise in other processors; a test above has the nan alone.
    assume(installed_rules().decay_skips_infinite or "exponential_decay_length_penalty" not in options)
    check_steps(options, vocab_size, seed, num_steps=3)
