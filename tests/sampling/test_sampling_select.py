"""Tokens: greedy as torch's argmax, draws by transformers' scores, each row for itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling_reference import Batch, prepared_config, processors_of, reference_scores
from scipy.special import softmax
from scipy.stats import chisquare
from thorough import pairs

from torchax_serve import sampling
from torchax_serve.sampling.selection import draw, first_argmax

NUM_DRAWS = 8192
SIZES = [1, 7, 64, 100, 503, 4000, 4099]  # divisible into blocks or padded to them


def batch_of(vocab_size, prompts, seed=0, **options):
    config = prepared_config(vocab_size, prompts.shape[1], options)
    return Batch(config, prompts, vocab_size=vocab_size, seed=seed)


def tokens_of(batch, logits):
    return np.asarray(batch.chosen(jnp.asarray(logits))[0])


@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_takes_the_first_of_equal_maxima(vocab_size):
    rng = np.random.default_rng(vocab_size)
    few_values = rng.integers(0, 3, (64, vocab_size)).astype(np.float32)
    one_value = np.zeros((1, vocab_size), np.float32)
    removed = np.full((1, vocab_size), -np.inf, np.float32)
    last = np.zeros((1, vocab_size), np.float32)
    last[0, -1] = 1
    scores = np.concatenate([few_values, one_value, removed, -few_values, last])
    np.testing.assert_array_equal(first_argmax(jnp.asarray(scores)), torch.argmax(torch.as_tensor(scores), -1))


def test_greedy_takes_nan_and_infinity_for_the_maximum_as_torch_does():
    scores = np.zeros((3, 600), np.float32)
    scores[0, [400, 500]] = np.nan
    scores[1, [30, 31]] = np.inf
    scores[2, [5, 590]] = np.inf, np.nan
    np.testing.assert_array_equal(first_argmax(jnp.asarray(scores)), torch.argmax(torch.as_tensor(scores), -1))


OPTIONS = [
    {"top_k": 0},
    {"top_k": 0, "temperature": 0.5, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "temperature": 1.5},
    {"top_k": 0, "typical_p": 0.8, "repetition_penalty": 1.5},
    {"top_k": 0, "min_p": 0.02, "suppress_tokens": [3, 4], "sequence_bias": [[[9], 4.0]]},
    {"top_k": 0, "eta_cutoff": 0.01, "renormalize_logits": True},
]


@pytest.mark.parametrize(("over", "options"), pairs(["rows", "positions"], OPTIONS, one_in=6), ids=str)
def test_draws_follow_the_distribution_of_transformers_scores(options, over):
    vocab_size, num_draws = 300, NUM_DRAWS
    prompt = np.array([[7, 8]])
    logits = np.random.default_rng(1).normal(size=(1, vocab_size), scale=2).astype(np.float32)
    config = prepared_config(vocab_size, 2, {"do_sample": True, **options})
    expected = reference_scores(processors_of(config, vocab_size, prompt, np.ones((1, 2))), prompt, logits)
    batch = Batch(config, np.repeat(prompt, num_draws if over == "rows" else 1, axis=0), vocab_size=vocab_size, seed=11)
    if over == "positions":  # of one row
        options = jax.tree.map(lambda array: jnp.repeat(array, num_draws, axis=0), batch._options.rows)
        options = options.advanced(jnp.arange(num_draws))
        batch._options = dataclasses.replace(batch._options, rows=options)
    tokens = tokens_of(batch, np.repeat(logits, num_draws, axis=0))
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    probabilities = softmax(expected[0].astype(np.float64))
    assert counts[probabilities == 0].sum() == 0
    # The test wants five expected draws a bin, so the rare tokens share one.
    rare = probabilities * num_draws < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected_counts = np.append(probabilities[~rare], probabilities[rare].sum()) * num_draws
    kept = expected_counts > 0
    assert chisquare(observed[kept], expected_counts[kept]).pvalue > 1e-3


def test_a_wrong_distribution_fails_the_chi_square_test():
    """The power of the test above: a temperature off by a tenth is seen."""
    logits = np.random.default_rng(1).normal(size=300, scale=2)
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    scores = jnp.broadcast_to(jnp.asarray(logits / 1.1, jnp.float32), (NUM_DRAWS, 300))
    probabilities = softmax(logits)
    common = probabilities * NUM_DRAWS >= 5
    counts = np.bincount(np.asarray(jax.jit(draw)(keys, scores)), minlength=300)
    observed, expected = counts[common], probabilities[common]
    assert chisquare(observed, expected / expected.sum() * observed.sum()).pvalue < 1e-3


def test_draws_of_a_large_vocabulary_reach_all_blocks():
    """Blocks are chosen in proportion to their mass, with padding in the last one."""
    vocab_size, num_draws = 4099, 8192
    keys = jax.random.split(jax.random.key(3), num_draws)
    tokens = np.asarray(jax.jit(draw)(keys, jnp.zeros((num_draws, vocab_size))))
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert chisquare(np.histogram(tokens, bins=np.linspace(0, vocab_size, 33))[0]).pvalue > 1e-3


def test_top_k_of_one_is_greedy():
    batch = batch_of(300, np.zeros((50, 2), int), seed=5, do_sample=True, top_k=1, temperature=3.0)
    logits = np.random.default_rng(0).normal(size=(50, 300)).astype(np.float32)
    np.testing.assert_array_equal(tokens_of(batch, logits), logits.argmax(-1))


def test_a_row_without_a_distribution_is_told():
    scores = np.zeros((4, 300), np.float32)
    scores[0], scores[1, 3], scores[2, 299] = -np.inf, np.nan, np.inf
    tokens = tokens_of(batch_of(300, np.zeros((4, 2), int), do_sample=True, top_k=0), scores)
    assert (tokens[:3] == sampling.INVALID_TOKEN).all()
    assert 0 <= tokens[3] < 300
    greedy = tokens_of(batch_of(300, np.zeros((4, 2), int)), scores)
    np.testing.assert_array_equal(greedy, torch.argmax(torch.as_tensor(scores), -1))


def test_a_tiny_temperature_draws_the_best_of_what_is_left():
    scores = np.random.default_rng(2).normal(size=(3, 300)).astype(np.float32)
    scores[0, :] = 0  # a nucleus keeps the last of equal scores
    batch = batch_of(300, np.zeros((3, 2), int), do_sample=True, temperature=1e-9, top_k=0, top_p=1e-6)
    tokens, kept = map(np.asarray, batch.chosen(scores))
    np.testing.assert_array_equal(tokens, [299, *scores[1:].argmax(-1)])
    assert (np.isfinite(kept).sum(-1) == 1).all()


def test_a_tiny_probability_is_drawn_as_often_as_it_should():
    """One uniform float32 could not tell apart tokens of less than 1e-7; two levels can."""
    vocab_size, num_draws = 4096, 200
    scores = np.full((1, vocab_size), np.log(1e-9), np.float32)  # all of the last block's 64 have 1e-9 at most
    scores[0, -64:] = np.log(np.linspace(1, 2, 64))
    keys = jax.random.split(jax.random.key(3), num_draws)
    tokens = np.asarray(jax.jit(draw)(keys, jnp.broadcast_to(jnp.asarray(scores), (num_draws, vocab_size))))
    assert len(np.unique(tokens)) > 50


def test_seeds_rows_and_positions_all_matter_and_repeat():
    def drawn(seed, num_new=0):
        batch = batch_of(4000, np.zeros((3, 2), int), seed, do_sample=True, top_k=0)
        for _ in range(num_new):
            batch.append([0, 0, 0])
        return tokens_of(batch, np.zeros((3, 4000))).tolist()

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2), *drawn(1 + 2**32), *drawn(2**64 - 1), *drawn(1, 1)}) == 15


def test_a_row_draws_the_same_with_fewer_rows_and_less_padding():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 600)).astype(np.float32))
    prompts = np.random.default_rng(1).integers(0, 600, (4, 5))
    together, fewer = batch_of(600, prompts, 4, do_sample=True), batch_of(600, prompts[:2, 2:], 4, do_sample=True)
    for _ in range(2):
        np.testing.assert_array_equal(together.sample(logits)[0][:2], fewer.sample(logits[:2])[0])
