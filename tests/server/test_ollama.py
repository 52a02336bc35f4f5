"""Ollama's interface by Ollama's own client, with a model that says the lines of a script."""

import contextlib
import json
import threading
import time

import httpx
import hub_lookalike
import numpy as np
import ollama
import pytest
from encoder_models import TEXTS, folder
from huggingface_hub import constants
from running_server import serving
from scripted_model import write_scripted_model
from scripted_server import SCRIPT, scripted_server
from typer.testing import CliRunner

from torchax_serve import EngineOptions
from torchax_serve.cli.main import app
from torchax_serve.executors.speculation.loaded_draft import LoadedDraft
from torchax_serve.scheduler.speculative_config import SpeculativeConfig
from torchax_serve.server.ollama import downloads

KEY = "secret-of-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
THOUGHT = "Two and two are four."
SCHEMA = {
    "type": "object",
    "properties": {"is_four": {"const": True}},
    "required": ["is_four"],
    "additionalProperties": False,
}
READ = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Reads a file.",
        "parameters": {
            "type": "object",
            "properties": {"file_path": {"type": "string", "description": "Its path."}},
            "required": ["file_path"],
        },
    },
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    model = {"continued": [("</think>", "\n\nFour.")]}
    path = tmp_path_factory.mktemp("ollama")
    with scripted_server(path, model=model, api_keys=(("me", KEY),)) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted):
    with client_of(scripted, headers=HEADERS) as found:
        yield found


def client_of(server, **options):
    return contextlib.closing(ollama.Client(host=server.url, timeout=120, **options))


def user(text):
    return [{"role": "user", "content": text}]


def spelled(parts):
    """The message that the parts of a stream spell, and the last part."""
    parts = list(parts)
    found = {"content": "", "thinking": "", "tool_calls": []}
    for part in parts:
        found["content"] += part.message.content or ""
        found["thinking"] += part.message.thinking or ""
        found["tool_calls"] += part.message.tool_calls or []
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    return found, parts[-1]


def shown(message):
    return {"content": message.content, "thinking": message.thinking or "", "tool_calls": message.tool_calls or []}


@pytest.mark.parametrize("question", ["Please be polite", "Please think first", "What does note.txt say?"])
def test_streams_spell_the_complete_answer(client, question):
    fields = {"model": "scripted", "messages": user(question), "tools": [READ], "options": {"num_predict": 100}}
    complete = client.chat(**fields)
    found, last = spelled(client.chat(**fields, stream=True))
    assert found == shown(complete.message)
    assert (complete.done_reason, complete.done) == (last.done_reason, last.done) == ("stop", True)
    for each in (complete, last):
        assert each.eval_count > 3 and each.prompt_eval_count > 5 and each.model == "scripted"
        assert each.total_duration >= each.eval_duration > 0


def test_a_turn_with_a_tool(client):
    messages = user("What does note.txt say?")
    first = client.chat(model="scripted:latest", messages=messages, tools=[READ])
    (call,) = first.message.tool_calls
    assert (first.message.content, call.function.name) == ("Let me look.", "Read")
    assert call.function.arguments == {"file_path": "/tmp/note.txt"}
    messages += [first.message, {"role": "tool", "tool_name": "Read", "content": "hello, world of notes"}]
    assert client.chat(model="scripted", messages=messages, tools=[READ]).message.content == SCRIPT[" world of notes"]


def test_reasoning_stands_apart(client):
    found = client.chat(model="scripted", messages=user("Please think first"), think=True)
    assert (found.message.thinking, found.message.content) == (THOUGHT, "Four.")
    off = client.chat(model="scripted", messages=user("Please think first"), think=False)
    assert (off.message.thinking, off.message.content) == (THOUGHT, "Four.")  # its template has a switch of its own
    found = client.generate(model="scripted", prompt="Please think first")
    assert (found.thinking, found.response) == (THOUGHT, "Four.")


def test_options_bound_and_end_answers(client):
    found = client.generate(model="scripted", prompt="Please be polite", options={"num_predict": 2})
    assert (found.done_reason, found.eval_count) == ("length", 2)
    found = client.generate(model="scripted", prompt="Please be polite", options={"stop": ["STOP"], "num_ctx": 4096})
    assert (found.done_reason, found.response) == ("stop", "One ")
    pieces = client.generate(model="scripted", prompt="Please be polite", system="Be kind.", stream=True)
    assert "".join(piece.response for piece in pieces) == "One STOP Two."
    fields = {"options": {"temperature": 1.5, "seed": 3, "top_k": 50, "num_predict": 5}, "format": ""}
    assert len({client.generate(model="scripted", prompt="Hi", **fields).response for _ in range(3)}) == 1


def test_formats_hold_the_answer(client):
    for stream in (False, True):
        found = client.chat(model="scripted", messages=user("Is it four?"), format=SCHEMA, stream=stream)
        text = spelled(found)[0]["content"] if stream else found.message.content
        assert json.loads(text) == {"is_four": True}
    found = client.generate(model="scripted", prompt="Any", format="json", options={"num_predict": 12})
    assert found.response.startswith("{")


