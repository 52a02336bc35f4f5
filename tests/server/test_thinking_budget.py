"""Budgets of reasoning over the interfaces, by OpenAI's and Anthropic's clients, with and without drafts."""

import json

import anthropic
import httpx
import openai
import pytest
from scripted_model import GENERATION_PROMPT
from scripted_server import scripted_server

from model_adapters.errors import UnsupportedModelError
from torchax_serve import EngineOptions
from torchax_serve.server import thinking_budget

THOUGHT = "Two and two are four, as two and one are three, and one more is what there is to add."
SCRIPT = {
    "": "I have no line for this.",
    " think first": f"<think>{THOUGHT}</think>\n\nFour.",
    " think aloud": "Two and two are four, and that is all.",
}
CONTINUED = [(f" think first{GENERATION_PROMPT}<think>\n", f"{THOUGHT}</think>Five."), ("</think>", "\n\nFour.")]
SCHEMA = {
    "type": "object",
    "properties": {"is_four": {"const": True}},
    "required": ["is_four"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Please think first"}]
BUDGETS = (0, 1, 10)


@pytest.fixture(scope="module", params=[None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "ngram"])
def scripted(request, tmp_path_factory):
    options = {"thinking_prompt": "<think>\n", "continued": CONTINUED}
    engine = EngineOptions(max_num_seqs=4, max_model_len=512, speculative=request.param)
    folder = tmp_path_factory.mktemp("budget")
    with scripted_server(folder, script=SCRIPT, model=options, engine=engine) as server:
        server.context.service().model.engine.check_integrity = True
        yield server


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def first_tokens(server, text, num):
    tokenizer = server.model.tokenizer
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:num])


def ask(client, budget, text="Please think first", **fields):
    extra = {"thinking_token_budget": budget, **fields.pop("extra_body", {})}
    messages = [{"role": "user", "content": text}]
    fields = {"model": "scripted", "messages": messages, "max_tokens": 200, **fields}
    return client.chat.completions.create(**fields, extra_body=extra)


def shown(message):
    return (getattr(message, "reasoning", None) or "").strip(), (message.content or "").strip()


