"""Routes of Cohere and text-embeddings-inference: the numbers of the model's own calls, in their forms."""

import base64

import httpx
import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, write
from running_server import serving
from safetensors.torch import save_file

from torchax_serve.server.retrieval_schemas import CohereEmbedRequest

BASE = "sentence_transformers."


def with_modules(path, *kinds, **settings):
    modules = [{"path": "" if not i else f"{i}", "type": f"{BASE}{kind}"} for i, kind in enumerate(kinds)]
    write(path / "modules.json", modules)
    write(path / "config_sentence_transformers.json", settings)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    folder(path, "BertModel")
    prompts = {"query": "red ", "document": "blue ", "clustering": "big "}
    with_modules(path, "models.Transformer", "models.Pooling", prompts=prompts)
    write(path / "1" / "config.json", {"pooling_mode": "mean"})
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse")
    folder(path, "BertForMaskedLM")
    with_modules(path, "models.Transformer", "sparse_encoder.models.SpladePooling")
    write(path / "1" / "config.json", {})
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def colbert(tmp_path_factory):
    path = tmp_path_factory.mktemp("colbert")
    folder(path, "BertModel")
    with_modules(path, "models.Transformer", "models.Dense", "multi_vector_encoder.modules.MultiVectorMask")
    sizes = {"in_features": 32, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"}
    write(path / "1" / "config.json", sizes)
    torch.manual_seed(0)
    save_file({"linear.weight": torch.randn(16, 32)}, path / "1" / "model.safetensors")
    write(path / "2" / "config.json", {"skiplist_words": ["the"]})
    write(path / "sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 9}})
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranker")
    folder(path, "BertForSequenceClassification", num_labels=1)
    with serving(path) as found:
        yield found


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def check_refused(answer, param):
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_cohere_embeds_by_type(dense):
    server, model = dense
    rows = model.embed(TEXTS, prompt_name="document")
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "tiny", "texts": TEXTS, "input_type": "search_document", "embedding_types": kinds}
    answer = post(server, "/v2/embed", **body).json()
    found = answer["embeddings"]
    assert list(found) == kinds and answer["texts"] == TEXTS
    np.testing.assert_allclose(found["float"], rows, atol=1e-5)
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(x), "<f4") for x in found["base64"]], rows, atol=1e-5)
    scales = np.abs(rows).max(1, keepdims=True) / 127
    np.testing.assert_allclose(np.array(found["int8"]) * scales, rows, atol=float(scales.max()) * 0.51)
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
    bits = np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1)
    np.testing.assert_array_equal(bits, rows > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    assert answer["meta"]["tokens"]["input_tokens"] == sum(map(len, model.tokenizer(TEXTS)["input_ids"]))


def test_cohere_chooses_prompts_sizes_and_lengths(dense):
    server, model = dense
    for given, prompt in (("search_query", "query"), ("clustering", "clustering"), ("classification", None)):
        found = post(server, "/v2/embed", texts=TEXTS, input_type=given, output_dimension=8).json()
        expected = model.embed(TEXTS, prompt_name=prompt)[:, :8]
        np.testing.assert_allclose(found["embeddings"]["float"], expected, atol=1e-5)
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    short = post(server, "/v2/embed", inputs=parts, max_tokens=5).json()["embeddings"]["float"]
    np.testing.assert_allclose(short, model.embed(TEXTS, truncate=5), atol=1e-5)
    image = "data:image/png;base64,AAAA"
    for body, param in (
        ({"texts": TEXTS, "images": [image]}, "texts"),
        ({"images": [image]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": image}}]}, *parts]}, "inputs"),
        ({"texts": ["a " * 100], "truncate": "NONE"}, "texts"),
        ({"texts": TEXTS, "truncate": "START"}, "truncate"),
        ({"texts": TEXTS, "max_tokens": 4, "truncate": "NONE"}, "max_tokens"),
        ({"texts": TEXTS, "output_dimension": 99}, "output_dimension"),
        ({"texts": TEXTS, "output_dimension": 9, "embedding_types": ["binary"]}, "embedding_types"),
        ({"texts": []}, "texts"),
    ):
        check_refused(post(server, "/v2/embed", **body), param)


def test_the_fields_are_those_of_cohere():
    known = "model texts images inputs input_type max_tokens output_dimension embedding_types truncate priority"
    assert set(CohereEmbedRequest.model_fields) == set(known.split())


def test_tei_embeds_and_compares(dense):
    server, model = dense
    rows = model.embed(TEXTS, normalize=True)
    np.testing.assert_allclose(post(server, "/embed", inputs=TEXTS).json(), rows, atol=1e-5)
    one = post(server, "/embed", inputs="a dog ran", normalize=False, dimensions=8, prompt_name="query").json()
    np.testing.assert_allclose(one, model.embed(["a dog ran"], prompt_name="query")[:, :8], atol=1e-5)
    compared = post(server, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}).json()
    np.testing.assert_allclose(compared, rows[1:] @ rows[0], atol=1e-5)
    tokens = post(server, "/embed_all", inputs=TEXTS[:2]).json()
    for found, expected in zip(tokens, model.embed_tokens(TEXTS[:2]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    check_refused(post(server, "/embed", inputs=["a " * 100], truncate=False), "inputs")
    check_refused(post(server, "/embed", inputs=TEXTS, prompt_name="nobody"), "prompt_name")
    check_refused(post(server, "/embed_sparse", inputs=TEXTS), "inputs")
    check_refused(post(server, "/embed", inputs=TEXTS, truncation_direction="Left"), "truncation_direction")
    empty = {"source_sentence": "a", "sentences": []}
    check_refused(post(server, "/similarity", inputs=empty), "inputs.sentences")
    about = httpx.get(f"{server.url}/info").json()
    assert about["model_type"] == {"embedding": {}} and about["max_input_length"] == 64


def test_a_bi_encoder_ranks_and_scores(dense):
    server, model = dense
    expected = model.score_pairs([("a dog", text) for text in TEXTS])
    data = post(server, "/score", text_1="a dog", text_2=TEXTS).json()["data"]
    assert [each["score"] for each in data] == pytest.approx(expected.tolist(), abs=1e-5)
    first = post(server, "/rerank", query="a dog", documents=TEXTS, top_n=1).json()["results"][0]
    assert first["index"] == int(expected.argmax())
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["tasks"] == ["embed", "rank"]


def test_sparse_embeddings(sparse):
    server, model = sparse
    rows = post(server, "/embed_sparse", inputs=TEXTS).json()
    for found, expected in zip(rows, model.embed_sparse(TEXTS), strict=True):
        assert [each["index"] for each in found] == expected.indices.tolist()
        assert [each["value"] for each in found] == pytest.approx(expected.values.tolist(), abs=1e-5)
    check_refused(post(server, "/embed_all", inputs=TEXTS), "inputs")
    data = post(server, "/v1/embeddings", input=TEXTS).json()["data"]  # as vLLM: with the zeros
    np.testing.assert_allclose([each["embedding"] for each in data], model.embed(TEXTS), atol=1e-5)


def test_pooling_has_embeddings_of_tokens_and_of_texts(colbert, dense):
    server, model = colbert
    for body, expected in (
        ({}, model.embed_tokens(TEXTS)),
        ({"task": "token_embed", "input_type": "query"}, model.embed_tokens(TEXTS, task="query")),
        ({"use_activation": True}, model.embed_tokens(TEXTS, normalize=True)),
    ):
        data = post(server, "/pooling", input=TEXTS, **body).json()["data"]
        for found, wanted in zip(data, expected, strict=True):
            np.testing.assert_allclose(found["data"], wanted, atol=1e-5)
    scores = post(server, "/score", text_1="a dog", text_2=TEXTS).json()["data"]
    expected = model.score_pairs([("a dog", text) for text in TEXTS])
    assert [each["score"] for each in scores] == pytest.approx(expected.tolist(), rel=1e-5)
    check_refused(post(server, "/pooling", input=TEXTS, dimensions=4), "dimensions")
    check_refused(post(server, "/pooling", input=TEXTS, task="embed"), "task")
    check_refused(post(server, "/pooling", messages=[{"role": "user", "content": "a"}]), "messages")
    data = post(server, "/v1/embeddings", input=TEXTS, input_type="query").json()["data"]
    for found, wanted in zip(data, model.embed_tokens(TEXTS, task="query"), strict=True):
        np.testing.assert_allclose(found["embedding"], wanted, atol=1e-5)
    check_refused(post(server, "/v1/embeddings", input=TEXTS, dimensions=4), "dimensions")
    assert post(server, "/pooling", input=TEXTS, task="token_classify").status_code == 404
    server, model = dense
    data = post(server, "/pooling", input=TEXTS, task="embed", dimensions=8).json()["data"]
    np.testing.assert_allclose([each["data"] for each in data], model.embed(TEXTS)[:, :8], atol=1e-5)
    check_refused(post(server, "/pooling", input=TEXTS, task="embed", input_type="query"), "input_type")
    check_refused(post(server, "/v1/embeddings", input=TEXTS, input_type="query"), "input_type")


def test_tei_ranks_and_predicts(ranker):
    server, model = ranker
    expected = model.rerank("a dog", TEXTS)
    found = post(server, "/rerank", query="a dog", texts=TEXTS, return_text=True, truncate=True).json()
    assert [(each["index"], each["text"]) for each in found] == [(each.index, each.document) for each in expected]
    assert [each["score"] for each in found] == pytest.approx([each.score for each in expected], abs=1e-5)
    pairs = post(server, "/predict", inputs=[["a dog", text] for text in TEXTS]).json()
    scores = model.score_pairs([("a dog", text) for text in TEXTS])
    assert [row[0]["score"] for row in pairs] == pytest.approx(scores.tolist(), abs=1e-5)
    one = post(server, "/predict", inputs="a dog ran").json()
    label = model.classify("a dog ran")
    assert one == [{"label": label.label, "score": pytest.approx(label.score, abs=1e-5)}]
    assert post(server, "/predict", inputs=[["a dog ran"]]).json() == [one]
    for body, param in (
        ({"query": "a", "texts": TEXTS, "documents": TEXTS}, "documents"),
        ({"query": "a", "texts": TEXTS, "top_n": 1}, "top_n"),
        ({"query": "a", "documents": TEXTS, "return_text": True}, "return_text"),
        ({"query": "a", "texts": TEXTS, "raw_scores": True}, "raw_scores"),
    ):
        check_refused(post(server, "/rerank", **body), param)
    check_refused(post(server, "/predict", inputs=[["a"], ["a", "b"]]), "inputs")
    assert httpx.get(f"{server.url}/info").json()["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}
