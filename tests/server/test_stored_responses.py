"""Responses that later requests name: their routes, keys and bounds."""

import threading

import httpx
import openai
import pytest
from scripted_server import scripted_server

from torchax_serve.server.errors import ApiError
from torchax_serve.server.responses import store as store_module
from torchax_serve.server.responses.store import ResponseStore

KEYS = (("alice", "sk-alice-0123456789"), ("bob", "sk-bob-0123456789"))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with scripted_server(
        tmp_path_factory.mktemp("scripted"), api_keys=KEYS, max_stored_responses=3, keep_alive_s=5
    ) as server:
        yield server.url


@pytest.fixture(scope="module")
def alice(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0][1], max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def bob(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[1][1], max_retries=0, timeout=120) as found:
        yield found


def ask(client, given, **fields):
    return client.responses.create(model="scripted", input=given, **fields)


def test_a_conversation_goes_on_by_the_id_of_its_last_response(alice):
    read = {"type": "function", "name": "Read", "strict": False, "parameters": {"type": "object", "properties": {}}}
    first = ask(alice, "What does note.txt say?", tools=[read])
    assert first.store
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "hello, world of notes"}
    second = ask(alice, [result], tools=[read], previous_response_id=first.id)
    assert second.output_text == "It says: hello, world of notes." and second.previous_response_id == first.id
    third = ask(alice, "Now be polite", tools=[read], previous_response_id=second.id)
    assert third.output_text == "One STOP Two." and third.usage.input_tokens > second.usage.input_tokens
    assert [item.type for item in alice.responses.input_items.list(third.id)] == ["message"]


def test_items_of_responses_are_referred_to(alice, bob):
    """As Vercel's AI SDK sends back what a server has stored: by the ids of the items."""
    read = {"type": "function", "name": "Read", "strict": False, "parameters": {"type": "object", "properties": {}}}
    asked = {"role": "user", "content": "What does note.txt say?"}
    first = ask(alice, [asked], tools=[read])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "hello, world of notes"}
    second = ask(alice, [asked, *references, result], tools=[read])
    copied = ask(alice, [asked, *(item.model_dump() for item in first.output), result], tools=[read])
    assert second.output_text == copied.output_text == "It says: hello, world of notes."
    assert second.usage.input_tokens == copied.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].id: expected the id of an item of a stored response"):
        ask(bob, [asked, references[0]])


def test_responses_are_got_listed_and_deleted(alice):
    given = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Please be polite"}]
    with alice.responses.stream(model="scripted", input=given) as stream:
        made = stream.until_done().get_final_response()
    assert alice.responses.retrieve(made.id).output_text == "One STOP Two."
    items = alice.responses.input_items.list(made.id, order="asc", limit=1)
    assert items.has_more and items.data[0].content[0].text == "Hi"
    (last,) = alice.responses.input_items.list(made.id, order="asc", after=items.data[0].id).data
    assert last.content[0].text == "Please be polite"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        alice.responses.cancel(made.id)
    alice.responses.delete(made.id)
    for go in (alice.responses.retrieve, alice.responses.delete, alice.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            go(made.id)


def test_another_keys_responses_do_not_exist(alice, bob):
    made = ask(alice, "Please be polite")
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(bob, "Hi", previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not(alice):
    made = ask(alice, "Please be polite", store=False)
    assert not made.store
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made.id)


def test_the_oldest_makes_room(alice):
    made = [ask(alice, "Please be polite").id for _ in range(4)]
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made[0])
    assert [alice.responses.retrieve(each).id for each in made[1:]] == made[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_too_large_says_that_it_is_not_stored(alice, monkeypatch, stream):
    monkeypatch.setattr(store_module, "MAX_BYTES", 3000)
    made = ask(alice, "Please be polite", stream=stream, metadata={"of": "x" * 3000})
    made = list(made)[-1].response if stream else made
    assert made.status == "completed" and made.store is False
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made.id)
    small = ask(alice, "Please be polite")
    assert small.store and alice.responses.retrieve(small.id).store


def test_a_response_that_runs_is_cancelled(url, alice):
    events = iter(ask(alice, "Hi", stream=True, extra_body={"ignored": 1}))
    made = next(events).response
    answers = []
    thread = threading.Thread(target=lambda: answers.append(_cancel(url, made.id)))
    thread.start()
    last = list(events)[-1]
    thread.join()
    ended = last.response.status
    assert (answers[0].status_code, ended) in ((200, "cancelled"), (400, "completed"), (200, "completed"))


def _cancel(url, response_id):
    headers = {"Authorization": f"Bearer {KEYS[0][1]}"}
    return httpx.post(f"{url}/v1/responses/{response_id}/cancel", headers=headers, timeout=60)


def test_bad_queries_of_lists(url, alice):
    made = ask(alice, "Please be polite").id
    headers = {"Authorization": f"Bearer {KEYS[0][1]}"}
    for query in ("limit=0", "limit=x", "limit=101", "order=up", "after=item_0"):
        answer = httpx.get(f"{url}/v1/responses/{made}/input_items?{query}", headers=headers)
        assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/responses/{made}?stream=true", headers=headers).status_code == 400


def test_the_store_is_bounded_in_age_and_bytes(monkeypatch):
    now = [0.0]
    store = ResponseStore(10, 60, lambda: now[0])
    store.put("a", {"id": "1"}, [], [])
    now[0] = 59.0
    store.put("a", {"id": "2"}, [], [])
    assert store.get("a", "1").response == {"id": "1"}
    now[0] = 61.0
    with pytest.raises(ApiError, match="unknown or was dropped"):
        store.get("a", "1")
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)
    assert store.put("a", {"id": "3", "text": "x" * 960}, [], [])
    with pytest.raises(ApiError):
        store.get("a", "2")
    assert not store.put("a", {"id": "4", "text": "x" * 2000}, [], [])
    with pytest.raises(ApiError):
        store.get("a", "4")
    assert store.get("a", "3") and not store.cancel("a", "3")