def test_raw_prompts_are_continued(client):
    prompt = "Please be polite<end_of_turn>\n<start_of_turn>model\n"
    assert client.generate(model="scripted", prompt=prompt, raw=True).response == "One STOP Two."


def test_log_probabilities(client):
    found = client.chat(model="scripted", messages=user("Please be polite"), logprobs=True, top_logprobs=2)
    assert len(found.logprobs) == found.eval_count and len(found.logprobs[0].top_logprobs) == 2
    best = [entry for entry in found.logprobs if entry.token != "<end_of_turn>"]
    assert "".join(entry.token for entry in best).lstrip() == "One STOP Two."


def test_a_request_without_a_message_loads(client):
    assert client.generate(model="scripted").done_reason == "load"
    assert client.chat(model="scripted", messages=[]).done_reason == "load"


def test_what_is_known_of_the_model(client, scripted):
    (listed,) = client.list().models
    assert listed.model == "scripted" and listed.details.family == "llama" and listed.size > 1 << 16
    (running,) = client.ps().models
    assert (running.model, running.size, running.context_length) == ("scripted", listed.size, 2048)
    assert running.expires_at.year > 2100
    found = client.show("scripted")
    assert set(found.capabilities) >= {"completion", "tools", "thinking"} and "vision" not in found.capabilities
    assert found.modelinfo["general.architecture"] == "llama" and found.modelinfo["llama.block_count"] == 1
    module = scripted.model.torch_model
    tensors = [*module.parameters(), *module.buffers()]
    assert found.modelinfo["general.parameter_count"] == sum(each.numel() for each in tensors)
    assert "start_of_turn" in found.template
    version = httpx.get(f"{scripted.url}/api/version", headers=HEADERS).json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "the model 'other' does not exist"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat: expected 0, which switches it off, got 2"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, 400, "options.repeat_last_n: expected -1"),
        ({"options": {"temperature": -1.0}}, 400, "options.temperature: expected a number >= 0"),
        ({"options": {"repeat_penalty": -1.0}}, 400, "options.repeat_penalty: expected "),
        ({"options": {"presence_penalty": 9.0}}, 400, "options.presence_penalty: expected "),
        ({"suffix": "end"}, 400, "has no tokens to fill in the middle"),
        ({"format": "yaml"}, 400, "format: expected "),
        ({"prompt": "Hi " * 5000}, 400, "maximum context length"),
        ({"images": ["aGk="]}, 400, "expected an image as PNG"),
    ],
)
def test_errors_have_ollamas_form(scripted, client, fields, status, message):
    body = {"model": "scripted", "prompt": "Hi", **fields}
    answer = httpx.post(f"{scripted.url}/api/generate", json=body, headers=HEADERS)
    assert answer.status_code == status and set(answer.json()) == {"error"} and message in answer.json()["error"]


def test_clients_read_errors(scripted, client):
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat(model="other", messages=user("Hi"), stream=False)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        list(client.chat(model="other", messages=user("Hi"), stream=True))
    with (
        client_of(scripted) as other,
        pytest.raises(ollama.ResponseError) as caught,
    ):
        other.chat(model="scripted", messages=user("Hi"))
    assert caught.value.status_code == 401
    for path in ("embeddings", "create", "copy", "push"):
        answer = httpx.post(f"{scripted.url}/api/{path}", json={}, headers=HEADERS)
        assert answer.status_code == 404 and "is not supported" in answer.json()["error"]


def test_streams_are_lines_of_json_and_count_for_metrics_and_keys(scripted):
    body = {"model": "scripted", "messages": user("Please be polite")}
    with httpx.stream("POST", f"{scripted.url}/api/chat", json=body, headers=HEADERS, timeout=60) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["done"] for line in lines][-1] and len(lines) > 2
    text = httpx.get(f"{scripted.url}/metrics", headers=HEADERS).text
    assert 'route="/api/chat"' in text


