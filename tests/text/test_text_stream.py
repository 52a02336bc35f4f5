"""`stream` against eager ``generate`` and ``decode``, its stop strings, its statistics, and what it refuses."""

import asyncio
import itertools

import pytest
import torch
from eager_model import eager_model
from text_handles import IteratorHandle
from tokenizers_of_test import KINDS

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text import Detokenizer, TextStream, stream
from torchax_serve.text.prompt import DEFAULT_MAX_NEW_TOKENS, make_request


def eager_ids(model, prompt_ids, **kwargs):
    ids = torch.tensor([prompt_ids])
    return model.module.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)[0, len(prompt_ids) :].tolist()


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_bpe", "unigram", "word_piece_cleaned_up"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_text_equals_that_of_eager_generate(kind, as_ids):
    model = eager_model(KINDS[kind])
    prompt_ids = model.tokenizer("Once upon a time")["input_ids"]
    answer = stream(model, prompt_ids if as_ids else "Once upon a time", SamplingParams(max_new_tokens=20))
    pieces = list(answer)
    expected = eager_ids(model, prompt_ids, max_new_tokens=20)
    assert answer.token_ids == expected
    assert "".join(pieces) == answer.text == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert all(pieces)
    assert answer.stats.prompt_tokens == len(prompt_ids)
    assert answer.stats.new_tokens == len(expected)
    assert answer.stats.finish_reason == ("stop" if expected[-1] == model.config.eos_token_id else "length")


def test_seed_makes_sampling_repeatable():
    model = eager_model()
    params = SamplingParams(max_new_tokens=16, temperature=2.0, seed=7)
    first, second = (stream(model, "Once", params) for _ in range(2))
    other = stream(model, "Once", SamplingParams(max_new_tokens=16, temperature=2.0, seed=8))
    assert list(first) == list(second) != list(other)


def test_end_of_sequence_token_stops():
    model = eager_model()
    ids = eager_ids(model, model.tokenizer("Once")["input_ids"], max_new_tokens=12)
    eos = ids[6]
    answer = stream(model, "Once", SamplingParams(max_new_tokens=12, eos_token_id=eos))
    list(answer)
    assert answer.token_ids == ids[: ids.index(eos) + 1]
    assert answer.stats.finish_reason == "stop"


def test_no_part_of_a_stop_string_is_shown():
    model = eager_model()
    whole = stream(model, "Once", SamplingParams(max_new_tokens=30))
    text = "".join(whole)
    for start, length in itertools.product(range(2, len(text) - 8, 3), (1, 3, 7)):
        stop = text[start : start + length]
        decoded_before = model.num_decoded
        answer = stream(model, "Once", SamplingParams(max_new_tokens=30, stop=stop))
        shown = ""
        for piece in answer:
            shown += piece
            assert text[: text.index(stop)].startswith(shown)
        assert shown == text[: text.index(stop)]
        assert answer.stats.finish_reason == "stop"
        assert answer.stats.new_tokens <= whole.stats.new_tokens
        assert model.closed
        assert model.num_decoded - decoded_before == answer.stats.new_tokens


def test_stop_strings_of_the_generation_config_are_honoured():
    model = eager_model()
    text = "".join(stream(model, "Once", SamplingParams(max_new_tokens=30)))
    params = SamplingParams(max_new_tokens=30)
    model.request_defaults = params.to_generation_config(model.request_defaults)
    model.request_defaults.stop_strings = text[5:8]
    assert "".join(stream(model, "Once", params)) == text[: text.index(text[5:8])]


def test_closing_stops_decoding():
    model = eager_model()
    answer = stream(model, "Once", SamplingParams(max_new_tokens=30))
    assert answer.stats.ttft_s is None
    first = next(answer)
    answer.close()
    assert list(answer) == []
    assert answer.text == first
    assert answer.stats.finish_reason == "abort"
    assert model.closed
    assert model.num_decoded < 30
    with stream(model, "Once", SamplingParams(max_new_tokens=30)) as answer:
        next(answer)
    assert answer.stats.finish_reason == "abort"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_error_of_the_model_is_raised_and_ends_the_stream(error):
    def tokens():
        yield 100
        raise error

    model = eager_model()
    model.new_tokens = lambda request: tokens()
    answer = stream(model, "Once")
    with pytest.raises(error):
        list(answer)
    assert answer.stats.finish_reason == "abort"
    assert list(answer) == []


