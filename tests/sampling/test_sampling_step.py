"""`step` as a loop: the tokens and scores of transformers' `generate`, and no second compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling_reference import EOS, PAD, left_padded_prompts, prepared_config, tiny_model

from torchax_serve import sampling
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour, installed_rules

compiled_step = jax.jit(sampling.sample_step)
VOCAB_SIZE, BATCH, PROMPT_LEN, NUM_NEW = 40, 3, 5, 12


def decode(model, plan, prompt, mask, seed=0):
    """The loop of `generate` with torch's forward and our step; (tokens, scores, whether every row ended)."""
    state = sampling.init_history(plan, prompt, seed=seed, attention_mask=mask)
    all_scores = []
    while not bool(state.ended.all()):
        length = int(state.length)
        ids = torch.tensor(np.asarray(state.tokens)[:, :length], dtype=torch.long)
        full_mask = torch.nn.functional.pad(torch.tensor(mask), (0, length - PROMPT_LEN), value=1)
        positions = (full_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=full_mask, position_ids=positions).logits[:, -1]
        _, state, scores = compiled_step(plan, state, jnp.asarray(logits.numpy()))
        all_scores.append(np.asarray(scores))
    return np.asarray(state.tokens)[:, : int(state.length)], np.stack(all_scores)


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
    plan = sampling.GenerationSampling.build(config, prompt_len=PROMPT_LEN, vocab_size=VOCAB_SIZE)
    tokens, scores = decode(model, plan, prompt, mask)
    np.testing.assert_array_equal(tokens, expected.sequences)
    going_on = ~np.isin(tokens[:, PROMPT_LEN:-1], config._eos_token_tensor.tolist()).T  # behind eos, padding differs
    going_on = np.concatenate([np.ones((1, BATCH), bool), np.logical_and.accumulate(going_on)])
    expected_scores = torch.stack(expected.scores).numpy()
    np.testing.assert_allclose(scores[going_on], expected_scores[going_on], rtol=1e-4, atol=1e-4)


def test_rows_without_eos_end_by_length_and_go_on_choosing():
    config = prepared_config(VOCAB_SIZE, PROMPT_LEN, {"max_new_tokens": 3})
    config.eos_token_id = None
    plan = sampling.GenerationSampling.build(config, prompt_len=PROMPT_LEN, vocab_size=VOCAB_SIZE)
    state = sampling.init_history(plan, np.zeros((2, PROMPT_LEN), int), seed=0)
    for num_new in (1, 2, 3):
        tokens, state, _ = compiled_step(plan, state, jnp.eye(2, VOCAB_SIZE, k=EOS[0]))
        assert tokens.tolist() == [2, 3]
        assert state.ended.tolist() == [num_new == 3] * 2


def test_ended_rows_are_padded():
    config = prepared_config(VOCAB_SIZE, PROMPT_LEN, {})
    plan = sampling.GenerationSampling.build(config, prompt_len=PROMPT_LEN, vocab_size=VOCAB_SIZE)
    state = sampling.init_history(plan, np.zeros((2, PROMPT_LEN), int), seed=0)
    tokens, state, _ = compiled_step(plan, state, jnp.eye(2, VOCAB_SIZE, k=EOS[0]))
    assert (tokens.tolist(), state.ended.tolist()) == ([2, 3], [True, False])
    tokens, state, _ = compiled_step(plan, state, jnp.eye(2, VOCAB_SIZE, k=8))
    assert (tokens.tolist(), state.ended.tolist()) == ([PAD, 9], [True, False])


def test_new_numbers_compile_nothing_and_new_steps_do():
    num_traces = 0

    @jax.jit
    def counted_step(plan, state, logits):
        nonlocal num_traces
        num_traces += 1
        return sampling.sample_step(plan, state, logits)

    def run(prompt_len, **options):
        config = prepared_config(VOCAB_SIZE, prompt_len, {"do_sample": True, "max_new_tokens": 6, **options})
        plan = sampling.GenerationSampling.build(config, prompt_len=prompt_len, vocab_size=VOCAB_SIZE)
        state = sampling.init_history(plan, np.zeros((2, prompt_len), int), seed=prompt_len, capacity=32)
        for _ in range(3):
            _, state, _ = counted_step(plan, state, jnp.zeros((2, VOCAB_SIZE)))

    run(4, temperature=0.5, top_k=20, top_p=0.5, repetition_penalty=1.1, eos_token_id=3, bad_words_ids=[[4, 5]])
    run(9, temperature=0.9, top_k=33, top_p=0.9, repetition_penalty=1.9, eos_token_id=8, bad_words_ids=[[6, 7]])
    assert num_traces == 1
    run(4, temperature=0.5, top_k=20, top_p=1.0)
    assert num_traces == 2


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
        plan = sampling.GenerationSampling.build(
            prepared_config(VOCAB_SIZE, 2, options), prompt_len=2, vocab_size=VOCAB_SIZE
        )
        state = sampling.init_history(plan, prompt, seed=0, attention_mask=mask)
        state = state if flipped != "decay_skips_infinite" else sampling.append(state, jnp.array([8, 8]))
        return np.asarray(jax.jit(sampling.process)(plan, state, logits))

    rules, before = installed_rules(), scores()
    other = TransformersBehaviour(**{**vars(rules), flipped: not getattr(rules, flipped)})
    monkeypatch.setattr("torchax_serve.sampling.history.installed_rules", lambda: other)
    changed = (scores() != before) & ~(np.isnan(before) & np.isnan(scores()))
    column = {"penalty_skips_padding": PAD, "bias_needs_longer_context": 9, "decay_skips_infinite": EOS[0]}[flipped]
    row = 1 if flipped == "bias_needs_longer_context" else 0
    assert np.argwhere(changed).tolist() == [[row, column]]


def test_tokens_beyond_the_columns_are_left_alone():
    """Embeddings can have more rows than the logits have columns."""
    options = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1}
    config = prepared_config(VOCAB_SIZE, 3, options)
    plan = sampling.GenerationSampling.build(config, prompt_len=3, vocab_size=VOCAB_SIZE)
    state = sampling.init_history(plan, np.array([[VOCAB_SIZE, VOCAB_SIZE + 7, 4]]), seed=0)
    scores = sampling.process(plan, state, jnp.ones((1, VOCAB_SIZE)))
    assert np.argwhere(np.asarray(scores) != 1).tolist() == [[0, 4]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed: expected whole numbers"),
        ({"seed": 2**64}, "seed: expected whole numbers"),
        ({"seed": [1]}, "seed: expected one number, or one for each of 2 rows"),
        ({"seed": 0, "capacity": 9}, r"capacity: expected at least 10 .* got 9"),
        ({"seed": 0, "attention_mask": np.ones((2, 3))}, "attention_mask: expected shape"),
        ({"seed": 0, "prompt_ids": np.zeros(2, int)}, "prompt_ids: expected int"),
        ({"seed": 0, "prompt_ids": np.zeros((2, 2))}, "prompt_ids: expected int"),
    ],
)
def test_bad_starts_are_refused(arguments, words):
    config = prepared_config(VOCAB_SIZE, 2, {})
    plan = sampling.GenerationSampling.build(config, prompt_len=2, vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match=words):
        sampling.init_history(plan, **{"prompt_ids": np.zeros((2, 2), int), **arguments})
