"""What a request may ask of the engine: the ranges of its options, and that nothing of it is ignored."""

import dataclasses
import math

import numpy as np
import pytest
from transformers import GenerationConfig

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling_params import ENGINE_ONLY, SamplingParams

GIVEN = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5},
    "allowed_token_ids": [3, 4],
    "logprobs": 0,
    "prompt_logprobs": 2,
    "priority": -3,
    "timeout_s": 1.5,
    "queue_timeout_s": 0.5,
    "cache_salt": "tenant",
    "adapter": "style",
    "speculate": False,
}


def params_of(config=None, vocab_size=40, seed=0, **options):
    config = config or GenerationConfig(max_new_tokens=8)
    params = SamplingParams(**options)
    made = RequestParams.of_generation_config(params.merged_into(config), params, seed=seed)
    made.check_tokens(vocab_size)
    return made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty: expected a number >= -2 and <= 2, got 2.5; 0 switches it off"),
        ({"presence_penalty": math.nan}, "presence_penalty: expected a number"),
        ({"frequency_penalty": -2.1}, "frequency_penalty: expected a number >= -2 and <= 2, got -2.1"),
        ({"frequency_penalty": "much"}, "frequency_penalty: expected a number"),
        ({"logit_bias": {3: 101}}, r"logit_bias: expected \{token id: bias from -100 to 100\}, got \{3: 101\}"),
        ({"logit_bias": {"3": 1}}, "logit_bias: expected"),
        ({"logit_bias": {-1: 1}}, "logit_bias: expected"),
        ({"logit_bias": [[3, 1]]}, "logit_bias: expected"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected a non-empty list of token ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: expected"),
        ({"logprobs": -2}, "logprobs: expected a whole number >= -1, got -2; 0 gives that of the sampled"),
        ({"logprobs": True}, "logprobs: expected a whole number"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: expected a whole number"),
        ({"priority": 1.5}, "priority: expected a whole number .*, got 1.5; 0 is usual"),
        ({"timeout_s": 0}, "timeout_s: expected a number > 0, got 0"),
        ({"timeout_s": math.inf}, "timeout_s: expected"),
        ({"queue_timeout_s": 0}, "queue_timeout_s: expected a number > 0, got 0"),
        ({"queue_timeout_s": "soon"}, "queue_timeout_s: expected a number > 0"),
        ({"cache_salt": 3}, "cache_salt: expected a string, got 3"),
        ({"presence_penality": 1}, r"no 'presence_penality'; did you mean presence_penalty"),
    ],
    ids=str,
)
def test_bad_values_are_refused_when_made(options, words):
    with pytest.raises(InvalidArgumentError, match=words) as error:
        SamplingParams(**options)
    assert "\n" not in str(error.value)


def test_what_only_the_engine_honours_is_known():
    assert GIVEN.keys() == ENGINE_ONLY.keys()
    params = SamplingParams(temperature=0.5, seed=3, **GIVEN)
    assert params.engine_only() == GIVEN
    others = SamplingParams(temperature=0.5, seed=3)
    assert params.merged_into(GenerationConfig()) == others.to_generation_config(GenerationConfig())
    neutral = SamplingParams(**{name: value for name, value in ENGINE_ONLY.items() if value is not None})
    assert neutral.engine_only() == {}
    neutral.to_generation_config(GenerationConfig())
    in_transformers = vars(GenerationConfig()).keys()
    places = in_transformers | ENGINE_ONLY.keys() | {"n", "stop", "seed", "stop_token_ids", "ignore_eos"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= places


@pytest.mark.parametrize("name", GIVEN)
def test_a_generation_config_has_no_place_for_them_and_says_so(name):
    with pytest.raises(UnsupportedArgumentError, match=rf"^{name}: expected .*, got .*; leave them out, or"):
        SamplingParams(**{name: GIVEN[name]}).to_generation_config(GenerationConfig())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logit_bias": {39: 1, 40: 1}}, r"logit_bias: expected token ids below the vocabulary size 40, got \[40\]"),
        ({"allowed_token_ids": [40]}, "allowed_token_ids: expected token ids below"),
        ({"sequence_bias": [[[40], 1.0]]}, "sequence_bias: expected token ids below"),
        ({"bad_words_ids": [[40]]}, "bad_words_ids: expected token ids below"),
        ({"bad_words_ids": [[3, 40]]}, "bad_words_ids: expected token ids below"),
        ({"seed": 2**64}, "seed: expected a whole number"),
        ({"n": 2}, "n: expected 1 with greedy decoding"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused_when_the_request_is_made(options, words):
    seed = options.pop("seed", 0)
    with pytest.raises(InvalidArgumentError, match=words):
        params_of(seed=seed, **options)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"guidance_scale": 1.5}, {"max_time": 2.0}, {"speculative_dreaming": 1}], ids=str
)
def test_options_of_the_models_own_config_that_nobody_honours_are_refused(options):
    with pytest.raises(UnsupportedArgumentError, match=rf"^{next(iter(options))}: expected .*; leave them out, or"):
        params_of(GenerationConfig(max_new_tokens=8, **options))


