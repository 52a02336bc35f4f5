"""Every field of the routes of encoders with values that no client should send, as in `test_fields`."""

import contextlib
import json
import os
from pathlib import Path

import httpx
import pytest
from encoder_models import folder, write
from running_server import serving
from test_fields import VALUES

from torchax_serve.server.pooling_schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenPoolingRequest,
)
from torchax_serve.server.retrieval_schemas import (
    CohereEmbedRequest,
    SimilarityRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiTokensRequest,
)

PAIR = {"text_1": "a cat", "text_2": "a dog"}
DOCUMENTS = {"query": "a cat", "documents": ["a dog", "a cat"]}
ROUTES = {
    "/v1/embeddings": ("BertModel", EmbeddingRequest, {"input": "a cat", "pooling": "mean"}),
    "/rerank": ("ranker", RerankRequest, DOCUMENTS),
    "/v1/rerank": ("ranker", RerankRequest, DOCUMENTS),
    "/v2/rerank": ("ranker", RerankRequest, DOCUMENTS),
    "/score": ("ranker", ScoreRequest, PAIR),
    "/v1/score": ("ranker", ScoreRequest, PAIR),
    "/classify": ("BertForSequenceClassification", ClassifyRequest, {"input": "a cat"}),
    "/pooling": ("BertForTokenClassification", TokenPoolingRequest, {"input": "a cat"}),
    "/v2/embed": ("embedder", CohereEmbedRequest, {"texts": ["a cat"]}),
    "/embed": ("embedder", TeiEmbedRequest, {"inputs": "a cat"}),
    "/embed_all": ("embedder", TeiTokensRequest, {"inputs": "a cat"}),
    "/similarity": ("embedder", SimilarityRequest, {"inputs": {"source_sentence": "a cat", "sentences": ["a dog"]}}),
    "/predict": ("ranker", TeiPredictRequest, {"inputs": "a cat"}),
}
CLASSES = {"ranker": "BertForSequenceClassification", "embedder": "BertModel"}
NUM_LABELS = {"ranker": 1, "BertForSequenceClassification": 3, "BertForTokenClassification": 3}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Starts a server of a kind of model."""
    found = {}

    def of_kind(kind):
        if kind not in found:
            path = tmp_path_factory.mktemp(kind)
            options = {"num_labels": NUM_LABELS[kind]} if kind in NUM_LABELS else {}
            folder(path, CLASSES.get(kind, kind), **options)
            if kind == "embedder":
                modules = [("", "models.Transformer"), ("1", "models.Pooling")]
                modules = [{"path": where, "type": f"sentence_transformers.{name}"} for where, name in modules]
                write(path / "modules.json", modules)
                write(path / "1" / "config.json", {"pooling_mode": "mean"})
            found[kind] = opened.enter_context(serving(path))[0]
        return found[kind]

    with contextlib.ExitStack() as opened:
        yield of_kind


def check_error(response):
    assert response.status_code < 500, response.text[:300]
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 2000
        assert error["code"] is None or isinstance(error["code"], str)


def test_errors_show_no_path(servers):
    """That of a model without a rule for its tokens names the model, and so do its routes."""
    server = servers("BertModel")
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "a cat"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pooling")
    assert "tiny has no modules.json" in answer.json()["error"]["message"]
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["root"] == Path(server.model.name).name


@pytest.mark.parametrize("path", [path for path, (_, fields, _) in ROUTES.items() if "input" in fields.model_fields])
def test_token_ids_that_the_vocabulary_has_not(servers, path):
    kind, _, base = ROUTES[path]
    for wrong in (-1, 25, 2**31, 2**40, 2**63):
        answer = httpx.post(f"{servers(kind).url}{path}", json={"model": "tiny", **base, "input": [[5], [5, wrong]]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input")
        assert error["message"].startswith(f"input: expected token ids from 0 to 24, got {wrong}; ")


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_with_hostile_values(servers, path):
    kind, fields, base = ROUTES[path]
    stride = 1 if os.environ.get("TORCHAX_SERVE_ALL_VALUES") else 7
    with httpx.Client(base_url=servers(kind).url, timeout=60) as http:
        known = http.post(path, json={"model": "tiny", **base})
        assert known.status_code == 200, known.text
        for number, field in enumerate(fields.model_fields):
            for value in VALUES[number % stride :: stride]:
                body = {name: json.dumps(given) for name, given in {"model": "tiny", **base}.items()} | {field: value}
                text = "{" + ", ".join(f'"{name}": {given}' for name, given in body.items()) + "}"
                check_error(http.post(path, content=text, headers={"Content-Type": "application/json"}))
        again, known = http.post(path, json={"model": "tiny", **base}).json(), known.json()
        if isinstance(known, dict):
            again, known = ({**each, "id": 0, "created": 0} for each in (again, known))
        assert again == known
