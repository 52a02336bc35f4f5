"""A server of several models, by its HTTP interface: each answers as on a server of its own."""

import concurrent.futures
import json
import random
import shutil
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder
from transformers import AutoModelForCausalLM

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.engine.engine import Engine
from torchax_serve.server.context import Stage
from torchax_serve.server.lifespan import TICK_S, Server
from torchax_serve.server.model_pool import ModelSpec
from torchax_serve.server.options import ServerOptions

ENGINE = EngineOptions(max_num_seqs=4, max_model_len=256)
BOSS, GUEST = "boss-key-0123", "guest-key-0123"
QUESTIONS = ("Hi", "What is 3 + 4?", "Name a color", "7 + 8 =")


class Several:
    """A server of several models in a thread of its own."""

    def __init__(self, paths, specs=None, **options):
        specs = specs or [
            ModelSpec(names, lambda path=path: serve(path, engine=ENGINE), str(path)) for names, path in paths.items()
        ]
        keys = (("boss", BOSS), ("guest", f"{GUEST} models=a"))
        given = {"port": 0, "warm_up": False, "max_loaded_models": 2, "api_keys": keys, **options}
        self.server = Server(ServerOptions(**given), specs)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while self.server.context.stage is not Stage.READY:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.url = self.server.addresses[0]

    def post(self, path, *, key=BOSS, **body):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=300)

    def get(self, path, *, key=BOSS):
        return httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=300)

    def chat(self, model, text, **further):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **further}
        return self.post("/v1/chat/completions", model=model, **body)

    def statuses(self):
        return {each["id"]: each["status"]["value"] for each in self.get("/v1/models").json()["data"]}

    def stop(self):
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two chat models with other weights, and an encoder of texts, each by its names."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(EMBEDDED, root / "first")
    shutil.copytree(EMBEDDED, root / "second")
    changed = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    with torch.no_grad():
        torch.manual_seed(0)
        for weight in changed.parameters():
            weight.add_(0.5 * weight.std() * torch.randn_like(weight))
    changed.save_pretrained(root / "second")
    folder(root / "words", "BertModel")
    return {("a", "first"): root / "first", ("b",): root / "second", ("w",): root / "words"}


@pytest.fixture(scope="module")
def expected(paths):
    """What each model answers alone."""
    params = SamplingParams(max_new_tokens=8, temperature=0)
    found = {}
    for (name, *_), path in paths.items():
        with serve(path, engine=ENGINE) as model:
            if name == "w":
                found[name] = model.embed(TEXTS, pooling="mean")
            else:
                found |= {(name, text): model.chat(text, params) for text in QUESTIONS}
    assert found["a", "Hi"] != found["b", "Hi"]
    return found


@pytest.fixture(scope="module")
def several(paths, tmp_path_factory):
    made = Several(paths, file_storage_path=tmp_path_factory.mktemp("storage"))
    yield made
    made.stop()


def test_models_are_loaded_by_requests_and_the_one_used_longest_ago_makes_room(several, expected):
    assert set(several.statuses().values()) == {"unloaded"}
    assert several.chat("first", "Hi").json()["choices"][0]["message"]["content"] == expected["a", "Hi"]
    assert several.chat("b", "Hi").json()["choices"][0]["message"]["content"] == expected["b", "Hi"]
    assert several.statuses() == {"a": "loaded", "first": "loaded", "b": "loaded", "w": "unloaded"}
    answer = several.post("/v1/embeddings", model="w", input=TEXTS, pooling="mean").json()
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected["w"], atol=1e-5)
    assert several.statuses() == {"a": "unloaded", "first": "unloaded", "b": "loaded", "w": "loaded"}


def test_each_of_many_requests_is_answered_by_its_own_model(several, expected):
    chooser = random.Random(0)
    asked = [(chooser.choice("abw"), chooser.choice(QUESTIONS), chooser.random() < 0.3) for _ in range(40)]

    def ask(name, text, is_streamed):
        if name == "w":
            found = several.post("/v1/embeddings", model="w", input=TEXTS, pooling="mean").json()
            return [each["embedding"] for each in found["data"]]
        answer = several.chat(name, text, stream=is_streamed)
        if not is_streamed:
            return answer.json()["choices"][0]["message"]["content"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: ask(*each), asked))
    for (name, text, _), answer in zip(asked, found, strict=True):
        if name == "w":
            np.testing.assert_allclose(answer, expected["w"], atol=1e-5)
        else:
            assert answer == expected[name, text]


