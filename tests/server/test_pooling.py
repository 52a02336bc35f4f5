"""Embeddings, labels and scores: those of the model's own calls, by the clients of each dialect."""

import base64
import concurrent.futures

import httpx
import numpy as np
import openai
import pytest
import torch
from encoder_models import TEXTS, folder
from running_server import RunningServer, serving
from transformers import AutoModelForSequenceClassification


def served(tmp_path_factory, class_name, **options):
    path = tmp_path_factory.mktemp(class_name)
    folder(path, class_name, **options)
    return serving(path)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    with served(tmp_path_factory, "BertModel") as found:
        yield found


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    with served(tmp_path_factory, "BertForSequenceClassification", num_labels=1) as found:
        yield found


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    with served(tmp_path_factory, "BertForSequenceClassification", num_labels=3) as found:
        yield found


@pytest.fixture(scope="module")
def labeller(tmp_path_factory):
    with served(tmp_path_factory, "BertForTokenClassification", num_labels=3) as found:
        yield found


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def test_texts_beyond_the_limit_are_refused_by_the_name_of_their_field(embedder, ranker):
    long = "ą" * (1 << 19) + "a"
    for server, path, field, body in (
        (embedder[0], "/v1/embeddings", "input", {"input": ["a", long]}),
        (ranker[0], "/rerank", "documents", {"query": "a", "documents": ["a", long]}),
        (ranker[0], "/score", "text_2", {"text_1": long, "text_2": "a"}),
    ):
        answer = post(server, path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        assert f"at most {1 << 20} bytes in UTF-8" in answer.json()["error"]["message"]


def test_embeddings_are_those_of_the_model(embedder):
    server, model = embedder
    expected = model.embed(TEXTS, pooling="mean")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for form in ("float", "base64", None):
            options = {} if form is None else {"encoding_format": form}
            answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": "mean"}, **options)
            rows = [each.embedding for each in answer.data]
            if form == "base64":
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
            np.testing.assert_allclose(rows, expected, atol=1e-6)
        assert answer.usage.prompt_tokens == sum(len(ids) for ids in model.tokenizer(TEXTS)["input_ids"])
        one = client.embeddings.create(model="tiny", input="a dog ran", dimensions=8, extra_body={"pooling": "mean"})
        np.testing.assert_allclose(one.data[0].embedding, model.embed("a dog ran", pooling="mean")[:8], atol=1e-6)
        ids = model.tokenizer(TEXTS)["input_ids"]
        for name in ("normalize", "use_activation"):
            unit = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": "mean", name: True})
            lengths = np.linalg.norm([each.embedding for each in unit.data], axis=-1)
            np.testing.assert_allclose(lengths, 1, atol=1e-6)
        by_ids = client.embeddings.create(model="tiny", input=ids, extra_body={"pooling": "mean"})
        np.testing.assert_allclose([each.embedding for each in by_ids.data], expected, atol=1e-6)


def test_requests_at_the_same_time_share_batches(embedder):
    server, model = embedder
    texts = [f"{text} {word}" for text in TEXTS for word in ("cat", "dog", "rain", "home")] * 4
    expected = model.embed(texts, pooling="mean")

    def ask(text):
        answer = post(server, "/v1/embeddings", input=text, pooling="mean")
        return answer.json()["data"][0]["embedding"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        np.testing.assert_allclose(list(pool.map(ask, texts)), expected, atol=1e-5)


def test_a_bad_text_fails_its_own_request_alone(embedder):
    server, _ = embedder
    good, bad = {"input": "a dog ran", "pooling": "mean"}, {"input": ["a cat", " "], "pooling": "mean"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: post(server, "/v1/embeddings", **body), [good, bad] * 8))
    for index, answer in enumerate(answers):
        assert answer.status_code == (400 if index % 2 else 200)
        if index % 2:
            assert answer.json()["error"]["param"] == "input"
    for fields, param in (
        ({"pooling": "sideways"}, "pooling"),
        ({"dimensions": 10_000}, "dimensions"),
        ({"input": []}, "input"),
    ):
        answer = post(server, "/v1/embeddings", **{**good, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_documents_are_ranked(ranker):
    server, model = ranker
    query, documents = "a dog", [*TEXTS, "red rain"]
    expected = model.rerank(query, documents)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        results = post(server, path, query=query, documents=documents).json()["results"]
        assert [each["index"] for each in results] == [each.index for each in expected]
        assert [each["relevance_score"] for each in results] == pytest.approx([each.score for each in expected])
        assert results[0]["document"]["text"] == expected[0].document
    few = post(
        server,
        "/rerank",
        query=query,
        documents=[{"text": each} for each in documents],
        top_n=1,
        return_documents=False,
    )
    assert few.json()["results"] == [{"index": expected[0].index, "relevance_score": pytest.approx(expected[0].score)}]
    scores = {each.index: each.score for each in expected}
    pairs = post(server, "/v1/score", text_1=query, text_2=documents).json()["data"]
    assert [each["score"] for each in pairs] == pytest.approx([scores[index] for index in range(len(documents))])
    for first, second in (("queries", "items"), ("data_1", "data_2"), ("text_1", "documents")):
        other = post(server, "/score", **{first: query, second: documents[:2]}).json()["data"]
        assert other == post(server, "/score", text_1=query, text_2=documents[:2]).json()["data"]
    same = post(server, "/score", queries=[query, query], documents=documents[:2]).json()["data"]
    assert [each["score"] for each in same] == pytest.approx([scores[0], scores[1]])


def test_texts_are_classified(classifier):
    server, model = classifier
    data = post(server, "/classify", input=TEXTS).json()["data"]
    for entry, expected in zip(data, model.classify(TEXTS), strict=True):
        assert entry["label"] == expected.label
        assert entry["probs"] == pytest.approx(list(expected.scores.values()))


def test_tokens_are_labelled(labeller):
    server, model = labeller
    data = post(server, "/pooling", input=TEXTS).json()["data"]
    for entry, expected in zip(data, model.classify_tokens(TEXTS), strict=True):
        assert [each["label"] for each in entry["data"]] == [each.label for each in expected]


def test_endpoints_of_other_models_are_404(classifier, server):
    for path, body, kind in (
        ("/v1/chat/completions", {"messages": []}, "a model with a chat template"),
        ("/v1/embeddings", {"input": "a"}, "a model with embeddings"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "a cross-encoder"),
        ("/pooling", {"input": "a"}, "a classifier of tokens"),
    ):
        answer = post(classifier[0], path, **body)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"].startswith(f"{path}: expected {kind}")
        assert answer.json()["error"]["message"].endswith("got tiny, whose tasks are classify")
    answer = post(classifier[0], "/tokenize", messages=[{"role": "user", "content": "a"}])
    assert answer.status_code == 400 and "since tiny has no chat template" in answer.json()["error"]["message"]
    assert post(server, "/classify", input="a").status_code == 404


def test_limits_of_time_and_clients_that_go(embedder):
    """A client that goes ends its call before the next forward, and makes room for others."""
    server, model = embedder
    texts = [f"{text} {word}" for text in TEXTS for word in ("cat", "dog")] * 340
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{server.url}/v1/embeddings", json={"model": "tiny", "input": texts, "pooling": "mean"}, timeout=0.05
        )
    assert post(server, "/v1/embeddings", input="a dog", pooling="mean").status_code == 200
    impatient = RunningServer(model, request_timeout_s=1e-4)
    try:
        answer = post(impatient, "/v1/embeddings", input=texts, pooling="mean")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    finally:
        impatient.stop()
    impatient = RunningServer(model, queue_timeout_s=1e-6)
    try:
        answer = post(impatient, "/v1/embeddings", input=texts, pooling="mean")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_deadline_exceeded")
        assert answer.headers["retry-after"] == "1"
    finally:
        impatient.stop()


def test_texts_are_cut_to_a_number_of_tokens(embedder, ranker, classifier, labeller):
    text, most = "the cat sat on a dog", 5
    server, model = embedder
    ids = model.tokenizer(text)["input_ids"]
    cut = [*ids[: most - 1], ids[-1]]  # the last token ends a text
    assert len(ids) > most
    answer = post(server, "/v1/embeddings", input=[text, "a"], pooling="mean", truncate_prompt_tokens=most).json()
    expected = model.embed([cut, "a"], pooling="mean")
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == most + len(model.tokenizer("a")["input_ids"])
    server, model = classifier
    probs = post(server, "/classify", input=text, truncate_prompt_tokens=most).json()["data"][0]["probs"]
    np.testing.assert_allclose(probs, list(model.classify([cut])[0].scores.values()), atol=1e-6)
    labels = post(labeller[0], "/pooling", input=text, truncate_prompt_tokens=most).json()["data"][0]["data"]
    assert [each["token_id"] for each in labels] == cut[1:-1]
    server, model = ranker
    pair = {"text_1": "cat", "text_2": text, "truncate_prompt_tokens": most + 3}
    (score,) = post(server, "/score", **pair).json()["data"]
    pair_ids = model.tokenizer("cat", text, truncation=True, max_length=most + 3)
    eager = AutoModelForSequenceClassification.from_pretrained(model.name).eval()
    with torch.no_grad():
        logits = eager(**{name: torch.tensor([ids]) for name, ids in pair_ids.items()}).logits
    assert score["score"] == pytest.approx(float(logits.sigmoid()), abs=1e-5)


@pytest.mark.parametrize("most", [0, -2, 10**6])
def test_numbers_that_are_none_of_tokens_are_named(embedder, ranker, most):
    for server, path, body in (
        (embedder[0], "/v1/embeddings", {"input": "a", "pooling": "mean"}),
        (ranker[0], "/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = post(server, path, **body, truncate_prompt_tokens=most)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("truncate_prompt_tokens: expected -1, or 1 to ")


def test_a_text_that_is_too_long_names_the_field_that_cuts_it(embedder):
    answer = post(embedder[0], "/v1/embeddings", input="a " * 5000, pooling="mean")
    message = answer.json()["error"]["message"]
    assert message.startswith("input: expected at most ") and message.endswith("set truncate_prompt_tokens to -1")