def test_statistics_with_a_fake_clock():
    model = eager_model()
    request = make_request(model, [5, 6, 7], None)
    # 10 s when asked; the first token at 12 s, then one every half second
    clock = iter([10.0, 12.0, 12.5, 13.0, 13.5, 14.0])
    handle = IteratorHandle(request, [100, 101, 102, 103, 104])
    answer = TextStream(request, Detokenizer(model.tokenizer), handle, lambda: next(clock))
    list(answer)
    assert answer.stats.ttft_s == 2.0
    assert answer.stats.decode_tokens_per_s == 2.0
    assert answer.stats.total_s == 4.0


def read(stream, *, is_async):
    async def pieces():
        return [piece async for piece in stream]

    return asyncio.run(pieces()) if is_async else list(stream)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_an_answer_is_the_same_in_steps_of_any_size(size, is_async):
    """Its pieces, tokens and end: the engine's, but for a stop string, at which the request is cancelled."""
    model = eager_model()
    ids = eager_ids(model, model.tokenizer("Once")["input_ids"], max_new_tokens=24)
    text = model.tokenizer.decode(ids, skip_special_tokens=True)
    first, end = ids.index(ids[6]), text.index(text[9:12])
    cases = [
        ({"max_new_tokens": 24}, "length", ids, text, []),
        ({"max_new_tokens": 13}, "length", ids[:13], None, []),
        ({"max_new_tokens": 24, "stop": "not in it"}, "length", ids, text, []),
        ({"max_new_tokens": 24, "eos_token_id": ids[6]}, "stop", ids[: first + 1], None, ["stop"]),
        ({"max_new_tokens": 24, "stop": text[9:12]}, "stop", None, text[:end], ["stop"]),
        ({"max_new_tokens": 99}, "deadline", ids, text, []),
        ({"max_new_tokens": 99}, "abort", ids, None, []),
    ]
    for options, reason, expected_ids, expected_text, cancelled in cases:
        request = make_request(model, [5, 6, 7], SamplingParams(**options))
        handle = IteratorHandle(request, ids, size=size, end=reason)
        answer = TextStream(request, Detokenizer(model.tokenizer), handle)
        pieces = read(answer, is_async=is_async)
        one = TextStream(request, Detokenizer(model.tokenizer), IteratorHandle(request, ids, end=reason))
        assert pieces == list(one) and "".join(pieces) == answer.text
        assert (answer.stats.finish_reason, handle.cancelled) == (reason, cancelled)
        assert answer.token_ids == one.token_ids == (expected_ids or ids[: len(one.token_ids)])
        if reason != "abort":  # then the end of an unfinished character stays out
            expected = model.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            assert answer.text == (expected if expected_text is None else expected_text)


def test_an_answer_without_a_limit_gets_one():
    model = eager_model()
    next(stream(model, "Once"))
    limit = model.config.max_position_embeddings - len(model.tokenizer("Once")["input_ids"])
    assert model.max_new_tokens_seen == [limit]  # the positions end before the default does
    assert limit < DEFAULT_MAX_NEW_TOKENS


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "at least one token"),
        ([3, -1], "got -1"),
        ([3, 10**6], "from 0 to .* got 1000000"),
        ([3, "a"], "got 'a'"),
        ([3, True], "got True"),
        (b"Once", "got bytes"),
        (7, "got int"),
        ([3] * 65, "at most 64 tokens.*got 65"),
        ("word " * 300, "at most 64 tokens"),
    ],
)
def test_refused_prompts(prompt, message):
    with pytest.raises(InvalidArgumentError, match=message):
        stream(eager_model(), prompt)


def test_other_refused_arguments():
    model = eager_model()
    with pytest.raises(UnsupportedArgumentError, match="n=2"):
        stream(model, "Once", SamplingParams(n=2, temperature=1.0))
    with pytest.raises(InvalidArgumentError, match="params: expected SamplingParams"):
        stream(model, "Once", {"temperature": 1.0})
    model.text_tokenizer = None
    with pytest.raises(InvalidArgumentError, match="tiny has no tokenizer"):
        stream(model, "Once")
