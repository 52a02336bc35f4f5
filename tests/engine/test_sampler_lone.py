"""Rows whose options depend on their whole history are chosen for by themselves, beside the others of the batch."""

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
    """transformers' processors of the options that make a row lone."""
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
def test_a_lone_row_is_greedy_as_transformers_is(programs, options):
    programs.reset()
    rng = np.random.default_rng(3)
    row, slot = Row({**options, "logprobs": 2}, prompt=(4, 5, 6, 4, 5, 4)), 2
    beside = Row({"temperature": 0.7, "top_k": 9}, seed=5)
    programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    programs.assign_slot(0, beside.params(VOCAB_SIZE), beside.prompt)
    assert (programs.slots.needs_history(slot), programs.slots.needs_history(0)) == (True, False)
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


def test_a_lone_row_draws_as_it_would_among_the_others(programs):
    """With an n-gram size that nothing can reach, a seed draws the same tokens on either road."""
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
        lone, other = sampled.tokens.tolist()[:2]
        assert lone == other
        assert np.isfinite(processed_scores(rows[1], logits[0])[lone])
        outputs.append(lone)
    assert len(set(outputs)) > 3


def test_a_lone_row_without_a_token_to_choose_is_told(programs):
    programs.reset()
    rows = [Row({**NGRAM, "temperature": temperature}) for temperature in (0, 1.0)]
    for slot, row in enumerate(rows):
        programs.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt)
    logits = jnp.full((4, VOCAB_SIZE), jnp.nan)
    sampled = programs.sample([row.plan_row(slot) for slot, row in enumerate(rows)], logits)
    assert sampled.tokens.tolist()[:2] == [INVALID_TOKEN] * 2
    assert programs.last_tokens.tolist()[:2] == [0, 0]


def test_a_slot_that_was_lone_is_forgotten(programs):
    programs.reset()
    programs.assign_slot(0, Row(NGRAM).params(VOCAB_SIZE), (4, 5, 4))
    programs.assign_slot(0, Row({}).params(VOCAB_SIZE), (4, 5, 4))
    logits = np.zeros((4, VOCAB_SIZE), np.float32)
    logits[:, 5] = 1  # "4 5" would be the prompt's again
    sampled = programs.sample([Row({}, prompt=(4, 5, 4)).plan_row(0)], jnp.asarray(logits))
    assert sampled.tokens[0] == 5
