"""`SamplingParams`: checked when made, and what it makes of a model's generation config."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from transformers import GenerationConfig

from torchax_serve.request_params import validate_options
from torchax_serve.sampling_params import ENGINE_ONLY, SamplingParams

BASE = GenerationConfig(max_length=30, top_p=0.8, eos_token_id=[2], pad_token_id=1)


def changes(params, base=BASE):
    before, after = base.to_dict(), params.to_generation_config(base).to_dict()
    return {name: after[name] for name in after if after[name] != before[name]}


def test_nothing_given_changes_nothing():
    assert changes(SamplingParams()) == {}


def test_every_field_reaches_the_config():
    params = SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        top_h=0.4,
        typical_p=0.7,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
        num_beams=3,
        bad_words_ids=((3, 4), (5,)),
        sequence_bias={(3,): 1.0},
        suppress_tokens=(7,),
        stop="end",
        eos_token_id=(8, 9),
        n=2,
        seed=3,
    )
    expected = {
        "do_sample": True,
        "max_new_tokens": 9,
        "max_length": None,
        "bad_words_ids": [[3, 4], [5]],
        "sequence_bias": [[[3], 1.0]],
        "suppress_tokens": [7],
        "stop_strings": ["end"],
        "eos_token_id": [8, 9],
        "num_return_sequences": 2,
    }
    same = "min_new_tokens temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty"
    expected |= {name: getattr(params, name) for name in [*same.split(), "no_repeat_ngram_size", "num_beams"]}
    assert changes(params) == expected
    assert {field.name for field in dataclasses.fields(params)} == {
        *expected,
        *ENGINE_ONLY,
        "n",
        "stop",
        "seed",
        "stop_token_ids",
        "ignore_eos",
    } - {
        "max_length",
        "num_return_sequences",
        "stop_strings",
    }
    validate_options(params.to_generation_config(BASE))


def test_the_base_is_left_alone():
    base = GenerationConfig(bad_words_ids=[[3]])
    config = SamplingParams(temperature=0.5).to_generation_config(base)
    config.bad_words_ids.append([4])
    assert (base.temperature, base.bad_words_ids) == (None, [[3]])


@pytest.mark.parametrize("option", [{"temperature": 1.0}, {"temperature": 2}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_a_sampling_option_turns_sampling_on(option):
    assert changes(SamplingParams(**option)) == {"do_sample": True, **option}


@pytest.mark.parametrize("option", [{"top_p": 1.0}, {"top_k": 0}, {"typical_p": 1.0}], ids=str)
def test_an_option_switched_off_does_not(option):
    assert changes(SamplingParams(**option)) == option


def test_a_temperature_of_zero_is_greedy():
    sampled = GenerationConfig(do_sample=True, temperature=0.7)
    for zero in (0, 0.0):
        config = SamplingParams(temperature=zero, top_p=0.9).to_generation_config(sampled)
        assert (config.do_sample, config.temperature) == (False, None)
        validate_options(config)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -0.1}, r"temperature: expected a number > 0, got -0.1; .*temperature=0"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"temperature": True}, "temperature: expected"),
        ({"temperature": 1e-60}, "temperature: expected"),
        ({"temperature": 10**400}, "temperature: expected"),
        ({"max_new_tokens": float("inf")}, "max_new_tokens: expected"),
        ({"top_p": 0}, r"top_p: expected a number > 0 and <= 1, got 0; 1.0 switches it off"),
        ({"top_k": -1}, "top_k: expected a whole number >= 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number >= 1"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens: expected at most max_new_tokens=2"),
        ({"do_sample": True, "temperature": 0}, "temperature: expected > 0 with do_sample=True"),
        ({"do_sample": False, "top_p": 0.5}, "top_p: expected None with do_sample=False"),
        ({"do_sample": "yes"}, "do_sample: expected True or False"),
        ({"n": 0}, "n: expected a whole number >= 1"),
        ({"seed": -1}, "seed: expected"),
        ({"seed": 2**64}, "seed: expected"),
        ({"stop": ""}, "stop: expected a non-empty string"),
        ({"stop": ["a", 3]}, "stop: expected a non-empty string"),
        ({"stop": 3}, "stop: expected a non-empty string"),
        ({"eos_token_id": -1}, "eos_token_id: expected"),
        ({"eos_token_id": []}, "eos_token_id: expected"),
        ({"bad_words_ids": [3]}, "bad_words_ids: expected"),
        ({"sequence_bias": [[3, 1.0]]}, "sequence_bias: expected"),
        ({"suppress_tokens": 3}, "suppress_tokens: expected"),
        ({"temprature": 1}, r"no 'temprature'; did you mean temperature\?"),
        ({"max_tokens": 1}, r"no 'max_tokens'; did you mean max_new_tokens\?"),
    ],
    ids=str,
)
def test_bad_values_are_refused_when_made(arguments, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**arguments)


def test_several_greedy_answers_are_refused():
    with pytest.raises(ValueError, match="n: expected 1 with greedy decoding, got 2"):
        SamplingParams(n=2).to_generation_config(BASE)
    assert SamplingParams(n=2, temperature=0.5).to_generation_config(BASE).num_return_sequences == 2


def test_params_copy_and_pickle():
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, top_k=4) == SamplingParams(temperature=0.5, stop=["a"], top_k=4)


def test_requests_import_neither_jax_nor_torch():
    heavy = "{'jax', 'torch', 'transformers'}"
    code = f"import sys, torchax_serve.sampling_params; print(sorted({heavy} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
