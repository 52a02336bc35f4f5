"""Options of a request, resolved in one step: what merging them into a config and reading that gives, and no copies."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_options import merged, row_of
from transformers import GenerationConfig

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling_params import SamplingParams

VOCAB_SIZE = 24
tokens = st.integers(0, VOCAB_SIZE - 1)
maybe_beyond = st.integers(0, VOCAB_SIZE + 1)
fraction = st.floats(0.05, 0.95)
words = st.lists(st.lists(maybe_beyond, min_size=1, max_size=3), min_size=1, max_size=3)
pairs = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=3), st.sampled_from([-1.5, 0.0, 2.0])).map(list))
COMMON = {
    "max_new_tokens": st.integers(1, 9),
    "min_new_tokens": st.integers(0, 1),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([1e-6, 0.4, 1.0, 2.0]),
    "top_k": st.integers(0, 40),
    "top_p": fraction,
    "min_p": fraction,
    "top_h": fraction,
    "typical_p": fraction,
    "epsilon_cutoff": fraction,
    "eta_cutoff": fraction,
    "repetition_penalty": st.sampled_from([1, 1.0, 1.3]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "num_beams": st.sampled_from([1, 2]),
    "bad_words_ids": words,
    "suppress_tokens": st.lists(maybe_beyond, max_size=3),
    "eos_token_id": tokens | st.lists(tokens, min_size=1, max_size=3, unique=True),
}
GIVEN = COMMON | {
    "temperature": COMMON["temperature"] | st.just(0),
    "sequence_bias": pairs.filter(bool),
    "stop": st.sampled_from(["a", ["a", "b"]]),
    "stop_token_ids": st.lists(tokens, max_size=2),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 2),
    "seed": st.integers(0, 2**64 - 1),
    "presence_penalty": st.sampled_from([0, 0.5]),
    "frequency_penalty": st.sampled_from([0, -0.5]),
    "logit_bias": st.dictionaries(maybe_beyond, st.sampled_from([-2, 0, 3]), max_size=2),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=4),
    "logprobs": st.integers(-1, 3),
    "prompt_logprobs": st.integers(-1, 3),
}
DEFAULTS = COMMON | {
    "max_length": st.integers(1, 30),
    "min_length": st.integers(0, 9),
    "sequence_bias": pairs.filter(bool),
    "stop_strings": st.sampled_from(["a", ["a", "b"]]),
    "num_return_sequences": st.integers(1, 2),
    "begin_suppress_tokens": st.lists(tokens, max_size=2),
    "forced_bos_token_id": maybe_beyond,
    "forced_eos_token_id": tokens | st.lists(tokens, min_size=1, max_size=2),
    "exponential_decay_length_penalty": st.just((2, 1.5)),
    "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(),
    "guidance_scale": st.sampled_from([1.0, 1.5]),
    "max_time": st.just(2.0),
}


def some_of(options):
    """A few of the options: with many of them nearly all draws would be refused."""
    names = st.lists(st.sampled_from(sorted(options)), max_size=5, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen}))


def made(kind, options):
    try:
        return kind(**options)
    except ValueError:  # two of them contradict each other
        return None


def outcome(call):
    """What comes of a call, and the type of its error."""
    try:
        return call(), None
    except (InvalidArgumentError, UnsupportedArgumentError) as error:
        return None, type(error)


def config_of(options):
    config = GenerationConfig()
    for name, value in options.items():
        setattr(config, name, value)
    return config


def resolved(params, config):
    found = RequestParams.resolve(params, config)
    if found.unsupported:
        raise UnsupportedArgumentError(", ".join(found.unsupported))
    found.check_tokens(VOCAB_SIZE)
    return found


@settings(max_examples=600, deadline=None)
@given(some_of(GIVEN), some_of(DEFAULTS))
def test_options_are_those_of_a_merged_config(options, defaults):
    params = made(SamplingParams, options)
    if params is None:
        return
    config = config_of(defaults)
    before = copy.deepcopy(vars(config))
    expected, error = outcome(lambda: row_of(params, merged(params, config), VOCAB_SIZE))
    found, own_error = outcome(lambda: resolved(params, config))
    assert own_error is error
    assert vars(config) == before, "the model's own config stays as it is"
    if found is None:
        return
    row, bias = expected
    assert {name: getattr(found, name) for name in row} == row | {"top_k": found.top_k}
    assert min(found.top_k, VOCAB_SIZE) == row["top_k"]
    own_bias = None if found.token_bias is None else found.token_bias.dense(VOCAB_SIZE)
    np.testing.assert_array_equal(own_bias, bias)
    stops = merged(params, config).stop_strings or ()
    assert found.stop_strings == ((stops,) if isinstance(stops, str) else tuple(stops))
    assert found.config.stop_strings is None and found.seed == params.seed
    assert found.num_answers == (merged(params, config).num_return_sequences or 1)


@settings(max_examples=150, deadline=None)
@given(some_of(DEFAULTS))
def test_options_of_a_config_are_those_of_a_caller_without_any(defaults):
    config = config_of(defaults)
    expected, error = outcome(lambda: row_of(SamplingParams(), config, VOCAB_SIZE))
    found, own_error = outcome(lambda: RequestParams.of_generation_config(config))
    if own_error is None:
        own_error = outcome(lambda: found.check_tokens(VOCAB_SIZE))[1]
    assert own_error is error
    if error is None:
        assert {name: getattr(found, name) for name in expected[0]} == expected[0] | {"top_k": found.top_k}


@pytest.mark.parametrize(
    ("options", "prompt_len", "most"),
    [({"max_new_tokens": 5}, 9, 5), ({"max_length": 12}, 9, 3), ({"max_length": 12}, 12, 1), ({}, 4, 1)],
)
def test_the_limit_of_an_answer(options, prompt_len, most):
    params = RequestParams.resolve(SamplingParams(), config_of(options))
    assert params.most_new_tokens(prompt_len) == most
    without = RequestParams.resolve(SamplingParams(), config_of(options), max_new_tokens=77)
    assert without.most_new_tokens(prompt_len) == (most if options else 77)


def test_what_the_engine_cannot_honour_is_named_and_not_refused():
    beams = RequestParams.resolve(SamplingParams(stop="x"), config_of({"num_beams": 3, "eos_token_id": 5}))
    assert (beams.unsupported, beams.stop_strings, beams.stop_ids) == (("num_beams",), ("x",), (5,))
    assert beams.config.num_beams == 3
    wrong = RequestParams.resolve(SamplingParams(), config_of({"temperature": -1.0, "do_sample": True}))
    with pytest.raises(InvalidArgumentError, match="temperature: expected a number > 0"):
        wrong.check_tokens(VOCAB_SIZE)
