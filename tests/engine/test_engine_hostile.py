"""One request never ends its neighbours, whatever is asked for."""

import dataclasses
import math
import pickle
import time

import numpy as np
import pytest
import transformers
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from engine_requests import engine_request
from hypothesis import given, settings
from hypothesis import strategies as st

from model_adapters.errors import (
    InvalidArgumentError,
    NoTokenLeftError,
    QueueFullError,
    QueueTokensError,
    TorchaxServeError,
    UnsupportedArgumentError,
)
from torchax_serve import EngineOptions, RequestError, SamplingParams, serve
from torchax_serve.engine.admission import Admission
from torchax_serve.sampling import sampler

SMALL = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_waiting=6)
INNOCENT = [5, 6, 7, 8, 9]
NEW = 10


def request(prompt=(5, 6), params=None, max_new_tokens=8, **config):
    config = transformers.GenerationConfig(max_new_tokens=max_new_tokens, **config)
    params = params or SamplingParams()
    return engine_request(prompt, params.merged_into(config), params, seed=0)


@pytest.fixture(scope="module")
def llama():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        model.engine.check_integrity = True
        yield model


def is_idle(model, within_s=20):
    """Whether no request is left, waiting, running or between the two, and no page in use, soon."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        stats, num_entering = model.engine.stats().scheduler, model.engine.admission.num_entering
        left = num_entering or stats.num_running or stats.num_waiting or any(group.num_used for group in stats.pages)
        if not left and not model.engine._output_processor.open_ids():
            return True
        time.sleep(0.01)
    return False


def check_innocent(model, handle, num_new=NEW):
    assert handle.result() == expected_tokens("llama", INNOCENT, num_new)
    assert model.engine.close_reason is None


numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**5000, -1, 0, 1, 2, 1e-38, 1.2e-38, 1e-45, 3e38, "1", b"1", None]),
    st.sampled_from([np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), np.array([1, 2]), object()]),
)
ids = st.lists(st.one_of(st.integers(0, VOCAB_SIZE + 2), numbers), max_size=4)
VALUES = {
    "do_sample": st.sampled_from([True, False, None, 1, "yes", np.array([True, False])]),
    "bad_words_ids": st.one_of(st.lists(ids, max_size=3), numbers),
    "sequence_bias": st.one_of(st.lists(st.tuples(ids, numbers), max_size=3), numbers),
    "suppress_tokens": st.one_of(ids, st.just(range(VOCAB_SIZE)), numbers),
    "allowed_token_ids": st.one_of(ids, numbers),
    "eos_token_id": st.one_of(ids, numbers),
    "stop_token_ids": st.one_of(ids, numbers),
    "ignore_eos": st.sampled_from([True, False, None, 1]),
    "logit_bias": st.one_of(st.dictionaries(st.integers(-1, VOCAB_SIZE + 1), numbers, max_size=3), numbers),
    "cache_salt": st.one_of(st.text(max_size=3), numbers, st.sampled_from(["\ud800", "x" * 2000])),
    # What a program is compiled for, each with few values, or most of the time would be spent on that.
    "no_repeat_ngram_size": st.sampled_from([None, 2, 2**31 - 1, -1, 2.0]),
    "top_h": st.sampled_from([None, 0.5, 0.0, math.nan]),
}
PLAIN = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
    *("eta_cutoff", "repetition_penalty", "seed", "presence_penalty", "frequency_penalty", "logprobs"),
    *("prompt_logprobs", "priority", "timeout_s", "queue_timeout_s"),
)
options = st.fixed_dictionaries({}, optional={**dict.fromkeys(PLAIN, numbers), **VALUES})
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
strange_prompts = st.lists(numbers, max_size=3)


@settings(max_examples=80)
@given(prompts, options)
def test_nothing_that_is_asked_for_reaches_a_neighbour(llama, prompt, options):
    innocent = llama.engine.submit(request(INNOCENT, max_new_tokens=NEW))
    try:
        params = SamplingParams(**options)
        tokens = list(llama.iter_tokens(prompt, transformers.GenerationConfig(max_new_tokens=6), params=params))
    except TorchaxServeError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
    else:
        assert all(0 <= token < VOCAB_SIZE for token in tokens)
    check_innocent(llama, innocent)


@settings(max_examples=40)
@given(strange_prompts)
def test_prompts_of_anything_are_read_or_refused_in_one_line(llama, prompt):
    try:
        tokens = list(llama.iter_tokens(prompt, transformers.GenerationConfig(max_new_tokens=2)))
    except InvalidArgumentError as error:
        assert "\n" not in str(error)
    else:
        assert {type(token) for token in prompt} <= {int, np.int64}
        assert tokens == expected_tokens("llama", [int(token) for token in prompt], 2)


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [VOCAB_SIZE], [1.5], [True], [None], ["a"], b"ab", bytearray(b"ab"), [[5, 6]], None, 5],
    ids=str,
)
def test_prompts_that_are_none(llama, prompt):
    for call in (llama.iter_tokens, llama.stream):
        with pytest.raises(InvalidArgumentError, match=r"^prompt: expected") as caught:
            call(prompt)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [np.array, np.uint8, tuple], ids=["array", "small array", "tuple"])
def test_prompts_of_arrays(llama, make):
    found = list(llama.iter_tokens(make(INNOCENT), transformers.GenerationConfig(max_new_tokens=NEW)))
    assert found == expected_tokens("llama", INNOCENT, NEW)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"min_new_tokens": 2**31}, "min_new_tokens: expected a whole number >= 0 and <= 2147483647, got 2147483648"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens: expected .*, got <int>"),
        ({"n": 10**6}, "n: expected a whole number >= 1 and <= 16384, got 1000000"),
        ({"stop": ["x"] * 65}, "stop: expected at most 64 strings, got 65; shorten the list"),
        ({"stop": "x" * 1025}, "stop: expected at most 1024 characters, got 1025 of them"),
        ({"stop": "\udc00"}, r"stop: expected text that UTF-8 can encode, got half of a surrogate pair, '\\udc00'"),
        ({"cache_salt": "x" * 1025}, "cache_salt: expected at most 1024 characters"),
        ({"cache_salt": "\udc00"}, "cache_salt: expected text that UTF-8 can encode"),
        ({"typical_p": 1e-38}, "typical_p: expected a number > 0 and <= 1, at least 1.2e-38, got 1e-38"),
        ({"temperature": 1e-45}, "temperature: expected a number > 0, at least 1.2e-38, got 1e-45"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids: expected at most 64 token ids, got 65 of them"),
        ({"suppress_tokens": range(2**21)}, "suppress_tokens: expected at most 1048576 token ids, got 2097152 of them"),
        ({"bad_words_ids": [[1] * 70000]}, "bad_words_ids: expected at most 65536 token ids in all, got 70000 of them"),
        ({"bad_words_ids": [b"ab"]}, "bad_words_ids: expected a non-empty list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"do_sample": np.array([1, 0])}, r"do_sample: expected True or False, got array\(\[1, 0\]\)"),
        ({"max_tokens": 5}, "has no 'max_tokens'; did you mean max_new_tokens"),
        ({"best_of": 5}, "has no 'best_of'; ask for n answers with logprobs=0"),
        ({"logits_processors": []}, r"no 'logits_processors'; processors run in generate\(logits_processor=...\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_lists_and_texts_are_bounded_when_params_are_made(params, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        SamplingParams(**params)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_numbers_of_numpy_are_pythons(llama):
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), priority=np.int8(1), logprobs=np.uint8(2))
    assert [type(value) for value in (params.top_k, params.temperature, params.priority)] == [int, float, int]
    assert llama.engine.submit(request(params=params)).result()


@pytest.mark.parametrize("options", [{"min_new_tokens": 2**31 - 1}, {"max_new_tokens": 2**31 - 1}], ids=str)
@pytest.mark.parametrize("others", [{}, {"no_repeat_ngram_size": 2000}, {"top_h": 0.5}], ids=str)
def test_lengths_beyond_the_engines_end_there(llama, options, others):
    params = SamplingParams(**{"max_new_tokens": 2**31 - 1, **options, **others})
    assert len(list(llama.iter_tokens([5, 6], params=params))) == 62


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-10])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.5}, {"typical_p": 0.9}, {"no_repeat_ngram_size": 63}], ids=str)
def test_a_tiny_temperature_is_greedy(llama, temperature, others):
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, **others)
    assert list(llama.iter_tokens(INNOCENT, params=params)) == expected_tokens("llama", INNOCENT, NEW)


@pytest.mark.parametrize("options", [{"top_p": 1e-37}, {"top_k": 1}, {"epsilon_cutoff": 1 - 1e-7}], ids=str)
def test_a_cut_that_leaves_one_token_is_greedy(llama, options):
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0, **options)
    assert list(llama.iter_tokens(INNOCENT, params=params)) == expected_tokens("llama", INNOCENT, NEW)


def test_where_all_tokens_are_forbidden_one_line_says_so(llama):
    everything = list(range(VOCAB_SIZE))
    innocent = llama.engine.submit(request(INNOCENT, max_new_tokens=NEW))
    with pytest.raises(InvalidArgumentError, match=r"at least one token of \d+ .*, got options that forbid all"):
        llama.iter_tokens([5], params=SamplingParams(suppress_tokens=everything))
    with pytest.raises(InvalidArgumentError, match="got options that forbid all"):
        llama.iter_tokens([5], params=SamplingParams(allowed_token_ids=[7], bad_words_ids=[[7]], eos_token_id=3))
    late = SamplingParams(allowed_token_ids=[7], eos_token_id=7, min_new_tokens=2, max_new_tokens=4)
    with pytest.raises(NoTokenLeftError, match=r"after 0 .*, got min_new_tokens, allowed_token_ids, which forbid all"):
        list(llama.iter_tokens([5], params=late))
    words = SamplingParams(allowed_token_ids=[7], bad_words_ids=[[7, 7, 7]], eos_token_id=3, max_new_tokens=4)
    with pytest.raises(NoTokenLeftError, match=r"after 2 .*, got bad_words_ids, allowed_token_ids,") as caught:
        list(llama.iter_tokens([5], params=words))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    check_innocent(llama, innocent)


def test_arrays_that_cannot_be_made_end_their_request_alone(llama, monkeypatch):
    def fails(*args):
        raise ValueError("no room for it\nat all")

    monkeypatch.setattr(sampler, "history_row", fails)
    others = [
        request(INNOCENT, max_new_tokens=NEW),
        request([7, 8], no_repeat_ngram_size=2),
        request([9], max_new_tokens=4),
    ]
    first, failed, last = llama.engine.submit_all(others)
    with pytest.raises(RequestError, match=r"it could not be prepared \(ValueError: no room for it\)$"):
        failed.result()
    assert last.result() == expected_tokens("llama", [9], 4)
    check_innocent(llama, first)
    assert is_idle(llama)


def test_log_probabilities_that_cannot_be_read_end_their_request_alone(llama, monkeypatch):
    for name, params in (("logprobs", {"logprobs": 1}), ("prompt_logprobs", {"prompt_logprobs": 1})):
        monkeypatch.setattr(llama.engine._runner, name, lambda *args, **kwargs: 1 / 0)
        innocent = llama.engine.submit(request(INNOCENT, max_new_tokens=NEW))
        failed = llama.engine.submit(request([7, 8], SamplingParams(**params)))
        with pytest.raises(RequestError, match=r"could not be delivered \(ZeroDivisionError"):
            failed.result()
        check_innocent(llama, innocent)
        monkeypatch.undo()
    assert is_idle(llama)


def test_a_fork_of_another_prompt_ends_itself_alone(llama):
    parent = llama.engine.submit(request(INNOCENT, max_new_tokens=50))  # it has to run until the child comes
    child = request([7, 8])
    object.__setattr__(child, "fork_of", parent.request_id)
    with pytest.raises(RequestError, match="fork_of: expected a live request with the same prompt"):
        llama.engine.submit(child).result()
    check_innocent(llama, parent, 50)


def test_waiting_requests_are_bounded(llama):
    assert is_idle(llama)
    handles = [llama.engine.submit(request([5, index], max_new_tokens=40)) for index in range(10)]
    with pytest.raises(QueueFullError, match=r"at most 10 requests at a time, 6 of them waiting, got 1 next to"):
        for index in range(10):
            handles.append(llama.engine.submit(request([6, index], max_new_tokens=40)))
    with pytest.raises(QueueFullError, match="got 11 next to"):
        llama.engine.submit_all([request([5])] * 11)
    going_on = llama.engine.submit(dataclasses.replace(request([9], max_new_tokens=4), is_continuation=True))
    assert handles[0].result() == expected_tokens("llama", [5, 0], 40)
    handles.clear()
    assert going_on.result() == expected_tokens("llama", [9], 4)
    assert is_idle(llama)
    assert llama.engine.submit(request([9], max_new_tokens=4)).result() == expected_tokens("llama", [9], 4)


def test_waiting_tokens_are_bounded(llama, monkeypatch):
    """Prompts that find a free slot are not counted, each answer to one is, and a batch waits by itself."""
    assert is_idle(llama)
    monkeypatch.setattr(llama.engine, "admission", Admission(4, max_num_waiting=100, max_num_waiting_tokens=25))
    handles = llama.engine.submit_all([request([5] * 10, max_new_tokens=40)] * 4)
    next(iter(handles[3]))  # all have a slot
    handles += llama.engine.submit_all([request([5, 6] * 5, max_new_tokens=40)] * 2)
    with pytest.raises(QueueTokensError, match="at most 25 tokens of prompts that wait, got 10 next to"):
        for _ in range(5):
            handles.append(llama.engine.submit(request([6] * 10, max_new_tokens=40)))
    with pytest.raises(QueueTokensError, match="got 30 next to"):
        llama.engine.submit_all([request([6] * 30)])
    assert handles[4].result() == expected_tokens("llama", [5, 6] * 5, 40)
    handles.clear()
    assert is_idle(llama)
    assert len(llama.engine.submit(request([5] * 30, max_new_tokens=4)).result()) == 4
    completions = llama.generate_batch([[5, index] * 5 for index in range(9)], SamplingParams(max_new_tokens=3))
    assert [len(each.token_ids) for each in completions] == [3] * 9
    assert is_idle(llama)


def test_a_batch_waits_for_room_by_itself(llama):
    assert is_idle(llama)
    prompts = [[5, index % 3] for index in range(14)]
    completions = llama.generate_batch(prompts, SamplingParams(max_new_tokens=3, temperature=0))
    assert [each.token_ids for each in completions] == [expected_tokens("llama", prompt, 3) for prompt in prompts]


def test_a_model_without_a_tokenizer_takes_token_ids(llama):
    assert llama.tokenizer is None
    expected = expected_tokens("llama", INNOCENT, NEW)
    params = SamplingParams(max_new_tokens=NEW, temperature=0)
    stream = llama.stream(INNOCENT, params)
    assert [(piece, len(stream.token_ids)) for piece in stream][:NEW] == [("", index + 1) for index in range(NEW)]
    assert stream.token_ids == expected
    assert stream.stats.finish_reason == "length"
    (completion,) = llama.generate_batch([INNOCENT], params)
    assert (completion.token_ids, completion.text, completion.finish_reason) == (expected, "", "length")
    for call, argument in ((llama.stream, INNOCENT), (llama.generate_batch, [INNOCENT])):
        with pytest.raises(InvalidArgumentError, match=r"stop: expected no stop strings for .*, which has no token"):
            call(argument, SamplingParams(stop="x"))
    with pytest.raises(InvalidArgumentError, match="has no tokenizer, and text needs one"):
        llama.stream("text")


@pytest.mark.parametrize("others", [{}, {"max_time": 600.0}, {"guidance_scale": 1.5}], ids=str)
def test_stop_tokens_and_ends_that_are_ignored(llama, others):
    """As in vLLM: a stop token is the last of the tokens; an end-of-sequence token is one like any other.

    On the engine, on the fast loop and on transformers'.
    """
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, **others)
    expected = list(llama.iter_tokens(INNOCENT, config))
    assert expected == expected_tokens("llama", INNOCENT, NEW) or "guidance_scale" in others
    end, stop = expected[2], expected[5]
    first = expected.index
    config.eos_token_id = end

    def tokens(**options):
        return list(llama.iter_tokens(INNOCENT, config, params=SamplingParams(**options)))

    assert tokens() == expected[: first(end) + 1]
    assert tokens(ignore_eos=True) == expected
    assert tokens(ignore_eos=True, stop_token_ids=[stop]) == expected[: first(stop) + 1]
    assert tokens(stop_token_ids=[stop]) == expected[: min(first(end), first(stop)) + 1]
    assert tokens(eos_token_id=stop, stop_token_ids=()) == expected[: first(stop) + 1]


def test_options_about_texts_are_refused_where_tokens_are_yielded(llama):
    for name, value in (("stop", "x"), ("n", 2)):
        with pytest.raises(UnsupportedArgumentError, match=f"^{name}: expected None for tokens of one answer"):
            llama.iter_tokens([5], params=SamplingParams(temperature=1.0, **{name: value}))