def test_names_that_are_missing_unknown_or_of_another_kind(several):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = several.post("/v1/chat/completions", **body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "model: expected one of a, first, b, w, got none",
    )
    answer = several.post("/v1/chat/completions", model="x", **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = several.post("/v1/chat/completions", model="w", **body)
    assert answer.status_code == 404 and "whose tasks are embed" in answer.json()["error"]["message"]
    answer = several.post("/v1/load_lora_adapter", lora_name="x", lora_path="y")
    assert answer.status_code == 404 and "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_the_interfaces_of_anthropic_and_ollama_name_models_as_well(several, expected):
    messages = [{"role": "user", "content": "Hi"}]
    answer = several.post("/v1/messages", model="b", messages=messages, max_tokens=8, temperature=0).json()
    assert answer["content"][0]["text"] == expected["b", "Hi"]
    options = {"num_predict": 8, "temperature": 0}
    answer = several.post("/api/chat", model="a:latest", messages=messages, stream=False, options=options).json()
    assert answer["message"]["content"] == expected["a", "Hi"]
    assert {each["name"] for each in several.get("/api/tags").json()["models"]} == {"a", "first", "b", "w"}
    running = {each["name"] for each in several.get("/api/ps").json()["models"]}
    assert running == {name for name, status in several.statuses().items() if status == "loaded"}
    assert several.post("/api/show", model="b").json()["capabilities"]


def test_lines_of_a_batch_name_their_models(several, expected):
    """Two models for one at a time beside them: each line is answered by its own, and none is loaded in turns."""
    asked = [(name, text) for text in QUESTIONS for name in ("first", "b")]
    lines = [
        json.dumps(
            {
                "custom_id": f"{name} {text}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": name,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 8,
                    "temperature": 0,
                },
            }
        )
        for name, text in asked
    ]
    headers = {"Authorization": f"Bearer {BOSS}"}
    with httpx.Client(base_url=several.url, headers=headers, timeout=300) as http:
        files = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        given = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
        batch, until = http.post("/v1/batches", json=given).json(), time.monotonic() + 120
        while batch["status"] not in ("completed", "failed"):
            assert time.monotonic() < until
            time.sleep(0.05)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        content = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    found = [json.loads(line) for line in content.splitlines()]
    names = {"first": "a", "b": "b"}
    assert {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in found} == {
        f"{name} {text}": expected[names[name], text] for name, text in asked
    }
    order = [each["custom_id"].split()[0] for each in found]
    assert order == sorted(order, key=["first", "b"].index)


def test_loading_and_unloading_by_request(several):
    assert several.post("/models/load", model="a").json() == {"success": True}
    assert several.statuses()["a"] == "loaded"
    assert several.post("/models/unload", model="a").json() == {"success": True}
    assert several.statuses()["a"] == "unloaded"
    assert several.post("/models/unload", model="a").status_code == 200
    assert several.post("/models/load", model="x").status_code == 404
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert {each.status_code for each in pool.map(lambda _: several.post("/models/load", model="a"), range(4))} == {
            200
        }
    assert 'torchax_serve_num_requests_running{model_name="a"}' in several.get("/metrics").text


def test_a_key_for_some_models_sees_and_loads_those_alone(several):
    assert [each["id"] for each in several.get("/v1/models", key=GUEST).json()["data"]] == ["a"]
    assert several.chat("b", "Hi", key=GUEST).status_code == 404
    assert several.post("/models/load", key=GUEST, model="a").status_code == 403
    assert several.chat("a", "Hi", key=GUEST).status_code == 200


def test_a_model_without_files_is_told_and_the_others_answer(paths, expected, tmp_path):
    broken = shutil.copytree(EMBEDDED, tmp_path / "broken")
    for file in broken.glob("*.safetensors"):
        file.write_bytes(b"nothing")
    made = Several({("good",): paths["a", "first"], ("broken",): broken}, model_idle_timeout_s=0.5)
    try:
        answer = made.chat("broken", "Hi")
        assert answer.status_code == 503
        assert "the model broken cannot be loaded" in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text
        assert made.chat("good", "Hi").json()["choices"][0]["message"]["content"] == expected["a", "Hi"]
        until = time.monotonic() + 20
        while made.statuses()["good"] != "unloaded":
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        made.stop()


def test_the_engine_of_a_model_that_is_unloaded_is_not_taken_for_dead(paths, monkeypatch):
    close = Engine.close

    def close_slowly(engine, *given):
        close(engine, *given)
        time.sleep(3 * TICK_S)  # its thread has ended, and the server looks at its engines meanwhile

    monkeypatch.setattr(Engine, "close", close_slowly)
    made = Several({("a",): paths["a", "first"], ("b",): paths["b",]})
    try:
        for name in "ab":
            assert made.chat(name, "Hi").status_code == 200
        assert made.post("/models/unload", model="a").status_code == 200
        assert made.server.context.stage is Stage.READY
        assert made.chat("b", "Hi").status_code == 200
    finally:
        made.stop()
