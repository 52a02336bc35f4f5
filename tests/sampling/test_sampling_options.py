"""No option of a generation config is ignored: each is honoured by the plan, left to the caller, or reported."""

import jax
import numpy as np
import pytest
import torch
from sampling_reference import Batch, prepared_config
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from torchax_serve import request_params
from torchax_serve.request_params import DEPENDENT_OPTIONS, INERT_OPTIONS

VOCAB_SIZE = 40

# Two values for each option of the plan; a plan that honours it differs between them.
HONOURED = {
    "do_sample": (False, True),
    "temperature": (0.5, 0.6),
    "top_k": (3, 4),
    "top_p": (0.5, 0.6),
    "min_p": (0.5, 0.6),
    "top_h": (0.5, 0.6),
    "typical_p": (0.5, 0.6),
    "epsilon_cutoff": (0.0, 0.1),
    "eta_cutoff": (0.0, 0.1),
    "max_length": (9, 10),
    "max_new_tokens": (9, 10),
    "min_length": (0, 7),
    "min_new_tokens": (3, 4),
    "eos_token_id": (3, 4),
    "pad_token_id": (3, 4),
    "sequence_bias": ([[[4], 1.0]], [[[4], 2.0]]),
    "repetition_penalty": (1.0, 1.5),
    "no_repeat_ngram_size": (0, 2),
    "bad_words_ids": ([[4]], [[6]]),
    "forced_bos_token_id": (None, 4),
    "forced_eos_token_id": (None, [4]),
    "remove_invalid_values": (False, True),
    "exponential_decay_length_penalty": ((1, 1.5), (1, 1.6)),
    "suppress_tokens": ([4], [5]),
    "begin_suppress_tokens": ([4], [5]),
    "renormalize_logits": (False, True),
}

# A value that is not the default, for options that refuse an arbitrary one.
UNUSUAL = {
    "num_beams": 3,
    "watermarking_config": WatermarkingConfig(),
    "compile_config": CompileConfig(),
    "cache_implementation": "static",
    "use_cache": False,
    "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "max_time": 0.0,
}


def is_accounted_for(name):
    config = GenerationConfig()
    setattr(config, name, UNUSUAL.get(name, "something unusual"))
    return name in request_params.unsupported_options(config)


def batch_of(config, prompt_len=1):
    return Batch(config, np.ones((1, prompt_len), int), vocab_size=VOCAB_SIZE)


def build(prompt_len=1, **options):
    given = {"max_new_tokens": None, "max_length": 12, "do_sample": True, **options}
    return batch_of(prepared_config(VOCAB_SIZE, prompt_len, given), prompt_len)


def test_every_attribute_of_a_config_is_in_one_place():
    public = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    silent = {name for name in public if not is_accounted_for(name)}
    known = request_params.PLAN_OPTIONS, request_params.CALLER_OPTIONS, DEPENDENT_OPTIONS.keys(), INERT_OPTIONS
    assert silent == set().union(*known) & public
    assert sum(map(len, known)) == len(set().union(*known)), "one place only"
    for name in DEPENDENT_OPTIONS.keys() & public:
        # What gives the option its meaning is reported, or is an argument of generate and no option at all.
        assert DEPENDENT_OPTIONS[name] == "assistant_model" or is_accounted_for(DEPENDENT_OPTIONS[name])


def test_a_batch_honours_what_it_claims():
    assert HONOURED.keys() == request_params.PLAN_OPTIONS
    for name, (one, other) in HONOURED.items():
        (leaves_one, tree_one), (leaves_other, tree_other) = (
            jax.tree.flatten((batch._spec, batch._options, batch.state))
            for batch in (build(**{name: value}) for value in (one, other))
        )
        assert tree_one != tree_other or not all(map(np.array_equal, leaves_one, leaves_other)), name


def test_an_attribute_of_a_newer_transformers_is_reported():
    config = GenerationConfig(speculative_dreaming=0)
    assert request_params.unsupported_options(config) == ["speculative_dreaming"]
    with pytest.raises(ValueError, match=r"got \['speculative_dreaming'\]; run transformers' own loop"):
        batch_of(config)


