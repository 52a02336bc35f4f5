"""One request's fault stays its own: those that run next to it and after it get the tokens that they get alone."""

import concurrent.futures
import json
import threading
import time

import pytest
from running_server import ENGINE

from torchax_serve.engine.model_runner import ModelRunner
from torchax_serve.sampling import sampler
from torchax_serve.sampling.grammar import GrammarMasks
from torchax_serve.server import answers, completions, model_service
from torchax_serve.text.template_renderer import TemplateRenderer

PLAIN = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8}
MARK = "the request that fails"
NUM_NEIGHBOURS = ENGINE.max_num_seqs
BAD = [
    {"max_tokens": -1}, {"n": 10**9}, {"prompt": [-1]}, {"prompt": [2**40]}, {"temperature": -1}, {"top_p": 7},
    {"stop": ["a"] * 5000}, {"guided_regex": "(a"}, {"seed": "x"},
    {"prompt": "x " * 2000}, {"logit_bias": {"-1": 3}}, {"allowed_token_ids": []}, {"unknown": 1},
    {"min_tokens": 9}, {"best_of": 3}, {"logprobs": 10**6},
]  # fmt: skip


def neighbour(http, index):
    body = {**PLAIN, "max_tokens": 60, "temperature": 1, "seed": index, "ignore_eos": True, "logprobs": 1}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    return choice["text"], choice["logprobs"]["tokens"]


@pytest.fixture(scope="module")
def known(server):
    import httpx

    with httpx.Client(base_url=server.url, timeout=300) as http:  # the first one compiles
        return [neighbour(http, index) for index in range(NUM_NEIGHBOURS)]


def neighbours_with(http, model, known, act):
    """Calls `act` while as many neighbours run as are known, and checks these; returns its result."""
    engine, begin = model.engine, threading.Event()
    engine._run_on_engine_thread(lambda: begin.wait(60))
    with concurrent.futures.ThreadPoolExecutor(len(known)) as pool:
        running = [pool.submit(neighbour, http, index) for index in range(len(known))]
        while engine.admission.num_entering < len(known):
            assert not any(each.done() for each in running)
            time.sleep(0.005)
        begin.set()
        result = act()
        assert [each.result() for each in running] == known
    return result


def test_neighbours_of_bad_requests_get_their_tokens(http, server, model, known):
    def send_all():
        return [http.post("/v1/completions", json={**PLAIN, **bad}).status_code for bad in BAD]

    statuses = neighbours_with(http, model, known, send_all)
    assert "; ".join(str(bad) for bad, status in zip(BAD, statuses, strict=True) if status != 400) == ""
    assert server.pages_are_back(model)


def fails(*args, **kwargs):
    raise RuntimeError(f"about {MARK}")


def failing_for_mark(function, is_marked):
    """The function, which raises for what is marked."""
    return lambda *args, **kwargs: fails() if is_marked(*args) else function(*args, **kwargs)


def break_render(patch, ids):
    inner = model_service.chat_prompt_ids
    patch.setattr(model_service, "chat_prompt_ids", failing_for_mark(inner, lambda model, given: MARK in str(given)))


def break_tokenizing(patch, ids):
    inner = model_service.encode_prompt
    patch.setattr(model_service, "encode_prompt", failing_for_mark(inner, lambda model, text: MARK in str(text)))


def break_masks(patch, ids):
    patch.setattr(GrammarMasks, "fill", fails)


def break_building(patch, ids):
    patch.setattr(sampler, "history_row", fails)


def break_decoder(patch, ids):
    inner = answers.answer_detokenizer

    def make(model, request, options):
        decoder = inner(model, request, options)
        if list(request.prompt_ids) == ids:
            decoder.push = fails
        return decoder

    patch.setattr(answers, "answer_detokenizer", make)


def break_logprobs(patch, ids):
    patch.setattr(ModelRunner, "prompt_logprobs", fails)


def break_writing(patch, ids):
    inner = completions.event

    def write(content):
        is_marked = any(choice.get("token_ids") for choice in content.get("choices", ()))
        return fails() if is_marked else inner(content)

    patch.setattr(completions, "event", write)


