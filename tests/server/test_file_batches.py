"""``/v1/files`` and ``/v1/batches`` by OpenAI's own client: answers are those of the engine, and keys see their own."""

import json
import time

import httpx
import openai
import pytest
from running_server import RunningServer

from torchax_serve import SamplingParams
from torchax_serve.server.options import ConnectionLimits

KEYS = (
    ("alice", "sk-alice-0123456789"),
    ("bob", "sk-bob-0123456789 max_concurrency=1"),
    ("eve", "sk-eve-0123456789 models=other"),
)
DONE = ("completed", "failed", "expired", "cancelled")


def line(name, /, url="/v1/completions", **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", **body}})


@pytest.fixture(scope="module")
def storage(model, tmp_path_factory):
    running = RunningServer(
        model,
        api_keys=KEYS,
        file_storage_path=tmp_path_factory.mktemp("storage") / "made",
        max_stored_files=12,
        file_storage_bytes=300_000,
        connection=ConnectionLimits(max_body_bytes=50_000, max_upload_bytes=200_000),
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def clients(storage):
    found = [
        openai.OpenAI(base_url=f"{storage.url}/v1", api_key=key.split()[0], max_retries=0, timeout=120)
        for _, key in KEYS
    ]
    yield found
    for client in found:
        client.close()


@pytest.fixture
def alice(clients):
    yield clients[0]
    for file in clients[0].files.list():
        clients[0].files.delete(file.id)


def sent(client, *lines, **fields):
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch", **fields)


def run(client, *lines, endpoint="/v1/completions", **fields):
    file = sent(client, *lines)
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)
    until = time.monotonic() + 120
    while batch.status not in DONE:
        assert time.monotonic() < until
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client, file_id):
    return {found["custom_id"]: found for found in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_answers_are_those_of_the_engine_and_errors_have_a_file_of_their_own(alice, model):
    prompts = [[10 + index, 20, 30 + index] for index in range(20)]
    options = {"max_tokens": 5, "temperature": 0.8, "return_token_ids": True}
    lines = [line(f"{i}", prompt=prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    batch = run(alice, *lines, line("wrong", prompt="x", temperature=-1), metadata={"job": "nightly"})
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"job": "nightly"}, None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (21, 20, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers = lines_of(alice, batch.output_file_id)
    assert len(answers) == 20
    usages = [answer["response"]["body"]["usage"] for answer in answers.values()]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages) == 60
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    for i, prompt in enumerate(prompts):
        (expected,) = model.generate_batch([prompt], SamplingParams(max_new_tokens=5, temperature=0.8, seed=i))
        assert answers[f"{i}"]["response"]["body"]["choices"][0]["token_ids"] == list(expected.token_ids)
        assert answers[f"{i}"]["response"]["status_code"] == 200 and answers[f"{i}"]["error"] is None
    (wrong,) = lines_of(alice, batch.error_file_id).values()
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    output = alice.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(alice.files.content(output.id).content)


def test_other_routes_than_those_of_text(alice, model):
    texts = {"a": "Once upon a time", "b": "Hi"}
    lines = [line(name, url="/tokenize", prompt=text) for name, text in texts.items()]
    batch = run(alice, *lines, endpoint="/tokenize", output_expires_after={"anchor": "created_at", "seconds": 3600})
    found = lines_of(alice, batch.output_file_id)
    assert {name: each["response"]["body"]["tokens"] for name, each in found.items()} == {
        name: model.tokenizer(text)["input_ids"] for name, text in texts.items()
    }
    output = alice.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600


def test_files_are_listed_read_and_deleted(alice):
    made = [sent(alice, f'"{index}"') for index in range(3)]
    kept = sent(alice, '"ä"', expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at == kept.created_at + 3600 and kept.filename == "in.jsonl" and kept.status == "processed"
    assert alice.files.content(kept.id).read() == '"ä"'.encode()
    ids = [each.id for each in alice.files.list(order="asc", purpose="batch")]
    assert sorted(ids) == sorted([*(each.id for each in made), kept.id])
    page = alice.files.list(limit=3, order="asc")
    assert page.has_more and [each.id for each in page.data] == ids[:3]
    assert [each.id for each in alice.files.list(after=ids[2], order="asc").data] == ids[3:]
    assert alice.files.delete(kept.id).deleted
    for go in (alice.files.retrieve, alice.files.content, alice.files.delete):
        with pytest.raises(openai.NotFoundError, match="unknown or was dropped"):
            go(kept.id)


def test_another_keys_files_and_batches_do_not_exist(alice, clients):
    batch = run(alice, line("a", prompt="x", max_tokens=1))
    _, bob, _ = clients
    assert not bob.files.list().data and not bob.batches.list().data
    for go, found in (
        (bob.files.retrieve, batch.input_file_id),
        (bob.files.content, batch.output_file_id),
        (bob.files.delete, batch.input_file_id),
        (bob.batches.retrieve, batch.id),
        (bob.batches.cancel, batch.id),
        (lambda each: bob.batches.create(input_file_id=each, endpoint="/tokenize", completion_window="1h"), batch.id),
    ):
        with pytest.raises(openai.NotFoundError, match="unknown or was dropped"):
            go(found)
    assert batch.id in [each.id for each in alice.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError, match="got one that is completed"):
        alice.batches.cancel(batch.id)


def test_a_batch_has_the_limits_of_its_key(clients):
    _, bob, eve = clients
    batch = run(bob, *(line(f"{index}", prompt="x", max_tokens=2) for index in range(8)))
    assert batch.request_counts.completed == 8  # one at a time, and those that are refused come again
    batch = run(eve, line("a", prompt="x"))
    assert batch.status == "failed" and "the model 'tiny' does not exist" in batch.errors.data[0].message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/load_lora_adapter"}, "endpoint: expected one of /v1/chat/completions,"),
        ({"endpoint": "/v1/batches"}, "endpoint: expected one of"),
        ({"completion_window": "never"}, "completion_window: expected a time such as 24h"),
        ({"completion_window": "31d"}, "completion_window: expected a time such as 24h"),
        ({"metadata": {"a": "b" * 600}}, "metadata: expected names of at most 64"),
        ({"output_expires_after": {"anchor": "now", "seconds": 1}}, "output_expires_after: expected anchor"),
        ({"input_file_id": "output"}, "expected a file with purpose batch, got batch_output"),
    ],
)
def test_batches_that_cannot_be(alice, fields, message):
    if fields.get("input_file_id") == "output":
        fields = {"input_file_id": run(alice, line("a", prompt="x", max_tokens=1)).output_file_id}
    file = sent(alice, line("a", prompt="x"))
    given = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError, match=message):
        alice.batches.create(**given)


