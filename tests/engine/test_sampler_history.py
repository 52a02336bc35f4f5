"""Rows whose options depend on the order of their tokens, in one program with the others of the batch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampler_oracle import Row, adjusted_scores, processed_scores
from scipy.special import log_softmax
from transformers.generation import logits_process as hf

from torchax_serve.sampling.sampler import Sampler
from torchax_serve.scheduler import INVALID_TOKEN

VOCAB_SIZE, NUM_STEPS = 40, 14
NGRAM = {"no_repeat_ngram_size": 2}
WORDS = {"bad_words_ids": [[4, 5], [6, 7], [5, 4, 4], [9]]}


@pytest.fixture(scope="module")
def programs():
    return Sampler(4, VOCAB_SIZE)


def history_processors(options):
    """transformers' processors of the options that need a history."""
    if "no_repeat_ngram_size" in options:
        yield hf.NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"])
    if "bad_words_ids" in options:
        yield hf.NoBadWordsLogitsProcessor(options["bad_words_ids"])


def expected_token(row, logits):
    """Greedy: penalties, and what follows them in transformers' order."""
    scores = torch.tensor(adjusted_scores(row, logits)[None])
    for processor in history_processors(row.options):
        scores = processor(torch.tensor([[*row.prompt, *row.outputs]]), scores)
    return int(scores.argmax())


def likely(rng, num_rows):
    """Logits under which few tokens are chosen, so that they repeat."""
    logits = rng.normal(size=(num_rows, VOCAB_SIZE)).astype(np.float32)
    logits[:, 4:10] += 4
    return logits


@pytest.mark.parametrize(
    "options",
    [
        NGRAM,
        WORDS,
        {**NGRAM, "presence_penalty": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
        {**WORDS, "logit_bias": {4: 3, 5: -1}, "allowed_token_ids": list(range(3, 20))},
    ],
    ids=str,
)
def test_a_row_with_a_history_is_greedy_as_transformers_is(programs, options):
    programs.reset()
    rng = np.random.default_rng(3)
    row, slot = Row({**options, "logprobs": 2}, prompt=(4, 5, 6, 4, 5, 4)), 2
    beside = Row({"temperature": 0.7, "top_k": 9}, seed=5)
    programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    programs.assign_slot(0, beside.params(VOCAB_SIZE), beside.prompt)
    num_changed = 0
    for index in range(NUM_STEPS):
        if index == NUM_STEPS // 2:  # preempted
            slot = 1
            programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt, row.outputs)
        logits = likely(rng, 4)
        sampled = programs.sample([beside.plan_row(0), row.plan_row(slot)], jnp.asarray(logits))
        token = int(sampled.tokens[1])
        assert token == expected_token(row, logits[1])
        assert programs.last_tokens[slot] == token
        expected = log_softmax(logits[1].astype(np.float64))
        np.testing.assert_allclose(sampled.logprobs.chosen[1], expected[token], atol=1e-5)
        num_changed += token != logits[1].argmax()
        row = Row(row.options, row.prompt, (*row.outputs, token))
    assert num_changed > 2, "the options have changed what is chosen"