STAGES = {
    "render": (break_render, "/v1/chat/completions", {}),
    "tokenize": (break_tokenizing, "/v1/completions", {}),
    "mask": (break_masks, "/v1/completions", {"guided_regex": "[a-z]{20}"}),
    "building": (break_building, "/v1/completions", {"bad_words": ["the moon"]}),
    "decoding": (break_decoder, "/v1/completions", {}),
    "logprobs": (break_logprobs, "/v1/completions", {"prompt_logprobs": 2}),
    "writing": (break_writing, "/v1/completions", {"return_token_ids": True}),
}


# A complete answer is written by Starlette.
CASES = [(stage, stream) for stage in STAGES for stream in (False, True) if stream or stage != "writing"]


@pytest.mark.parametrize(("stage", "stream"), CASES)
def test_an_error_at_any_stage_is_of_its_request_alone(http, server, model, known, monkeypatch, stage, stream):
    break_it, path, fields = STAGES[stage]
    ids = model.tokenizer.encode(MARK)
    body = {"model": "tiny", "max_tokens": 20, "stream": stream, **fields}
    body |= {"messages": [{"role": "user", "content": MARK}]} if "chat" in path else {"prompt": MARK}
    break_it(monkeypatch, list(ids))
    others = known[:-1]  # with the request that fails all slots are taken
    answer = neighbours_with(http, model, others, lambda: http.post(path, json=body))
    if stream and answer.status_code == 200:
        *_, last = [line for line in answer.text.split("\n\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "about" not in answer.text
    monkeypatch.undo()
    assert server.pages_are_back(model)
    assert http.post("/v1/completions", json=PLAIN).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='aaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    ],
    ids=["endless", "large"],
)
def test_a_hostile_template_holds_up_its_own_request_alone(http, server, model, known, monkeypatch, template):
    monkeypatch.setattr(TemplateRenderer.render, "__defaults__", (3.0,))
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    server.context.loop_lag.worst_busy_s = 0.0
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    answer = neighbours_with(http, model, known, lambda: http.post("/v1/chat/completions", json=body))
    assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"], answer.text
    assert server.context.loop_lag.worst_busy_s < 0.1  # so long any other request may have waited for the server
    assert server.pages_are_back(model)


def test_a_plain_request_after_every_option_in_its_row(http, server, model):
    known = http.post("/v1/completions", json=PLAIN).json()["choices"]
    for fields in (
        {"guided_regex": "[a-z]{8}"},
        {"logit_bias": {"7": 100}, "seed": 3, "temperature": 2},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.9},
        {"bad_words": ["the", "a"], "min_tokens": 8, "stop_token_ids": [9]},
        {"allowed_token_ids": [20, 21, 22], "logprobs": 3, "prompt_logprobs": 1},
    ):
        assert http.post("/v1/completions", json={**PLAIN, **fields}).status_code == 200
        assert server.pages_are_back(model)  # so that the next one has the same row
        assert http.post("/v1/completions", json=PLAIN).json()["choices"] == known, fields


def pieces_of(http, body):
    with http.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return text, [token for choice in choices for token in choice["token_ids"]], choices[-1]["finish_reason"]


@pytest.mark.parametrize("seed", range(4))
def test_any_tokens_are_streamed_as_they_are_answered(http, seed):
    """High temperatures give bytes of any script, cut anywhere between tokens."""
    body = {
        **PLAIN,
        "temperature": 2,
        "seed": seed,
        "max_tokens": 120,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    (whole,) = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    text, token_ids, reason = pieces_of(http, body)
    assert (text, token_ids, reason) == (whole["text"], whole["token_ids"], "length")
    assert http.post("/detokenize", json={"tokens": token_ids}).json()["prompt"] == text
    stop = text[40:43]
    (stopped,) = http.post("/v1/completions", json={**body, "stop": stop}).json()["choices"]
    assert stopped["text"] == text[: text.index(stop)]
    assert pieces_of(http, {**body, "stop": stop})[::2] == (stopped["text"], "stop")