def test_the_models_defaults_are_filled_in():
    config = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=0.6, top_k=20, top_p=0.75, eos_token_id=[5, 2]
    )
    params = params_of(config, presence_penalty=0.5)
    assert (params.temperature, params.top_k, params.top_p_tail) == (0.6, 20, 0.25)
    assert (params.stop_ids, params.presence_penalty, params.level) == ((2, 5), 0.5, "penalties")
    assert params_of(config, top_k=7).top_k == 7
    greedy = params_of(config, temperature=0)
    assert (greedy.level, greedy.top_k, greedy.top_p_tail) == ("greedy", 0, 0)


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, "greedy"),
        ({"logprobs": 3, "priority": 2}, "greedy"),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, "sampled"),
        ({"typical_p": 0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {3: 0}}, "greedy"),
        ({"sequence_bias": [[[3], 1.0]], "bad_words_ids": [[4]]}, "penalties"),
        ({"top_h": 0.5}, "history"),
        ({"sequence_bias": [[[3, 4], 1.0]]}, "history"),
        ({"bad_words_ids": [[4, 3]]}, "history"),
        ({"no_repeat_ngram_size": 2}, "history"),
    ],
    ids=str,
)
def test_which_program_a_request_needs(options, level):
    params = params_of(**options)
    assert (params.level, params.depends_on_order) == (level, level == "history" and "top_h" not in options)
    assert params.needs_tables(prompt_len=3) == (level in ("penalties", "history"))


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_token_of_number_zero_is_one(name):
    assert params_of(GenerationConfig(max_new_tokens=8, **{name: 0})).depends_on_order


def test_a_first_token_alone_needs_the_tables():
    params = params_of(GenerationConfig(max_new_tokens=8, begin_suppress_tokens=[0]))
    assert (params.level, params.depends_on_order, params.forbidden_first) == ("greedy", False, (0,))
    assert params.needs_tables(prompt_len=3)


def test_all_that_is_added_to_logits_is_one_row():
    params = params_of(
        logit_bias={3: 2, 5: 1},
        sequence_bias=[[[3], -0.5]],
        bad_words_ids=[[7]],
        suppress_tokens=[8, 4000],
        allowed_token_ids=range(3, 9),
    )
    expected = np.full(40, -np.inf)
    expected[3:7] = 1.5, 0, 1, 0
    expected[8] = 0
    np.testing.assert_array_equal(params.token_bias.dense(40), expected)
    assert params.suppressed == (8, 4000)


def test_the_end_of_sequence_is_no_bad_word():
    config = GenerationConfig(max_new_tokens=8, eos_token_id=2)
    assert params_of(config, bad_words_ids=[[2]]).token_bias is None
    assert params_of(config, bad_words_ids=[[2], [3]]).token_bias.dense(40)[[2, 3]].tolist() == [0, -np.inf]


def test_tokens_before_a_request_may_end():
    config = GenerationConfig(max_new_tokens=8, min_length=9, eos_token_id=2)
    assert params_of(config, min_new_tokens=3).num_forced_tokens(prompt_len=4) == 5
    assert params_of(config, min_new_tokens=3).num_forced_tokens(prompt_len=8) == 3
    assert params_of(GenerationConfig(max_new_tokens=8), min_new_tokens=3).num_forced_tokens(prompt_len=8) == 0
