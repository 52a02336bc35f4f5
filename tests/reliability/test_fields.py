"""Every field of every route with values that no client should send: 4xx where they are bad, never 5xx.

By default each field gets some of the values; with TORCHAX_SERVE_ALL_VALUES=1 all of them, which takes six minutes.
"""

import json
import os

import pytest

from torchax_serve.server.audio import TranscriptionRequest
from torchax_serve.server.errors import ApiError
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
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert {name for row in rows for name in row[0].removeprefix("| ").split(", ")} == {f"`{name}`" for name in notes}
    for note in notes.values():
        assert note.text and note.effect in ("honoured", "no effect", "refused")


@pytest.mark.parametrize("kind", MODELS)
def test_refused_fields_are_refused_by_name_and_values_that_ask_for_nothing_pass(kind):
    for name, note in notes_of(kind).items():
        if note.effect != "refused":
            continue
        with pytest.raises(ApiError, match=f"{name}: expected ") as caught:
            kind.parse({name: "something"})
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")
        for value in (None, *note.harmless):
            try:
                kind.parse({name: value})
            except ApiError as error:
                assert error.code == "missing_required_parameter", (name, value)


VLLM_FIELDS = {
    ChatRequest: "thinking_token_budget watermarking truncation_side logprob_token_ids add_special_tokens "
    "media_io_kwargs mm_processor_kwargs session_id routed_experts_prompt_start return_token_offsets "
    "return_prompt_text return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs repetition_detection "
    "stream_interval include_reasoning structured_outputs bad_words priority cache_salt documents",
    CompletionRequest: "prompt_embeds add_special_tokens thinking_token_budget logprob_token_ids session_id vllm_xargs",
    EmbeddingRequest: "embed_dtype endianness use_activation padding truncation_side mm_processor_kwargs cache_salt",
    ClassifyRequest: "use_activation padding truncation_side mm_processor_kwargs cache_salt add_special_tokens",
    TokenPoolingRequest: "task dimensions use_activation embed_dtype endianness encoding_format add_special_tokens",
    RerankRequest: "use_activation truncate_prompt_tokens top_n priority request_id",
    ScoreRequest: "data_1 data_2 queries items documents text_1 text_2 use_activation",
    TokenizeRequest: "chat_template media_io_kwargs mm_processor_kwargs return_token_strs tools",
    DetokenizeRequest: "tokens",
    TranscriptionRequest: "hotwords to_language seed top_p top_k min_p repetition_penalty n use_beam_search "
    "stream_include_usage stream_continuous_usage_stats max_completion_tokens vllm_xargs length_penalty",
}
"""Fields of vLLM's interface of November 2026 that OpenAI's does not have."""


@pytest.mark.parametrize("kind", MODELS)
def test_fields_of_vllm_are_known(kind):
    assert set(VLLM_FIELDS[kind].split()) <= set(kind.model_fields)