def test_a_row_with_a_history_draws_as_one_without(programs):
    """With an n-gram size that nothing can reach, a seed draws the same tokens."""
    options = {"temperature": 1.5, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    rng = np.random.default_rng(4)
    programs.reset()
    rows = [Row({**options, "no_repeat_ngram_size": 30}, seed=2**50 + 1), Row(options, seed=2**50 + 1)]
    for slot, row in enumerate(rows):
        programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    outputs = []
    for _ in range(NUM_STEPS):
        logits = np.repeat(likely(rng, 1), 4, axis=0)
        rows = [Row(row.options, row.prompt, tuple(outputs)) for row in rows]
        sampled = programs.sample([row.plan_row(slot) for slot, row in enumerate(rows)], jnp.asarray(logits))
        with_history, other = sampled.tokens.tolist()[:2]
        assert with_history == other
        assert np.isfinite(processed_scores(rows[1], logits[0])[with_history])
        outputs.append(other)
    assert len(set(outputs)) > 3


def test_a_row_without_a_token_to_choose_is_told(programs):
    programs.reset()
    rows = [Row({**NGRAM, "temperature": temperature}) for temperature in (0, 1.0)]
    for slot, row in enumerate(rows):
        programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    logits = jnp.full((4, VOCAB_SIZE), jnp.nan)
    sampled = programs.sample([row.plan_row(slot) for slot, row in enumerate(rows)], logits)
    assert sampled.tokens.tolist()[:2] == [INVALID_TOKEN] * 2
    assert programs.last_tokens.tolist()[:2] == [0, 0]


@pytest.mark.parametrize("before", [NGRAM, {"logit_bias": {6: 50}}, {"suppress_tokens": [5]}], ids=str)
def test_a_slot_keeps_nothing_of_the_request_before(programs, before):
    """Also not in a step at the level of another row."""
    programs.reset()
    programs.assign_slot(0, Row(before).params(VOCAB_SIZE), (4, 5, 4))
    programs.assign_slot(0, Row({}).params(VOCAB_SIZE), (4, 5, 4))
    programs.assign_slot(1, Row({**NGRAM, "logit_bias": {7: 1}}).params(VOCAB_SIZE), (4, 5, 4))
    logits = np.zeros((4, VOCAB_SIZE), np.float32)
    logits[:, 5] = 2  # "4 5" would be the prompt's again
    rows = [Row({}, prompt=(4, 5, 4)).plan_row(slot) for slot in range(2)]
    assert programs.sample(rows, jnp.asarray(logits)).tokens.tolist()[:2] == [5, 7]


def test_no_option_compiles_a_program_but_larger_sizes(programs):
    """One program for all options of a history; sizes grow by powers of two and by buckets."""
    programs.reset()
    logits = jnp.zeros((4, VOCAB_SIZE))

    def num_compiled(options, prompt=(4, 5)):
        before = programs.num_programs
        programs.assign_slot(0, Row(options).params(VOCAB_SIZE), prompt)
        programs.sample([Row({}, prompt=prompt).plan_row(0)], logits)
        return programs.num_programs - before

    words = {"bad_words_ids": [[index % 30 + 3, 5] for index in range(17)]}
    assert num_compiled({**NGRAM, **words}) <= 1
    assert num_compiled({"no_repeat_ngram_size": 5, "temperature": 1.0, "top_h": 0.4}) <= 1, "with draws"
    assert num_compiled({"no_repeat_ngram_size": 4, "temperature": 0.5, "typical_p": 0.4, **words}) == 0
    assert num_compiled({"sequence_bias": [[[4, 5], 2.0]], "repetition_penalty": 1.2}) == 0
    assert num_compiled(NGRAM, prompt=(4, 5) * 16) == 0
    assert num_compiled({"bad_words_ids": [[4, 5, 6]]}) == 1, "longer sequences"
    assert num_compiled(words, prompt=(4, 5) * 40) == 1, "a longer prompt"
    assert num_compiled(NGRAM) == 0


def bits(allowed):
    """int32[n, words]: masks in which bit i of word w allows token 32 w + i."""
    is_allowed = np.zeros((len(allowed), -(-VOCAB_SIZE // 32) * 32), np.uint8)
    for row, tokens in enumerate(allowed):
        is_allowed[row, list(tokens)] = 1
    return np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 5}, {"presence_penalty": 1}, NGRAM], ids=str)
def test_a_mask_allows_the_tokens_of_its_bits(programs, options):
    """At every level, also where a row has none to sample."""
    programs.reset()
    allowed = [{31, 32, 39}, {0}, set(), range(VOCAB_SIZE)]
    for slot in range(4):
        programs.assign_slot(slot, Row(options, seed=slot).params(VOCAB_SIZE), (7, 8))
    logits = np.random.default_rng(8).normal(size=(4, VOCAB_SIZE)).astype(np.float32)
    rows = [Row(options).plan_row(slot) for slot in range(4)]
    sampled = programs.sample(rows, jnp.asarray(logits), bitmask=bits(allowed))
    tokens = sampled.tokens.tolist()
    assert tokens[0] in allowed[0]
    assert tokens[1:3] == [0, INVALID_TOKEN]
    if "temperature" not in options:
        assert tokens[0] == max(allowed[0], key=lambda token: logits[0, token])
        assert tokens[3] == logits[3].argmax()
    assert programs.last_tokens.tolist() == [max(token, 0) for token in tokens]
