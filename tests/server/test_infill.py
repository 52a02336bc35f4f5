"""Text in a gap: ``suffix`` of ``/v1/completions`` by OpenAI's client, and ``/infill`` by plain requests."""

import asyncio
import json
import shutil

import httpx
import openai
import pytest
from running_server import serving
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams
from torchax_serve.server.infill_limits import LineLimits, limited_steps
from torchax_serve.text.infill import ContextFile, FimTokens
from torchax_serve.text.text_stream import AnswerStep

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(1531, 1536)
BEFORE, BEHIND = "Once upon", "the end."


@pytest.fixture(scope="module")
def filler(tmp_path_factory):
    """A server whose tokenizer has other texts for some of its tokens."""
    path = tmp_path_factory.mktemp("filler")
    for file in EMBEDDED.iterdir():
        shutil.copy(file, path)
    with_marks(path / "tokenizer.json")
    with serving(path) as found:
        yield found


def with_marks(file):
    """Makes special tokens of the last ones, of which no others are made."""
    data = json.loads(file.read_text())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    texts = {token_id: text for text, token_id in vocab.items()}
    for token_id, text in zip(range(PREFIX, FILE + 1), MARKS, strict=True):
        old = texts[token_id]
        data["model"]["merges"] = [each for each in data["model"]["merges"] if "".join(each) != old]
        del vocab[old]
        vocab[text] = token_id
        data["added_tokens"].append({**data["added_tokens"][0], "id": token_id, "content": text, "special": True})
    assert len(merges) == len(data["model"]["merges"]) + len(MARKS)
    file.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def completions(filler):
    with openai.OpenAI(base_url=f"{filler[0].url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found.completions


@pytest.fixture(scope="module")
def plain(filler):
    with httpx.Client(base_url=filler[0].url, timeout=300) as found:
        yield found


def expected_ids(model, before, behind, front=(), start=""):
    def ids(text):
        return model.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    return [2, *front, PREFIX, *ids(before), SUFFIX, *ids(behind), MIDDLE, *ids(start)]


def test_ollamas_suffix_is_that_of_completions(completions, plain):
    answer = completions.create(model="tiny", prompt=BEFORE, suffix=BEHIND, max_tokens=6, temperature=0)
    fields = {"model": "tiny", "suffix": BEHIND, "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    found = plain.post("/api/generate", json={"prompt": BEFORE, **fields}).json()
    assert (found["response"], found["prompt_eval_count"]) == (answer.choices[0].text, answer.usage.prompt_tokens)
    fields["options"] = {"temperature": 0}
    assert plain.post("/api/generate", json={"prompt": "", **fields}).json()["done_reason"] in ("stop", "length")
    refused = plain.post("/api/generate", json={"prompt": BEFORE, "system": "Be brief.", **fields})
    assert refused.status_code == 400 and refused.json()["error"].startswith("suffix: expected none with system")


def test_a_suffix_stands_between_the_tokenizers_marks(completions, filler):
    model = filler[1]
    answer = completions.create(model="tiny", prompt=BEFORE, suffix=BEHIND, max_tokens=6, temperature=0)
    ids = expected_ids(model, BEFORE, BEHIND)
    params = SamplingParams(max_new_tokens=6, temperature=0, stop_token_ids=[REPOSITORY, FILE])
    assert answer.choices[0].text == model.generate_batch([ids], params)[0].text
    assert answer.usage.prompt_tokens == len(ids)
    plain = completions.create(model="tiny", prompt=BEFORE, suffix="", max_tokens=6, temperature=0)
    assert plain.usage.prompt_tokens < len(ids)


def test_an_answer_ends_at_the_tokens_between_files(completions):
    forced = {"allowed_token_ids": [FILE]}
    answer = completions.create(model="tiny", prompt=BEFORE, suffix=BEHIND, max_tokens=6, extra_body=forced)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("", "stop", 1)


def test_infill_answers_as_llama_cpp(plain, filler):
    model = filler[1]
    body = {
        "input_prefix": BEFORE,
        "input_suffix": BEHIND,
        "input_extra": [{"filename": "a.py", "text": "x"}],
        "prompt": "a",
        "n_predict": 5,
        "temperature": 0,
        "return_tokens": True,
        "ignore_eos": True,
    }
    found = plain.post("/infill", json=body).json()
    tokenizer = model.tokenizer
    parts = [(REPOSITORY, "myproject\n"), (FILE, "a.py\nx\n"), (FILE, "filename\n")]
    front = [i for mark, text in parts for i in (mark, *tokenizer(text, add_special_tokens=False)["input_ids"])]
    ids = expected_ids(model, BEFORE, BEHIND, front, "a")
    params = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[REPOSITORY, FILE])
    (expected,) = model.generate_batch([ids], params)
    assert (found["content"], found["tokens"]) == (expected.text, expected.token_ids)
    assert found["prompt"] == tokenizer.decode(ids)
    assert found["stop"] and found["stop_type"] == "limit" and found["tokens_evaluated"] == len(ids)
    events = [line for line in plain.post("/infill", json=body | {"stream": True}).text.split("\n\n") if line]
    pieces = [json.loads(line.removeprefix("data: ")) for line in events]
    assert "".join(piece["content"] for piece in pieces) == expected.text
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    fields = body | {"response_fields": ["content", "stop_type"]}
    assert plain.post("/infill", json=fields).json() == {"content": expected.text, "stop_type": "limit"}


def test_fields_of_editors_that_change_no_answer_are_taken(plain):
    """A limit that llama.cpp's server does not have either, when a chunk was seen, and names of absent fields."""
    body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "prompt": "", "n_predict": 3, "temperature": 0}
    chunk = {"filename": "a.py", "text": "x"}
    expected = plain.post("/infill", json=body | {"input_extra": [chunk]}).json()
    fields = {
        "t_max_prompt_ms": 500,
        "cache_prompt": True,
        "response_fields": ["content", "timings/prompt_n", "tokens"],
    }
    found = plain.post("/infill", json=body | fields | {"input_extra": [chunk | {"time": [5, -7]}]})
    assert found.status_code == 200
    assert found.json() == {"content": expected["content"], "tokens": []}