@pytest.mark.parametrize("is_opened", [False, True], ids=["answer", "prompt"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_reasoning_ends_after_its_budget(client, scripted, budget, is_opened):
    extra = {"chat_template_kwargs": {"enable_thinking": True}} if is_opened else {}
    answer = ask(client, budget, n=2, extra_body=extra)
    expected = first_tokens(scripted, THOUGHT, budget), "Four."
    assert [shown(choice.message) for choice in answer.choices] == [expected, expected]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    pieces = ["", ""]
    for chunk in ask(client, budget, stream=True, extra_body=extra):
        for choice in chunk.choices:
            pieces[0] += getattr(choice.delta, "reasoning", None) or ""
            pieces[1] += choice.delta.content or ""
    assert (pieces[0].strip(), pieces[1].strip()) == expected


@pytest.mark.parametrize("budget", [-1, None, 1000, 60])
def test_reasoning_within_its_budget_is_the_models_own(client, budget):
    plain = ask(client, None)
    assert shown(plain.choices[0].message) == (THOUGHT, "Four.")
    answer = ask(client, budget)
    assert answer.choices[0].message == plain.choices[0].message
    assert answer.usage.completion_tokens == plain.usage.completion_tokens
    loud = ask(client, budget, "Please think aloud").choices[0]
    assert shown(loud.message) == ("", SCRIPT[" think aloud"])


@pytest.mark.parametrize("budget", [*BUDGETS, 1000])
def test_a_schema_holds_what_stands_behind_the_reasoning(client, scripted, budget):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    for is_streamed in (False, True):
        answer = ask(client, budget, response_format=form, extra_body=extra, stream=is_streamed)
        if is_streamed:
            deltas = [choice.delta for chunk in answer for choice in chunk.choices]
            reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
            content = "".join(delta.content or "" for delta in deltas)
        else:
            reasoning, content = shown(answer.choices[0].message)
        assert json.loads(content) == {"is_four": True}
        assert reasoning.strip() == first_tokens(scripted, THOUGHT, budget)


@pytest.mark.parametrize("budget", [1, 10, None])
def test_a_schema_waits_for_a_reasoning_that_the_prompt_has_begun(client, scripted, budget):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    extra = {"response_format": form} | ({} if budget is None else {"thinking_token_budget": budget})
    prompts = [f"Please think first{GENERATION_PROMPT}{opening}" for opening in ("<think>\n", "")]
    fields = {"model": "scripted", "max_tokens": 100, "extra_body": extra}
    opened, plain = (choice.text for choice in client.completions.create(prompt=prompts, **fields).choices)
    reasoning, _, content = opened.partition("</think>")
    expected = THOUGHT if budget is None else first_tokens(scripted, THOUGHT, budget)
    assert (reasoning.strip(), json.loads(content), json.loads(plain)) == (expected.strip(), *[{"is_four": True}] * 2)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_schema_waits_for_a_reasoning_that_is_continued(client, budget):
    begun = f"<think>\n{THOUGHT[:20]}"
    messages = [*QUESTION, {"role": "assistant", "content": begun}]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    message = ask(client, budget, messages=messages, response_format=form, extra_body=extra).choices[0].message
    assert json.loads(message.content) == {"is_four": True}


def test_an_effort_that_cannot_be_held_is_noted(scripted, monkeypatch):
    def refused(*_args):
        raise UnsupportedModelError("expected a tokenizer that spells it")

    monkeypatch.setattr(thinking_budget, "MarkerTokens", refused)
    noted = []
    monkeypatch.setattr(thinking_budget, "note_once", noted.append)
    with httpx.Client(base_url=scripted.url, timeout=120) as http:
        body = {"model": "scripted", "messages": QUESTION, "max_tokens": 40}
        answer = http.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"})
        assert answer.status_code == 200 and noted[0].startswith("reasoning_effort: it has no effect on scripted")
        error = http.post("/v1/chat/completions", json={**body, "thinking_token_budget": 3}).json()["error"]
        assert error["message"].startswith("thinking_token_budget: expected a tokenizer")


@pytest.mark.parametrize("budget", BUDGETS)
def test_anthropics_budget(scripted, budget):
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=120) as client:
        fields = {"model": "scripted", "max_tokens": 200, "messages": QUESTION}
        thinking = {"type": "enabled", "budget_tokens": budget}
        found = client.messages.create(**fields, thinking=thinking)
        with client.messages.stream(**fields, thinking=thinking) as stream:
            streamed = stream.get_final_message()
    for message in (found, streamed):
        thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
        texts = "".join(block.text for block in message.content if block.type == "text")
        assert (thoughts.strip(), texts.strip()) == (first_tokens(scripted, THOUGHT, budget), "Four.")


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_of_responses_and_completions(client, scripted, budget):
    extra = {"thinking_token_budget": budget}
    found = client.responses.create(model="scripted", input="Please think first", extra_body=extra)
    reasoning = "".join(part.text for item in found.output if item.type == "reasoning" for part in item.content)
    expected = first_tokens(scripted, THOUGHT, budget)
    assert (reasoning.strip(), found.output_text.strip()) == (expected, "Four.")
    prompts = [f"Please think first{GENERATION_PROMPT}{opening}" for opening in ("", "<think>\n")]
    fields = {"model": "scripted", "max_tokens": 100, "extra_body": extra}
    texts = [choice.text for choice in client.completions.create(prompt=prompts, **fields).choices]
    assert [text.strip() for text in texts] == [f"<think>{expected}</think>\n\nFour.", f"{expected}</think>\n\nFour."]


def test_efforts_are_shares_of_the_answer_where_the_template_reads_none(client, scripted):
    """The template of this model has `enable_thinking`, by which effort `none` is honoured."""
    for effort, share in {"minimal": 0.1, "low": 0.2, "medium": 0.5, "max": 1}.items():
        answer = ask(client, None, reasoning_effort=effort, max_tokens=40)
        reasoning = first_tokens(scripted, THOUGHT, int(40 * share) if share < 1 else 36)
        assert shown(answer.choices[0].message)[0] == reasoning.strip()
    none = ask(client, None, reasoning_effort="none").choices[0].message
    assert shown(none) == (THOUGHT, "Four.")  # this model reasons without being told to
    both = ask(client, 3, reasoning_effort="medium").choices[0].message
    assert shown(both)[0] == first_tokens(scripted, THOUGHT, 3)


def test_an_answer_that_can_reason_no_more_waits_for_no_masks(client, scripted, monkeypatch):
    """Then its steps are sent as those of other requests: several at once, or with drafts."""
    engine, sent = scripted.context.service().model.engine, []
    execute = engine._runner.execute

    def recorded(plan, requests, outputs, masks=None):
        states = [engine._scheduler.find(row.request_id) for row in plan.rows]
        sent.append((masks is not None, any(state.waits_for_tokens for state in states)))
        return execute(plan, requests, outputs, masks)

    monkeypatch.setattr(engine._runner, "execute", recorded)
    answer = ask(client, 0, "Please think aloud")
    assert shown(answer.choices[0].message) == ("", SCRIPT[" think aloud"])
    assert sent[0] == (True, True) and sent[-1] == (False, False)


def test_budgets_that_cannot_be_held_are_refused(scripted):
    with httpx.Client(base_url=scripted.url, timeout=120) as http:
        body = {"model": "scripted", "messages": QUESTION, "thinking_token_budget": -2}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "thinking_token_budget" and "expected a whole number >= 0" in error["message"]
        opened = {"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": True}}
        error = http.post("/v1/chat/completions", json={**body, **opened, "allowed_token_ids": [5]}).json()["error"]
        assert error["message"].startswith("allowed_token_ids, thinking_token_budget: expected a token that may follow")
        body |= {"thinking_token_budget": 1.5}
        assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_a_model_without_markers_has_no_budget(start_server):
    server = start_server(response_template="none")
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {"messages": QUESTION, "max_tokens": 4, "thinking_token_budget": 5}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["message"].startswith("thinking_token_budget: expected a model whose reasoning stands between")
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 5}}
        assert http.post("/v1/messages", json=body).status_code == 200
