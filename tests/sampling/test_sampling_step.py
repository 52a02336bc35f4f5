"""Steps of a static batch: the tokens and scores of transformers' `generate`, and no second compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling_reference import EOS, PAD, Batch, left_padded_prompts, prepared_config, tiny_model

from torchax_serve.sampling.batch_sampler import sample_batch
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour, installed_rules

VOCAB_SIZE, BATCH, PROMPT_LEN, NUM_NEW = 40, 3, 5, 12


def decode(model, batch, prompt, mask):
    """The loop of `generate` with torch's forward and our sampler; (tokens, scores of each step)."""
    all_scores, tokens = [], prompt
    while not bool(batch.state.ended.all()):
        ids = torch.tensor(tokens, dtype=torch.long)
        full_mask = torch.nn.functional.pad(torch.tensor(mask), (0, ids.shape[1] - PROMPT_LEN), value=1)
        positions = (full_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=full_mask, position_ids=positions).logits[:, -1]
        chosen, scores = batch.sample(jnp.asarray(logits.numpy()), keep_scores=True)
        all_scores.append(np.asarray(scores))
        tokens = np.concatenate([tokens, np.asarray(chosen)[:, None]], axis=1)
    return tokens, np.stack(all_scores)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": [7, 11, 17, 22]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "bad_words_ids": [[5], [9, 3]], "eos_token_id": 7},
        {"forced_eos_token_id": 2, "exponential_decay_length_penalty": (2, 1.5)},
        {"do_sample": True, "top_k": 1, "temperature": 2.0, "suppress_tokens": [20, 21]},
    ],
    ids=str,
)
def test_tokens_and_scores_of_generate(options):
    model = tiny_model(VOCAB_SIZE)
    prompt, mask = left_padded_prompts(np.random.default_rng(3), BATCH, PROMPT_LEN, VOCAB_SIZE)
    options = {"max_new_tokens": NUM_NEW, **options}
    expected = model.generate(
        torch.as_tensor(prompt),
        attention_mask=torch.as_tensor(mask),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    config = prepared_config(VOCAB_SIZE, PROMPT_LEN, options)
    batch = Batch(config, prompt, vocab_size=VOCAB_SIZE, attention_mask=mask)
    tokens, scores = decode(model, batch, prompt, mask)
    np.testing.assert_array_equal(tokens, expected.sequences)
    going_on = ~np.isin(tokens[:, PROMPT_LEN:-1], config._eos_token_tensor.tolist()).T  # behind eos, padding differs
    going_on = np.concatenate([np.ones((1, BATCH), bool), np.logical_and.accumulate(going_on)])
    expected_scores = torch.stack(expected.scores).numpy()
    np.testing.assert_allclose(scores[going_on], expected_scores[going_on], rtol=1e-4, atol=1e-4)


def test_rows_without_eos_end_by_length_and_go_on_choosing():
    config = prepared_config(VOCAB_SIZE, PROMPT_LEN, {"max_new_tokens": 3})
    config.eos_token_id = None
    batch = Batch(config, np.zeros((2, PROMPT_LEN), int), vocab_size=VOCAB_SIZE)
    for num_new in (1, 2, 3):
        tokens, _ = batch.sample(jnp.eye(2, VOCAB_SIZE, k=EOS[0]))
        assert tokens.tolist() == [2, 3]
        assert batch.state.ended.tolist() == [num_new == 3] * 2


def test_ended_rows_are_padded():
    config = prepared_config(VOCAB_SIZE, PROMPT_LEN, {})
    batch = Batch(config, np.zeros((2, PROMPT_LEN), int), vocab_size=VOCAB_SIZE)
    tokens, _ = batch.sample(jnp.eye(2, VOCAB_SIZE, k=EOS[0]))
    assert (tokens.tolist(), batch.state.ended.tolist()) == ([2, 3], [True, False])
    tokens, _ = batch.sample(jnp.eye(2, VOCAB_SIZE, k=8))
    assert (tokens.tolist(), batch.state.ended.tolist()) == ([PAD, 9], [True, False])


def test_options_compile_levels_and_sizes_and_nothing_else():
    """The programs of static batches are counted by JAX's own cache of them."""

    def run(prompt_len, **options):
        config = prepared_config(VOCAB_SIZE, prompt_len, {"max_new_tokens": 6, **options})
        batch = Batch(config, np.zeros((2, prompt_len), int), vocab_size=VOCAB_SIZE, seed=prompt_len)
        before = sample_batch._cache_size()
        for _ in range(3):
            batch.sample(jnp.zeros((2, VOCAB_SIZE)))
        return sample_batch._cache_size() - before

    sample_batch.clear_cache()
    history = {"repetition_penalty": 1.1, "bad_words_ids": [[4, 5]]}
    assert run(4, do_sample=True, temperature=0.5, top_k=20, top_p=0.5, eos_token_id=3, **history) == 1
    assert run(9, do_sample=True, temperature=0.9, top_k=33, eos_token_id=8, bad_words_ids=[[6, 7]]) == 0
    others = {"no_repeat_ngram_size": 2, "bad_words_ids": [[6, 7]], "renormalize_logits": True, "eos_token_id": 8}
    assert [run(9, do_sample=True, **others), run(9, **others), run(4, eos_token_id=3, **history)] == [0, 1, 0], (
        "and without draws"
    )
    assert [run(4, do_sample=True, temperature=0.5, top_p=0.9), run(4, do_sample=True, min_p=0.1)] == [1, 0]
    assert [run(4, repetition_penalty=1.1), run(4, suppress_tokens=[3], min_new_tokens=2)] == [1, 0]
    assert [run(4), run(7)] == [1, 0]


@pytest.mark.parametrize("flipped", ["penalty_skips_padding", "bias_needs_longer_context", "decay_skips_infinite"])
def test_each_rule_of_a_release_changes_what_it_names(flipped, monkeypatch):
    """The release installed here is compared with transformers elsewhere; this shows the other branch is another."""
    options = {
        "penalty_skips_padding": {"repetition_penalty": 2.0},
        "bias_needs_longer_context": {"sequence_bias": [[[8, 8, 9], 2.0]]},
        "decay_skips_infinite": {"exponential_decay_length_penalty": (0, 2.0), "suppress_tokens": []},
    }[flipped]
    prompt, mask = np.array([[PAD, 8], [8, 8]]), np.array([[0, 1], [1, 1]])
    logits = jnp.ones((2, VOCAB_SIZE)).at[0, EOS[0]].set(-jnp.inf)

    def scores():
        config = prepared_config(VOCAB_SIZE, 2, options)
        batch = Batch(config, prompt, vocab_size=VOCAB_SIZE, attention_mask=mask)
        if flipped == "decay_skips_infinite":
            batch.append([8, 8])
        jax.clear_caches()  # the rules of the installed release are constants of a program
        return np.asarray(batch.chosen(logits)[1])

    rules, before = installed_rules(), scores()
    other = TransformersBehaviour(**{**vars(rules), flipped: not getattr(rules, flipped)})
    for module in ("batch_sampler", "processors"):
        monkeypatch.setattr(f"torchax_serve.sampling.{module}.installed_rules", lambda: other)
    after = scores()
    changed = (after != before) & ~(np.isnan(before) & np.isnan(after))
    column = {"penalty_skips_padding": PAD, "bias_needs_longer_context": 9, "decay_skips_infinite": EOS[0]}[flipped]
    row = 1 if flipped == "bias_needs_longer_context" else 0
    assert np.argwhere(changed).tolist() == [[row, column]]


def test_tokens_beyond_the_columns_are_left_alone():
    """Embeddings can have more rows than the logits have columns."""
    options = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1}
    config = prepared_config(VOCAB_SIZE, 3, options)
    batch = Batch(config, np.array([[VOCAB_SIZE, VOCAB_SIZE + 7, 4]]), vocab_size=VOCAB_SIZE)
    scores = batch.chosen(jnp.ones((1, VOCAB_SIZE)))[1]
    assert np.argwhere(np.asarray(scores) != 1).tolist() == [[0, 4]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed: expected a whole number"),
        ({"seed": 2**64}, "seed: expected a whole number"),
        ({"seed": 0, "attention_mask": np.ones((2, 3))}, "attention_mask: expected shape"),
        ({"seed": 0, "prompt_ids": np.zeros(2, int)}, "prompt_ids: expected int"),
        ({"seed": 0, "prompt_ids": np.zeros((2, 2))}, "prompt_ids: expected int"),
    ],
)
def test_bad_starts_are_refused(arguments, words):
    config = prepared_config(VOCAB_SIZE, 2, {})
    with pytest.raises(ValueError, match=words):
        Batch(config, **{"prompt_ids": np.zeros((2, 2), int), "vocab_size": VOCAB_SIZE, **arguments})
