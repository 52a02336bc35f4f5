"""`select`: greedy as torch's argmax, draws by transformers' scores, each row for itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling_reference import prepared_config, processors_of, reference_scores
from scipy.special import softmax
from scipy.stats import chisquare

from torchax_serve import sampling
from torchax_serve.sampling.selection import draw, first_argmax

compiled_process, compiled_select, compiled_step = map(
    jax.jit, (sampling.process, sampling.select, sampling.sample_step)
)

SIZES = [1, 7, 64, 100, 503, 4000, 4099]  # divisible into blocks or padded to them


def plan_of(vocab_size, prompt_len=2, **options):
    config = prepared_config(vocab_size, prompt_len, options)
    return sampling.GenerationSampling.build(config, prompt_len=prompt_len, vocab_size=vocab_size)


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


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.5, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.95, "temperature": 1.5},
        {"top_k": 0, "typical_p": 0.8, "repetition_penalty": 1.5},
        {"top_k": 0, "min_p": 0.02, "suppress_tokens": [3, 4], "sequence_bias": [[[9], 4.0]]},
        {"top_k": 0, "eta_cutoff": 0.01, "renormalize_logits": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["rows", "positions"])
def test_draws_follow_the_distribution_of_transformers_scores(options, over):
    vocab_size, num_draws = 300, 20_000
    prompt = np.array([[7, 8]])
    logits = np.random.default_rng(1).normal(size=(1, vocab_size), scale=2).astype(np.float32)
    config = prepared_config(vocab_size, 2, {"do_sample": True, **options})
    expected = reference_scores(processors_of(config, vocab_size, prompt, np.ones((1, 2))), prompt, logits)
    plan = sampling.GenerationSampling.build(config, prompt_len=2, vocab_size=vocab_size)
    state = sampling.init_history(plan, np.repeat(prompt, num_draws if over == "rows" else 1, axis=0), seed=11)
    scores = jnp.broadcast_to(
        compiled_process(plan, sampling.init_history(plan, prompt, seed=0), jnp.asarray(logits)),
        (len(state.ended), vocab_size),
    )
    if over == "rows":
        tokens = compiled_select(plan, state, scores)
    else:
        at = jax.vmap(lambda n: sampling.select(plan, dataclasses.replace(state, num_new=n), scores)[0])
        tokens = jax.jit(at)(jnp.arange(num_draws))
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
    keys = jax.random.split(jax.random.key(0), 20_000)
    scores = jnp.broadcast_to(jnp.asarray(logits / 1.1, jnp.float32), (20_000, 300))
    probabilities = softmax(logits)
    common = probabilities * 20_000 >= 5
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
    plan = plan_of(300, do_sample=True, top_k=1, temperature=3.0)
    logits = np.random.default_rng(0).normal(size=(50, 300)).astype(np.float32)
    state = sampling.init_history(plan, np.zeros((50, 2), int), seed=5)
    tokens = compiled_select(plan, state, compiled_process(plan, state, jnp.asarray(logits)))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_a_row_without_a_distribution_is_told():
    plan = plan_of(300, do_sample=True)
    scores = np.zeros((4, 300), np.float32)
    scores[0], scores[1, 3], scores[2, 299] = -np.inf, np.nan, np.inf
    state = sampling.init_history(plan, np.zeros((4, 2), int), seed=5)
    tokens = np.asarray(compiled_select(plan, state, jnp.asarray(scores)))
    assert (tokens[:3] == sampling.INVALID_TOKEN).all()
    assert 0 <= tokens[3] < 300


def test_a_tiny_probability_is_drawn_as_often_as_it_should():
    """One uniform float32 could not tell apart tokens of less than 1e-7; two levels can."""
    vocab_size, num_draws = 4096, 200
    scores = np.full((1, vocab_size), np.log(1e-9), np.float32)  # all of the last block's 64 have 1e-9 at most
    scores[0, -64:] = np.log(np.linspace(1, 2, 64))
    keys = jax.random.split(jax.random.key(3), num_draws)
    tokens = np.asarray(jax.jit(draw)(keys, jnp.broadcast_to(jnp.asarray(scores), (num_draws, vocab_size))))
    assert len(np.unique(tokens)) > 50


def test_seeds_rows_and_positions_all_matter_and_repeat():
    plan = plan_of(4000, do_sample=True, top_k=0)
    scores = jnp.zeros((3, 4000))

    def tokens_of(seed, num_new=0):
        state = sampling.init_history(plan, np.zeros((3, 2), int), seed=seed)
        return compiled_select(plan, dataclasses.replace(state, num_new=jnp.int32(num_new)), scores).tolist()

    assert tokens_of(1) == tokens_of(1)
    assert len({*tokens_of(1), *tokens_of(2), *tokens_of(1 + 2**32), *tokens_of(2**64 - 1), *tokens_of(1, 1)}) == 15


def test_a_row_draws_the_same_whatever_runs_beside_it():
    plan = plan_of(600, do_sample=True, prompt_len=5)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 600)).astype(np.float32))
    prompts = np.random.default_rng(1).integers(0, 600, (4, 5))
    together, state, _ = compiled_step(plan, sampling.init_history(plan, prompts, seed=[4, 9, 4, 7]), logits)
    together_next, _, _ = compiled_step(plan, state, logits)
    shorter_plan = plan_of(600, do_sample=True, prompt_len=3)  # less left padding
    for row, seed in enumerate([4, 9, 4, 7]):
        state = sampling.init_history(shorter_plan, prompts[row : row + 1, 2:], seed=[seed])
        alone, state, _ = compiled_step(shorter_plan, state, logits[row : row + 1])
        alone_next, _, _ = compiled_step(shorter_plan, state, logits[row : row + 1])
        assert (alone[0], alone_next[0]) == (together[row], together_next[row])
    first_row = sampling.init_history(plan, prompts, seed=9).keys[0]
    assert first_row == sampling.init_history(plan, prompts, seed=[4, 9, 4, 7]).keys[1]
