"""Every way of calling ``generate``, on eight architectures, against eager transformers: the same tokens.

Sampling is compared where it leaves no choice (``top_k=1``); that it draws from the right distribution is shown by the
tests of torchax_serve.sampling.
"""

import functools
import warnings

import pytest
import torch
from cache_name import CACHE
from thorough import thorough
from tiny_models import ARCHITECTURES, prompts, tiny_model
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.utils import ModelOutput

from torchax_serve import to_jax

NEW_TOKENS = 6


def ban_five(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor of the caller's own."""
    return scores.index_fill(1, torch.tensor([5, 17, 40]), -torch.inf)


def stop_at_fifteen(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """A stopping criterion of the caller's own."""
    return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15)


def take_best(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding loop of the caller's own: two tokens, without a cache."""
    for _ in range(2):
        logits = model(input_ids, attention_mask=kwargs.get("attention_mask"), use_cache=False).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = torch.nn.functional.pad(kwargs["attention_mask"], (0, 1), value=1)
    return input_ids


EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
SAMPLE = {"do_sample": True, "top_k": 1}
ENDS = [7, 11, 13, 20, 33, 50, 60, 71, 80]

CASES = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "max_length": {"max_length": 16, "max_new_tokens": None},
    "no cache": {"use_cache": False},
    "static cache asked for": {"cache_implementation": "static"},
    "dynamic cache asked for": {"cache_implementation": "dynamic"},
    "older name of a static cache": {"cache_implementation": "hybrid_chunked"},
    "another older name of it": {"cache_implementation": "sliding_window"},
    "dictionary": {"return_dict_in_generate": True},
    "scores and logits": EVERYTHING,
    "attentions and hidden states": {
        "return_dict_in_generate": True,
        "output_attentions": True,
        "output_hidden_states": True,
    },
    "one eos": {"eos_token_id": 11},
    "many eos": {"eos_token_id": ENDS},
    "many eos, scores": {"eos_token_id": ENDS, **EVERYTHING},
    "eos, pad of its own": {"eos_token_id": ENDS, "pad_token_id": 2},
    "min_new_tokens": {"eos_token_id": ENDS, "min_new_tokens": 4},
    "min_length": {"eos_token_id": ENDS, "min_length": 14},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_penalty below 1": {"repetition_penalty": 0.5},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [8, 9], [1, 2, 3]]},
    "many bad words": {"bad_words_ids": [[i] for i in range(10, 60)]},
    "sequence_bias": {"sequence_bias": {(7,): 2.0, (8, 9): -3.0, (30,): -10.0}},
    "sequence_bias, large": {"sequence_bias": {(7,): 100.0}},
    "suppress_tokens": {"suppress_tokens": list(range(40, 80))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(40, 80))},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "forced_eos_token_id, several": {"forced_eos_token_id": [3, 4], "eos_token_id": [3, 4]},
    "exponential decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 11},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, **EVERYTHING},
    "top_k 1": SAMPLE,
    "top_k 1, temperature": {**SAMPLE, "temperature": 0.3},
    "top_k 1, top_p": {**SAMPLE, "top_p": 0.5},
    "top_k 1, min_p": {**SAMPLE, "min_p": 0.1},
    "top_k 1, typical_p": {**SAMPLE, "typical_p": 0.6},
    "top_k 1, epsilon": {**SAMPLE, "epsilon_cutoff": 0.01},
    "top_k 1, eta": {**SAMPLE, "eta_cutoff": 0.01},
    "top_k 1, all cut-offs": {**SAMPLE, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 1e-4},
    "top_k 1, penalties": {**SAMPLE, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "top_k 1, scores": {**SAMPLE, "temperature": 0.7, "top_p": 0.8, **EVERYTHING},
    "tiny top_p": {"do_sample": True, "top_p": 1e-6, "top_k": 0},
    "num_return_sequences": {**SAMPLE, "num_return_sequences": 3},
    "num_return_sequences, eos": {**SAMPLE, "num_return_sequences": 2, "eos_token_id": ENDS},
    "greedy, all processors": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7]],
        "suppress_tokens": [1, 2],
        "min_new_tokens": 3,
        "eos_token_id": ENDS,
    },
    "beams": {"num_beams": 3},
    "beams, early stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": ENDS},
    "beams, length penalty": {"num_beams": 4, "length_penalty": 2.0, "eos_token_id": ENDS},
    "beams, several returned": {"num_beams": 4, "num_return_sequences": 2},
    "beams, scores": {
        "num_beams": 2,
        "num_return_sequences": 2,
        "output_scores": True,
        "return_dict_in_generate": True,
    },
    "beams, processors": {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "beams, sampled": {"num_beams": 2, **SAMPLE},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "own logits_processor": {"logits_processor": LogitsProcessorList([ban_five])},
    "own logits_processor, sampled": {"logits_processor": LogitsProcessorList([ban_five]), **SAMPLE},
    "own stopping_criteria": {"stopping_criteria": StoppingCriteriaList([stop_at_fifteen])},
    "own stopping_criteria, scores": {"stopping_criteria": StoppingCriteriaList([stop_at_fifteen]), **EVERYTHING},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10, 40))},
    "prefix_allowed_tokens_fn, beams": {"prefix_allowed_tokens_fn": lambda row, ids: [10, 20, 30], "num_beams": 2},
    "custom_generate": {"custom_generate": take_best},
    "guidance_scale": {"guidance_scale": 1.5},
    "max_time": {"max_time": 600.0},
    "prefill in chunks": {"prefill_chunk_size": 4},
}
# Each option once; other values of it and further combinations run with `--thorough`.
DIFFERENT = {
    "one token",
    "no cache",
    "static cache asked for",
    "scores and logits",
    "attentions and hidden states",
    "many eos",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size 2",
    "bad words",
    "sequence_bias",
    "suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential decay",
    "remove_invalid_values",
    "top_k 1, all cut-offs",
    "top_k 1, scores",
    "tiny top_p",
    "num_return_sequences",
    "greedy, all processors",
    "beams",
    "beams, length penalty",
    "beams, scores",
    "beams, sampled",
    "prompt lookup",
    "own logits_processor",
    "own stopping_criteria",
    "prefix_allowed_tokens_fn",
    "custom_generate",
    "guidance_scale",
    "max_time",
    "prefill in chunks",
}
# What eager transformers itself cannot do with a model, so that there is nothing to compare with.
NOT_IN_TRANSFORMERS = {("mamba", "attentions and hidden states"), ("mamba", "prompt lookup")}
REFUSED_HERE = {}
# What eager transformers does wrong or not at all with a model, and how it comes to the same tokens.
EQUIVALENT = {}
if CACHE == "cache":
    # From 5.24 on the guiding forwards have a cache, whose state is wrong after a prompt of one token.
    EQUIVALENT["mamba", "guidance_scale"] = {"guidance_scale": 1.5, "use_cache": False}
    EQUIVALENT["mamba", "prefill in chunks"] = {}
