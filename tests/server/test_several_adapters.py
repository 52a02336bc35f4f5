"""Adapters of a server of several models: named by requests, bound to their model, and kept while it is unloaded."""

import httpx
import pytest
from running_server import ENGINE
from test_adapter_routes import adapter
from test_several_models import GUEST, Several

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve
from torchax_serve.server.model_pool import ModelSpec

PROMPT = "Once upon a time"
ROOM = {"max_loras": 2, "lora_target_modules": ["q_proj", "o_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapters, and the text that the model writes with each, served alone."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    params = {"max_new_tokens": 8, "temperature": 0}
    with serve(engine=ENGINE, **ROOM) as model:
        for seed, name in enumerate(("sql", "fr")):
            adapter(model, root / name, seed)
            model.load_adapter(name, root / name)
            (found[name],) = model.generate_batch([PROMPT], SamplingParams(adapter=name, **params))
        (found[None],) = model.generate_batch([PROMPT], SamplingParams(**params))
    texts = {name: each.text for name, each in found.items()}
    assert len(set(texts.values())) == 3
    return root, texts


@pytest.fixture(scope="module")
def several(folders):
    root, _ = folders

    def spec(name, adapters):
        kwargs = {"adapters": dict(adapters), **ROOM} if adapters else {}
        return ModelSpec((name,), lambda: serve(EMBEDDED, engine=ENGINE, **kwargs), str(EMBEDDED), adapters=adapters)

    made = Several({}, allow_runtime_lora_updating=True, max_loaded_models=1, specs=[
        spec("a", {"sql": str(root / "sql")}), spec("b", {"other": str(root / "fr")}), spec("bare", {})
    ])  # fmt: skip
    yield made
    made.stop()


def write(several, name):
    answer = several.post("/v1/completions", model=name, prompt=PROMPT, max_tokens=8, temperature=0)
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code


def parents(several, **key):
    return {each["id"]: each["parent"] for each in several.get("/v1/models", **key).json()["data"]}


def test_a_request_for_an_adapter_loads_its_model(several, folders):
    _, texts = folders
    assert parents(several) == {"a": None, "sql": "a", "b": None, "other": "b", "bare": None}
    assert set(several.statuses().values()) == {"unloaded"}
    assert write(several, "sql") == texts["sql"]
    assert several.statuses() == {
        "a": "loaded",
        "sql": "loaded",
        "b": "unloaded",
        "other": "unloaded",
        "bare": "unloaded",
    }
    assert write(several, "a") == texts[None]
    assert write(several, "other") == texts["fr"]
    assert write(several, "nobody") == 404
    assert parents(several) == {"a": None, "sql": "a", "b": None, "other": "b", "bare": None}
    assert parents(several, key=GUEST) == {"a": None}
    assert several.post("/v1/completions", key=GUEST, model="sql", prompt=PROMPT).status_code == 404


def test_adapters_that_requests_change_stay_so_when_the_model_comes_again(several, folders):
    root, texts = folders
    body = {"lora_name": "fr", "lora_path": str(root / "fr"), "base_model_name": "a"}
    assert several.post("/v1/load_lora_adapter", **body).status_code == 200
    assert write(several, "fr") == texts["fr"] and parents(several)["fr"] == "a"
    assert several.post("/v1/unload_lora_adapter", lora_name="sql").status_code == 200
    assert write(several, "sql") == 404
    assert write(several, "b") == texts[None]  # a is unloaded
    assert several.statuses()["fr"] == "unloaded" and "sql" not in parents(several)
    assert write(several, "fr") == texts["fr"] and write(several, "sql") == 404
    assert write(several, "b") == texts[None]
    assert several.post("/v1/unload_lora_adapter", lora_name="fr").status_code == 200  # while it is not loaded
    assert several.statuses()["a"] == "unloaded" and write(several, "fr") == 404 and write(several, "a") == texts[None]
    again = {**body, "lora_name": "sql", "lora_path": str(root / "sql")}
    assert several.post("/v1/load_lora_adapter", **again).status_code == 200
    assert write(several, "sql") == texts["sql"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x"}, 400, "base_model_name: expected one of a, b, bare, got none"),
        ({"lora_name": "x", "base_model_name": "sql"}, 404, "the model 'sql' does not exist"),
        ({"lora_name": "b", "base_model_name": "a"}, 400, "lora_name: expected another name than the model's"),
        ({"lora_name": "other", "base_model_name": "a"}, 400, "lora_name: expected another name"),
        ({"lora_name": "x", "base_model_name": "bare"}, 400, "max_loras"),
        ({"lora_name": "x", "base_model_name": "a", "lora_path": "/nowhere"}, 400, "expected"),
    ],
)
def test_adapters_that_cannot_be_loaded(several, folders, body, status, message):
    given = {"lora_path": str(folders[0] / "fr"), **body}
    answer = several.post("/v1/load_lora_adapter", **given)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert "x" not in parents(several)


def test_adapters_are_loaded_with_a_key_for_all_models(several, folders):
    body = {"lora_name": "x", "lora_path": str(folders[0] / "fr"), "base_model_name": "a"}
    assert several.post("/v1/load_lora_adapter", key=GUEST, **body).status_code == 403
    assert several.post("/v1/unload_lora_adapter", lora_name="nobody").status_code == 404
    assert httpx.post(f"{several.url}/v1/load_lora_adapter", json=body).status_code == 401