def test_a_file_that_a_batch_reads_stays(alice, storage):
    lines = [line(f"{index}", prompt="x", max_tokens=400, ignore_eos=True) for index in range(30)]
    file = sent(alice, *lines)
    batch = alice.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        alice.files.delete(file.id)
    assert alice.batches.cancel(batch.id).status == "cancelling"
    until = time.monotonic() + 60
    while (found := alice.batches.retrieve(batch.id)).status != "cancelled":
        assert found.status == "cancelling" and time.monotonic() < until
        time.sleep(0.02)
    assert found.request_counts.completed < 30 and found.cancelled_at >= found.cancelling_at
    assert storage.pages_are_back(storage.model)
    assert alice.files.delete(file.id).deleted


def test_uploads_that_are_refused_leave_nothing(alice, storage):
    http = httpx.Client(base_url=storage.url, headers={"Authorization": f"Bearer {KEYS[0][1]}"}, timeout=60)
    content = ("in.jsonl", b"{}")

    def answer(files, **data):
        found = http.post("/v1/files", files=files, data=data)
        return found.status_code, found.json()["error"]["message"]

    with http:
        for purpose in ("assistants", "batch_output"):
            status, message = answer({"file": content}, purpose=purpose)
            assert status == 400 and message.startswith("purpose: expected 'batch', got")
        assert answer({"file": content}) == (400, "purpose: expected a value, got none")
        assert answer({"file": content}, purpose="batch", colour="red")[1].startswith("unknown field 'colour'")
        assert answer({"other": content}, purpose="batch")[0] == 400
        assert answer({"file": content, "purpose": (None, "x" * 5000)})[0] == 400
        assert answer({"file": ("a", b"x" * 210_000)}, purpose="batch")[0] == 413
        status, message = answer({"file": content}, **{"purpose": "batch", "expires_after[seconds]": "3600"})
        assert status == 400 and message.startswith("expires_after: expected anchor")
        assert http.post("/v1/files", json={}).status_code == 415
        for body in (b"--x\r\nContent-Disposition: form-data; name=", b"--y\r\n", b""):
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            assert http.post("/v1/files", content=body, headers=headers).status_code == 400
        assert http.post("/v1/batches", content=b"x" * 60_000).status_code == 413  # the limit of other bodies stays
        big = [sent(alice, "x" * 140_000) for _ in range(2)]
        status, message = answer({"file": ("a", b"x" * 140_000)}, purpose="batch")
        assert status == 400 and "expected files of at most 300000 bytes of a key, got more; delete some" in message
        for each in big:
            alice.files.delete(each.id)
        for _ in range(12):
            sent(alice, "{}")
        assert "expected at most 12 files of a key, got one more" in answer({"file": content}, purpose="batch")[1]
        for limit in ("0", "10001", "x"):
            assert http.get(f"/v1/files?limit={limit}").status_code == 400
        assert http.get("/v1/files?purpose=vision").status_code == 400
    folder = storage.options.file_storage_path / "files"
    assert not [path.name for path in folder.iterdir() if path.name.endswith((".part", ".tmp"))]


def test_without_a_folder_the_routes_name_the_option(http):
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 404
        assert "start it with --file-storage-path FOLDER" in answer.json()["error"]["message"]
