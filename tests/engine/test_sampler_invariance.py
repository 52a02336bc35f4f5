"""A row's token and log-probabilities are the same to the last bit, whatever runs beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_oracle import Row

from torchax_serve.sampling.sampler import Sampler

OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.4, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.95},
    {"top_k": 120, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.97},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.1, "typical_p": 0.6, "top_k": 60},
    {"temperature": 0.9, "typical_p": 0.7},
    {"temperature": 1.2, "epsilon_cutoff": 0.001, "eta_cutoff": 0.002},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": -0.3, "temperature": 0.8, "top_k": 40},
    {"logit_bias": {5: 3.0, 9: -4.0}, "top_p": 0.7},
    {"allowed_token_ids": list(range(100, 300)), "temperature": 1.0},
    {"no_repeat_ngram_size": 1, "temperature": 1.1, "top_p": 0.9},
    {"bad_words_ids": [[5, 6], [7, 8, 9]], "top_h": 0.7},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0},
]


def requests(rng, options):
    return [
        Row(
            {"logprobs": 5, **given},
            prompt=tuple(rng.integers(0, 300, 4).tolist()),
            outputs=tuple(rng.integers(0, 300, 6).tolist()),
            seed=int(rng.integers(2**63)),
        )
        for given in options
    ]


NUM_SLOTS, VOCAB_SIZE = 19, 2000  # of these, XLA adds up one row in another order than sixteen


@pytest.fixture(scope="module")
def sampler():
    return Sampler(NUM_SLOTS, VOCAB_SIZE)


def results(sampler, rows, logits, num_rows):
    """What each row gets in a batch of `num_rows`, the rest of it padding, as bytes: token and log-probabilities."""
    sampler.reset()
    slots = np.random.default_rng(len(rows)).permutation(NUM_SLOTS)[: len(rows)].tolist()
    for slot, row in zip(slots, rows, strict=True):
        sampler.assign_slot(slot, row.params(VOCAB_SIZE), row.prompt, row.outputs)
    plan_rows = [row.plan_row(slot) for slot, row in zip(slots, rows, strict=True)]
    padded = np.concatenate([logits, np.full((num_rows - len(rows), VOCAB_SIZE), np.nan, np.float32)])
    sampled = sampler.sample(plan_rows, jnp.asarray(padded))
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_array_equal(np.asarray(sampler.last_tokens)[slots], tokens[: len(rows)])
    logprobs = dataclasses.replace(sampled.logprobs, processed=None)  # which a batch without histories has not
    arrays = [tokens, *map(np.asarray, jax.tree.leaves(logprobs))]
    return [tuple(array[index].tobytes() for array in arrays) for index in range(len(rows))]


def test_a_row_is_the_same_permuted_and_alone(sampler):
    rng = np.random.default_rng(0)
    rows = requests(rng, OPTIONS)
    logits = rng.normal(size=(len(rows), VOCAB_SIZE), scale=3).astype(np.float32)
    together = results(sampler, rows[:16], logits[:16], 16) + results(sampler, rows[16:], logits[16:], 16)
    order = rng.permutation(len(rows))
    permuted = results(sampler, [rows[index] for index in order], logits[order], NUM_SLOTS)
    assert [together[index] for index in order] == permuted
    for index, row in enumerate(rows):
        alone = results(sampler, [row], logits[index : index + 1], 1)  # a program of its own level
        assert alone == together[index : index + 1], row.options