def test_plain_configs_take_the_fast_path():
    assert request_params.unsupported_options(GenerationConfig()) == []
    assert request_params.unsupported_options(prepared_config(VOCAB_SIZE, 3, {"do_sample": True})) == []
    assert request_params.unsupported_options(GenerationConfig(guidance_scale=1.0, num_beams=1)) == []


def test_the_caller_says_what_its_loop_honours():
    config = GenerationConfig(use_cache=False, stop_strings=["x"], max_time=2.0)
    assert request_params.unsupported_options(config) == ["max_time", "use_cache"]
    assert request_params.unsupported_options(config, {"use_cache", "max_time"}) == ["stop_strings"]
    config.max_new_tokens = 4
    batch_of(config)  # none of them chooses tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", bad) for bad in (-1.0, 0.0, float("nan"), float("inf"), "hot", True)),
        *(("top_k", bad) for bad in (-1, 2.5, 2**31)),
        *(("top_p", bad) for bad in (0.0, -0.1, 1.5, float("nan"))),
        *(("min_p", bad) for bad in (-0.1, 1.1)),
        *(("top_h", bad) for bad in (0.0, 1.1)),
        *(("typical_p", bad) for bad in (0.0, 1.1)),
        *(("epsilon_cutoff", bad) for bad in (-0.1, 1.0)),
        *(("eta_cutoff", bad) for bad in (-0.1, 1.0)),
        *(("repetition_penalty", bad) for bad in (0.0, -2.0, float("nan"))),
        *(("no_repeat_ngram_size", bad) for bad in (-1, 1.5)),
        *(("max_new_tokens", bad) for bad in (0, -3, 1.5)),
        *(("min_new_tokens", bad) for bad in (-1, True)),
        *(("min_length", bad) for bad in (-1, 0.5)),
        ("max_length", 0),
        ("num_return_sequences", 0),
        *(("bad_words_ids", bad) for bad in ([], [[]], [3], [[-1]], [["a"]], "no", 3)),
        *(("sequence_bias", bad) for bad in ([], {}, [[[], 1.0]], [[[1], "x"]], [[1, 1.0]], {(1,): float("nan")}, 7)),
        *(("suppress_tokens", bad) for bad in ([-1], 3, "abc")),
        *(("begin_suppress_tokens", bad) for bad in ([-1], [1.5])),
        *(("forced_eos_token_id", bad) for bad in ([], -1, "x")),
        *(("forced_bos_token_id", bad) for bad in (-1, [1])),
        *(("exponential_decay_length_penalty", bad) for bad in ((1,), (1, 0.0), (-1, 1.5), (1.5, 1.5), "ab", 3)),
        *((name, "yes") for name in ("do_sample", "remove_invalid_values", "renormalize_logits")),
    ],
    ids=str,
)
def test_absurd_values_are_refused_by_name(name, value):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*; .+") as error:
        request_params.validate_options(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "typical_p"])
def test_greedy_configs_may_switch_sampling_options_off_with_zero(name):
    config = GenerationConfig(do_sample=False)
    setattr(config, name, 0.0)
    request_params.validate_options(config)
    setattr(config, name, -1.0)
    with pytest.raises(ValueError, match=name):
        request_params.validate_options(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words_ids": [[VOCAB_SIZE]]}, "bad_words_ids: expected token ids below the vocabulary size 40"),
        ({"sequence_bias": [[[3, VOCAB_SIZE], 1.0]]}, "sequence_bias: expected token ids below"),
        ({"forced_bos_token_id": VOCAB_SIZE}, "forced_bos_token_id: expected token ids from 0 to 39"),
        ({"forced_eos_token_id": VOCAB_SIZE}, "forced_eos_token_id: expected token ids from 0 to 39"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


def test_options_that_need_another_say_so():
    config = GenerationConfig(max_new_tokens=3, exponential_decay_length_penalty=(1, 1.5))
    with pytest.raises(ValueError, match="expected an eos_token_id beside it"):
        batch_of(config)
    with pytest.raises(ValueError, match="max_length: expected max_length or max_new_tokens"):
        batch_of(GenerationConfig())


def test_eos_tokens_come_as_a_number_a_list_or_a_tensor():
    for eos in (5, [5], torch.tensor([5]), np.int64(5)):
        config = GenerationConfig(max_new_tokens=3)
        config.eos_token_id = eos
        assert batch_of(config)._options.eos_ids.tolist() == [5]