def test_embeddings_have_length_1(tmp_path):
    folder(tmp_path, "BertModel")
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "path": "pool", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with (
        serving(tmp_path) as (server, model),
        client_of(server) as client,
    ):
        found = client.embed(model="tiny", input=list(TEXTS))
        expected = model.embed(list(TEXTS), normalize=True)
        np.testing.assert_allclose(found.embeddings, expected, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(found.embeddings, axis=1), 1, atol=1e-5)
        assert found.prompt_eval_count > len(TEXTS)
        (one,) = client.embed(model="tiny", input=TEXTS[0], dimensions=4).embeddings
        assert len(one) == 4
        with pytest.raises(ollama.ResponseError, match="expected a model with a chat template"):
            client.chat(model="tiny", messages=user("Hi"))
        assert client.show("tiny").capabilities == ["embedding"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_lookalike.serving() as found:
        hub_lookalike.point_at(monkeypatch, found.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        repository = tmp_path / "repository"
        write_scripted_model(repository, {"": "Hello."})
        found.repositories["people/tiny"] = hub_lookalike.Repository(repository)
        yield found


def test_models_are_pulled_and_deleted(hub, model, start_server, tmp_path):
    with client_of(start_server(allow_model_downloads=True)) as client:
        lines = list(client.pull("people/tiny", stream=True))
        assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
        counts = [(each.completed, each.total) for each in lines if each.total]
        assert counts[-1][0] == counts[-1][1] == max(total for _, total in counts)
        folder = tmp_path / "cache" / "models--people--tiny"
        assert list(folder.rglob("model.safetensors")) and client.pull("people/tiny").status == "success"
        assert client.pull("tiny:latest").status == "success"  # the served model's own name
        assert client.delete("people/tiny").status == "success" and not folder.exists()
        for call in (lambda: client.delete("people/tiny"), lambda: client.pull("people/other", stream=False)):
            with pytest.raises(ollama.ResponseError) as caught:
                call()
            assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="people/other"):
            list(client.pull("people/other", stream=True))
        with pytest.raises(ollama.ResponseError, match="expected a model that is not served"):
            client.delete("tiny")
        with pytest.raises(ollama.ResponseError, match="expected a short name or a hub id"):
            client.pull(str(tmp_path))


def test_a_tag_names_one_file_and_deletes_nothing(hub, start_server, tmp_path):
    repository = tmp_path / "gguf"
    repository.mkdir()
    for kind in ("Q8_0", "Q4_K_M"):
        (repository / f"tiny-{kind}.gguf").write_bytes(b"GGUF")
    hub.repositories["people/tiny-GGUF"] = hub_lookalike.Repository(repository)
    with client_of(start_server(allow_model_downloads=True)) as client:
        assert client.pull("people/tiny-GGUF:Q4_K_M").status == "success"
        assert [name for name in hub.fetched() if name.endswith(".gguf")] == ["tiny-Q4_K_M.gguf"]
        with pytest.raises(ollama.ResponseError, match="Q2_K") as caught:
            client.pull("people/tiny-GGUF:Q2_K")
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="leave the tag out") as caught:
            client.delete("people/tiny-GGUF:Q4_K_M")
        assert caught.value.status_code == 400
        assert client.delete("people/tiny-GGUF:latest").status == "success"


@pytest.mark.parametrize("name", ["TINY", "tiny:latest", "People/Served", "people/DRAFT"])
def test_what_is_in_use_is_not_deleted(start_server, monkeypatch, name):
    server = start_server(allow_model_downloads=True)
    model, draft = server.context.service().model, LoadedDraft("people/draft", [])
    config = SpeculativeConfig(method="draft_model", model=draft)
    monkeypatch.setattr(model, "_engine_options", EngineOptions(speculative=config))
    monkeypatch.setattr(model, "name", "people/served")
    with client_of(server) as client, pytest.raises(ollama.ResponseError, match="is not served") as caught:
        client.delete(name)
    assert caught.value.status_code == 409


def test_downloads_are_bounded(start_server, monkeypatch):
    server, ends = start_server(allow_model_downloads=True), threading.Event()
    monkeypatch.setattr(downloads, "resolve", lambda *_args, **_options: ends.wait(60))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(downloads.MAX_PULLS):
                client = stack.enter_context(client_of(server))
                stream = client.pull("people/tiny", stream=True)
                assert next(stream).status == "pulling manifest"
                stack.callback(stream.close)
            until = time.monotonic() + 30
            while len(downloads._running) < downloads.MAX_PULLS and time.monotonic() < until:
                time.sleep(0.01)
            with pytest.raises(ollama.ResponseError, match="expected at most 2 downloads") as caught:
                client.pull("people/tiny")
            assert caught.value.status_code == 429
            ends.set()
            while downloads._running and time.monotonic() < until:
                time.sleep(0.01)
            assert client.pull("people/tiny").status == "success"
    finally:
        ends.set()


def test_unknown_fields_are_noted(scripted, monkeypatch):
    noted = []
    monkeypatch.setattr("torchax_serve.server.dialect_requests.note_once", noted.append)
    answer = httpx.post(f"{scripted.url}/api/show", json={"model": "scripted", "new_field": 1}, headers=HEADERS)
    assert answer.status_code == 200 and noted == ["/api/show: the field 'new_field' is unknown and has no effect"]


def test_without_the_option_nothing_is_downloaded(hub, server):
    with client_of(server) as client:
        for call in (client.pull, client.delete):
            with pytest.raises(ollama.ResponseError, match="without --allow-model-downloads") as caught:
                call("people/tiny")
            assert caught.value.status_code == 403
    assert hub.requests == []


def test_ps_shows_what_a_server_has_loaded(server, scripted):
    found = CliRunner().invoke(app, ["ps", "--url", server.url, "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["models"][0]["name"] == "tiny"
    found = CliRunner().invoke(app, ["ps", "--url", scripted.url, "--api-key", KEY])
    assert found.exit_code == 0 and "scripted" in found.stdout and "2048" in found.stdout
    for arguments, message in {
        ("--url", scripted.url): "got status 401; give --api-key",
        ("--url", "http://127.0.0.1:1"): "expected a server at http://127.0.0.1:1, got none",
        ("--url", "here"): "expected http://HOST:PORT, got 'here'",
    }.items():
        found = CliRunner().invoke(app, ["ps", *arguments])
        assert found.exit_code == 2 and message in found.stderr