else:
    # Classifier-free guidance feeds mamba one token with the mask of two, which transformers lets pass.
    REFUSED_HERE["mamba", "guidance_scale"] = "expected an attention_mask of shape"
    NOT_IN_TRANSFORMERS.add(("mamba", "prefill in chunks"))


@functools.cache
def pair(architecture: str):
    """Eager transformers and the same model on JAX."""
    return tiny_model(architecture), to_jax(tiny_model(architecture))


@pytest.fixture(autouse=True, scope="module")
def models_are_let_go():
    yield
    pair.cache_clear()


def outcome(model, inputs: dict, arguments: dict):
    """What ``generate`` returns, or the error it raises."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' advice on unusual options, the same for both
            return model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, **arguments})
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        return error


def assert_same(theirs, ours) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        if theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        else:
            assert ours.tolist() == theirs.tolist()
    elif isinstance(theirs, ModelOutput):
        assert list(theirs) == list(ours)
        for name, value in theirs.items():
            if name == CACHE:
                assert_same_cache(value, ours[name])
            else:
                assert_same(value, ours[name])
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def assert_same_cache(theirs, ours) -> None:
    assert type(ours) is type(theirs)
    for one, other in zip(theirs.layers, ours.layers, strict=True):
        assert type(other) is type(one)
        for name in ("keys", "values"):
            if isinstance(getattr(one, name, None), torch.Tensor):
                # rows of padding hold what nobody reads
                assert_same(getattr(one, name)[-1:], getattr(other, name)[-1:])
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(one, name, {}).items():
                assert_same(state, getattr(other, name)[index])


def grid():
    """All architectures with all cases; the cases of `DIFFERENT` run with one architecture each by default."""
    return [
        (architecture, case) if case in DIFFERENT and (i + j) % 8 == 0 else thorough(architecture, case)
        for i, architecture in enumerate(ARCHITECTURES)
        for j, case in enumerate(CASES)
    ]


@pytest.mark.parametrize(("architecture", "case"), grid())
def test_same_as_transformers(architecture: str, case: str) -> None:
    theirs, ours = pair(architecture)
    ids, mask = prompts()
    batches = [{"input_ids": ids[1:]}, {"input_ids": ids, "attention_mask": mask}]
    if case == "prompt lookup":
        batches.pop()  # transformers drafts for one row at a time
    for inputs in batches:
        expected = outcome(theirs, inputs, EQUIVALENT.get((architecture, case), CASES[case]))
        got = outcome(ours, inputs, CASES[case])
        if isinstance(expected, Exception):
            assert (architecture, case) in NOT_IN_TRANSFORMERS, expected
            assert isinstance(got, Exception)
        elif (architecture, case) in REFUSED_HERE:
            assert REFUSED_HERE[architecture, case] in str(got)
        else:
            if isinstance(got, Exception):
                raise got
            assert_same(expected, got)


def test_the_grid_is_as_large_as_promised() -> None:
    assert len(CASES) >= 60 and CASES.keys() >= DIFFERENT
    assert len(ARCHITECTURES) >= 8
