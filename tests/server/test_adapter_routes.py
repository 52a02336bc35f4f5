"""Adapters as models of the server: listed with their parent, named by requests, loaded by vLLM's routes."""

import json
import time

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import ENGINE, RunningServer
from safetensors.numpy import save_file

from model_adapters.errors import InvalidArgumentError
from torchax_serve import SamplingParams, serve
from torchax_serve.server.options import ServerOptions

PROMPT = "Once upon a time"
KEY = "a" * 32
LIMITED = "b" * 32


def adapter(served, folder, seed):
    """Writes an adapter of the attention of `served`, as peft does."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in served._runtimes[0].weights.items():
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            module = name.removesuffix(".weight")
            for kind, shape in (("A", (2, weight.shape[1])), ("B", (weight.shape[0], 2))):
                tensors[f"base_model.model.{module}.lora_{kind}.weight"] = rng.standard_normal(shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    with serve(engine=ENGINE, max_loras=2, lora_target_modules=["q_proj", "o_proj"]) as model:
        for seed, name in enumerate(("sql", "fr")):
            adapter(model, root / name, seed)
        model.load_adapter("sql", root / "sql")
        keys = (("boss", KEY), ("guest", f"{LIMITED} models=sql"))
        server = RunningServer(model, api_keys=keys, allow_runtime_lora_updating=True)
        yield server, model, root
        server.stop()


@pytest.fixture
def http(running):
    with httpx.Client(base_url=running[0].url, timeout=120, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running[0].url}/v1", api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


def direct(model, adapter_name):
    params = SamplingParams(max_new_tokens=8, temperature=0.0, adapter=adapter_name)
    return model.generate_batch([PROMPT], params)[0].text


def test_an_adapter_is_a_model_with_a_parent(client):
    found = {each.id: each for each in client.models.list()}
    assert list(found) == ["tiny", "sql"]
    assert (found["sql"].parent, found["sql"].root, found["tiny"].parent) == ("tiny", "sql", None)


def test_requests_name_an_adapter_as_their_model(client, running):
    model = running[1]
    wanted = {name: direct(model, None if name == "tiny" else name) for name in ("tiny", "sql")}
    assert wanted["tiny"] != wanted["sql"]
    for name, text in wanted.items():
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
        assert (answer.choices[0].text, answer.model) == (text, name)
        chat = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
        )
        params = SamplingParams(max_new_tokens=8, temperature=0.0, adapter=None if name == "tiny" else name)
        assert chat.choices[0].message.content == model.chat("Hi", params)


def test_adapters_are_loaded_and_unloaded_by_the_routes_of_vllm(http, running):
    _, model, root = running
    body = {"model": "fr", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    missing = http.post("/v1/completions", json=body)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "fr", "lora_path": str(root / "fr")})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'fr' added successfully.")
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == direct(model, "fr")
    again = http.post("/v1/load_lora_adapter", json={"lora_name": "fr", "lora_path": str(root / "fr")})
    assert again.status_code == 400 and "which is loaded" in again.json()["error"]["message"]
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'fr' removed successfully.")
    assert http.post("/v1/completions", json=body).status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "fr"}).status_code == 404


def test_a_gateway_sees_which_adapters_requests_have(http, running):
    def info():
        families = text_string_to_metric_families(http.get("/metrics").text)
        (sample,) = next(each for each in families if each.name == "torchax_serve_lora_requests_info").samples
        return sample

    assert info().labels == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    use = running[1]._adapters.use("sql")  # as a request has it until it ends
    sample = info()
    use.release()
    assert sample.labels["running_lora_adapters"] == "sql"
    assert abs(sample.value - time.time()) < 600
    assert info().labels["running_lora_adapters"] == ""


@pytest.mark.parametrize(("guest", "is_shown"), [(f"{LIMITED} models=tiny", False), (LIMITED, True)])
def test_metrics_without_a_key_name_no_adapters_next_to_limited_keys(running, guest, is_shown):
    server = RunningServer(running[1], api_keys=(("boss", KEY), ("guest", guest)), metrics_without_key=True)
    try:
        text = httpx.get(f"{server.url}/metrics").text
    finally:
        server.stop()
    assert "torchax_serve_http_in_flight" in text and ("lora_requests_info" in text) == is_shown


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "tiny", "lora_path": "x"}, "lora_name: expected another name than the model's"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "expected a folder with adapter_config.json"),
        ({"lora_name": "x"}, "lora_path: expected a value, got none"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": True}, "load_inplace: expected false"),
        ({"lora_name": "", "lora_path": "x"}, "adapter: expected a name"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(http, body, message):
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]


def test_routes_need_a_key_for_all_models(http, running):
    url = f"{running[0].url}/v1/unload_lora_adapter"
    assert httpx.post(url, json={"lora_name": "sql"}).status_code == 401
    limited = httpx.post(url, json={"lora_name": "sql"}, headers={"Authorization": f"Bearer {LIMITED}"})
    assert limited.status_code == 403
    listed = httpx.get(f"{running[0].url}/v1/models", headers={"Authorization": f"Bearer {LIMITED}"})
    assert [each["id"] for each in listed.json()["data"]] == ["sql"]


def test_other_routes_know_no_adapters(http):
    answer = http.post("/v1/embeddings", json={"model": "sql", "input": "Hi"})
    assert answer.status_code == 404


def test_a_server_without_the_option_loads_nothing(running):
    server = RunningServer(running[1])
    try:
        answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x"})
        assert answer.status_code == 404 and "--allow-runtime-lora-updating" in answer.json()["error"]["message"]
    finally:
        server.stop()


def test_an_open_address_needs_keys():
    with pytest.raises(InvalidArgumentError, match="allow_runtime_lora_updating: expected API keys"):
        ServerOptions(host="0.0.0.0", allow_runtime_lora_updating=True)