def test_only_the_samplers_that_are_named_are_used(plain):
    """What llama.vim sends; without the temperature in the list, a given one is not read, as in llama.cpp."""
    body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "n_predict": 8, "seed": 4, "ignore_eos": True}
    options = {"temperature": 2.0, "repeat_penalty": 1.9, "min_p": 0.01, "top_k": 40, "top_p": 0.9}

    def content(**fields):
        response = plain.post("/infill", json={**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()["content"]

    named = content(samplers=["top_k", "top_p", "infill"], **options)
    assert named == content(top_k=40, top_p=0.9, temperature=1, repeat_penalty=1, min_p=0)
    assert named != content(**options)
    everything = ["penalties", "dry", "temperature", "top_k", "typ_p", "top_p", "min_p", "xtc"]
    assert content(samplers=everything, **options) == content(**options)
    assert content(samplers=["top_k"], top_k=1) == content(temperature=0)


def taken(text, size, **limits):
    """What is left of an answer in pieces, and whether it was cut."""
    line_limits, found = LineLimits(**limits), ""
    for begin in range(0, len(text), size):
        step = line_limits.take(AnswerStep(text[begin : begin + size], (1,)), 0.5)
        found += step.text
        if step.finish_reason is not None:
            return found, True
    return found, False


@pytest.mark.parametrize(
    ("text", "least_indent", "expected"),
    [
        ("x\n    y\n    z", 4, None),
        ("x\n    y\n  z", 4, "x\n    y\n  "),
        ("x\n\t\ty\n\n", 2, "x\n\t\ty\n"),
        ("x = 1\ny", 1, "x = 1\n"),
        ("x\n", 4, None),
        ("x\ny", 0, None),
    ],
)
def test_an_answer_ends_at_a_line_of_less_indentation(text, least_indent, expected):
    for size in range(1, len(text) + 1):
        assert taken(text, size, least_indent=least_indent) == (expected or text, expected is not None)


def test_an_answer_ends_with_a_line_when_its_time_has_passed():
    assert taken("a b\nc\nd", 1, most_s=0.4) == ("a b\n", True)
    assert taken("a b\nc\nd", 1, most_s=0.6) == ("a b\nc\nd", False)
    assert taken("a b", 1, most_s=0.4) == ("a b", False)


class ScriptedAnswer:
    """An answer of given texts, a token each."""

    def __init__(self, texts):
        self.texts, self.finish_reason, self.first_s, self.is_cancelled = texts, None, 0.0, False

    async def __aiter__(self):
        for index, text in enumerate(self.texts):
            self.finish_reason = "stop" if index == len(self.texts) - 1 else None
            yield AnswerStep(text, (index,), finish_reason=self.finish_reason)

    def cancel(self):
        self.is_cancelled = True


@pytest.mark.parametrize(
    ("limits", "text", "reason"),
    [
        ({}, "a\n  b\nc", "stop"),
        ({"least_indent": 2}, "a\n  b\n", "length"),
        ({"most_s": 0.001}, "a\n", "length"),
    ],
)
def test_an_answer_that_a_limit_ends_is_cancelled(limits, text, reason):
    answer = ScriptedAnswer(["a", "\n", "  b", "\n", "c"])

    async def steps():
        return [step async for step in limited_steps(answer, LineLimits(**limits))]

    found = asyncio.run(steps())
    assert ("".join(step.text for step in found), found[-1].finish_reason) == (text, reason)
    assert answer.finish_reason == reason and answer.is_cancelled is (reason == "length")


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        ("/v1/completions", {"echo": True}, "echo: expected none next to suffix, got one; leave it out"),
        ("/v1/completions", {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens: expected none next to suffix"),
        ("/v1/completions", {"prompt": [5, 6]}, "prompt: expected text next to suffix, got token ids"),
        ("/infill", {"n_predict": 0}, "n_predict: expected at least 1, or -1 for all there is room for, got 0"),
        ("/infill", {"repeat_penalty": 0}, "repeat_penalty: expected a number > 0, got 0"),
        ("/infill", {"n_indent": -1}, "n_indent: expected 0 or more, got -1"),
        (
            "/infill",
            {"samplers": ["top_k", "tpo_p"]},
            "samplers: expected of penalties, temperature, top_k, top_p, min_p",
        ),
        ("/infill", {"samplers": ["top_p", "top_k"], "top_p": 0.9, "top_k": 4}, "samplers: expected penalties, temp"),
        (
            "/infill",
            {"samplers": ["top_p", "temperature"], "top_p": 0.9, "temperature": 0.5},
            "samplers: expected penal",
        ),
        ("/infill", {"samplers": ["top_p", "top_p"], "top_p": 0.9}, "samplers: expected penalties, temperature"),
        ("/infill", {"t_max_predict_ms": -5}, "t_max_predict_ms: expected 0 or more, got -5"),
        ("/infill", {"input_extra": [{"name": "a"}]}, "unknown field 'input_extra[0].name'; leave it out"),
    ],
)
def test_what_does_not_go_with_a_gap_is_named(plain, route, fields, message):
    own = {"input_prefix": BEFORE, "input_suffix": BEHIND}
    body = own if route == "/infill" else {"prompt": BEFORE, "suffix": BEHIND}
    response = plain.post(route, json={**body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("route", ["/v1/completions", "/infill"])
def test_a_tokenizer_without_marks_is_named(http, route):
    body = {"prompt": "a", "suffix": "b"} if route == "/v1/completions" else {"input_prefix": "a", "input_suffix": "b"}
    response = http.post(route, json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "unsupported_parameter"
    assert "the tokenizer of tiny has no tokens to fill in the middle (FIM), such as <|fim_prefix|>" in error["message"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "x\n<fim_prefix>a<fim_suffix>b<fim_middle>c"),
        (
            ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
            "x\n<|code_prefix|>a<|code_suffix|>b<|code_middle|>c",
        ),
        (("[PREFIX]", "[SUFFIX]"), "x\n[SUFFIX]b[PREFIX]ac"),
    ],
)
def test_each_family_has_its_order(texts, expected):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and FimTokens.of(tokenizer) is None
    tokenizer.add_special_tokens({"additional_special_tokens": list(texts)})
    ids = FimTokens.of(tokenizer).prompt_ids(tokenizer, "a", "b", start="c", files=[ContextFile("f", "x")])
    assert tokenizer.decode(ids) == "<bos>" + expected
