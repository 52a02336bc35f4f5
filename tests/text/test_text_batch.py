"""`generate_batch` against eager ``generate`` of every prompt by itself."""

import pytest
from eager_model import eager_model
from test_text_stream import eager_ids

from model_adapters.errors import InvalidArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text import generate_batch, stream

PROMPTS = ["Once upon a time", [5, 7], "x", "The quick brown fox jumps over the lazy dog.", [9], "Once"]


def test_completions_equal_those_of_single_prompts_in_order():
    model = eager_model()
    params = SamplingParams(max_new_tokens=10)
    for prompt, completion in zip(PROMPTS, generate_batch(model, PROMPTS, params), strict=True):
        prompt_ids = model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        expected = eager_ids(model, prompt_ids, max_new_tokens=10)
        assert completion.token_ids == expected
        assert completion.text == model.tokenizer.decode(expected, skip_special_tokens=True)
        assert completion.prompt_len == len(prompt_ids)
        assert completion.finish_reason == "length"


def test_finish_reasons_equal_those_of_a_stream():
    """Rows that end early are followed by padding, which belongs to no answer."""
    model = eager_model()
    long = SamplingParams(max_new_tokens=16)
    text = "".join(stream(model, PROMPTS[0], long))
    eos = eager_ids(model, model.tokenizer(PROMPTS[2])["input_ids"], max_new_tokens=16)[5]
    params = SamplingParams(max_new_tokens=16, stop=[text[4:7], "e"], eos_token_id=eos)
    reasons = set()
    for prompt, completion in zip(PROMPTS, generate_batch(model, PROMPTS, params), strict=True):
        answer = stream(model, prompt, params)
        assert completion.text == "".join(answer)
        assert completion.token_ids == answer.token_ids
        assert completion.finish_reason == answer.stats.finish_reason
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_string_that_begins_in_the_prompt_does_not_stop():
    """transformers' stop strings look at the prompt as well; an answer's are looked for in the answer."""
    model = eager_model()
    params = SamplingParams(max_new_tokens=8)
    answers = generate_batch(model, PROMPTS[:1] * 2, params)
    stop = PROMPTS[0][-1] + answers[0].text[0]
    assert stop not in answers[0].text
    stopped = SamplingParams(max_new_tokens=8, stop=stop)
    assert generate_batch(model, PROMPTS[:1] * 2, stopped) == answers
    assert "".join(stream(model, PROMPTS[0], stopped)) == answers[0].text


def test_several_answers_to_a_prompt():
    model = eager_model()
    params = SamplingParams(max_new_tokens=6, temperature=2.0, n=3)
    completions = generate_batch(model, PROMPTS[:2], params)
    assert [completion.prompt_len for completion in completions] == [completions[0].prompt_len] * 3 + [2] * 3
    assert len({tuple(completion.token_ids) for completion in completions[:3]}) > 1


def test_a_seed_makes_a_prompt_independent_of_the_others():
    model = eager_model()
    params = SamplingParams(max_new_tokens=6, temperature=2.0, n=2, seed=3)
    alone = generate_batch(model, [PROMPTS[1]], params)
    among = generate_batch(model, PROMPTS, params)
    assert among[2:4] == alone
    assert alone[0] != alone[1]
    second = stream(model, PROMPTS[1], SamplingParams(max_new_tokens=6, temperature=2.0, seed=4))
    assert "".join(second) == alone[1].text


def test_all_requests_are_submitted_before_the_first_answer_is_read():
    """So that a model whose requests run side by side has them all."""
    model = eager_model()
    handed_over, num_at_first_token = [], []
    new_tokens = model.new_tokens

    def watched(request):
        handed_over.append(request.prompt_ids)

        def tokens():
            num_at_first_token.append(len(handed_over))
            yield from new_tokens(request)

        return tokens()

    model.new_tokens = watched
    generate_batch(model, PROMPTS, SamplingParams(max_new_tokens=2))
    assert num_at_first_token == [len(PROMPTS)] * len(PROMPTS)
    assert generate_batch(model, [], None) == []


def test_parameters_for_each_prompt():
    model = eager_model()
    each = [SamplingParams(max_new_tokens=length) for length in (3, 1)]
    assert [len(c.token_ids) for c in generate_batch(model, PROMPTS[:2], each)] == [3, 1]
    with pytest.raises(InvalidArgumentError, match="expected one for each of 3 prompts, got 2"):
        generate_batch(model, PROMPTS[:3], each)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Once", "expected a list of prompts, got str"),
        (None, "expected a list of prompts, got NoneType"),
        (["Once", ""], r"prompts\[1\]: .*empty"),
        (["Once", [1], [-4]], r"prompts\[2\]: .*got -4"),
    ],
)
def test_refused_prompts(prompts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        generate_batch(eager_model(), prompts)
