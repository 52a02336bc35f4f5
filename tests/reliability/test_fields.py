"""Every field of every route with values that no client should send: 4xx where they are bad, never 5xx.

By default each field gets some of the values; with TORCHAX_SERVE_ALL_VALUES=1 all of them, which takes six minutes.
"""

import json
import os

import pytest

from torchax_serve.server.audio import TranscriptionRequest
from torchax_serve.server.pooling_schemas import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    TokenPoolingRequest,
)
from torchax_serve.server.request_fields import field_table, notes_of
from torchax_serve.server.schemas import ChatRequest, CompletionRequest

MODELS = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ClassifyRequest,
    TokenPoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TranscriptionRequest,
)
BASES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/chat/completions/render": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 2},
    "/v1/embeddings": {"model": "tiny", "input": "Hi", "pooling": "mean"},
    "/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/detokenize": {"model": "tiny", "tokens": [5]},
}
FIELDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# As JSON text: some are no values of Python's json.
VALUES = [
    "-1", "0", "1", "2147483648", "9223372036854775808",
    "1" + "0" * 400, "1e308", "-1e308", "1e-320", "NaN",
    "Infinity", "null", "true", '"x"', '""',
    "[]", "{}", "[-1]", "[1e9]", '["a"]', "[[]]", '{"a": 1}', '{"type": "x"}', "[null]",
    json.dumps("y" * 1_000_000), '"\\ud800"', '"\\u0000"', "[" + "0," * 99_999 + "0]",
]  # fmt: skip


@pytest.mark.parametrize("path", BASES)
def test_every_field_with_hostile_values(http, server, model, path):
    known = http.post("/v1/completions", json=BASES["/v1/completions"]).json()["choices"]
    stride = 1 if os.environ.get("TORCHAX_SERVE_ALL_VALUES") else 14
    for number, field in enumerate(FIELDS[path].model_fields):
        for value in VALUES[number % stride :: stride]:
            body = {name: json.dumps(given) for name, given in BASES[path].items()} | {field: value}
            text = "{" + ", ".join(f'"{name}": {given}' for name, given in body.items()) + "}"
            response = http.post(path, content=text, headers={"Content-Type": "application/json"})
            assert response.status_code < 500, (field, value[:40], response.text[:300])
            if response.status_code != 200 and "event-stream" not in response.headers["content-type"]:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 2000
                assert error["code"] is None or isinstance(error["code"], str)
    assert http.post("/v1/completions", json=BASES["/v1/completions"]).json()["choices"] == known
    assert server.pages_are_back(model)


@pytest.mark.parametrize("kind", MODELS)
def test_every_field_has_a_note(kind):
    notes = notes_of(kind)
    assert set(notes) == set(kind.model_fields) and kind.routes
    table = field_table(kind)
    assert all(f"| `{name}` |" in table for name in notes)
    for note in notes.values():
        assert note.text and note.effect in ("honoured", "no effect", "refused")
