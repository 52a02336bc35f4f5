"""Vectors and scores of pages and queries over HTTP: those of the library's processor and PyTorch."""

import base64
import io

import httpx
import numpy as np
import openai
import pytest
import torch
from page_models import expected_vectors, saved
from PIL import Image
from running_server import serving

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

PAGES = [Image.new("RGB", (40, 30), color) for color in ("red", "white")]


def url_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def part(image):
    return {"type": "image_url", "image_url": {"url": url_of(image)}}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A server of ColPali, and the vectors and scores that its processor and PyTorch give."""
    path = tmp_path_factory.mktemp("colpali")
    eager, processor = saved(path, "colpali")
    rows = [expected_vectors(eager, processor, images=[page]) for page in PAGES]
    query = expected_vectors(eager, processor, text=["red cat"])
    scores = processor().score_retrieval([torch.tensor(query)], [torch.tensor(row) for row in rows])[0].numpy()
    with serving(path) as (server, _):
        yield server, rows, query, scores


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def test_vectors_of_pages_and_queries(pages):
    server, rows, query, _ = pages
    answer = post(server, "/pooling", input=["red cat", part(PAGES[0]), {"image": url_of(PAGES[1])}]).json()
    for found, expected in zip(answer["data"], (query, *rows), strict=True):
        np.testing.assert_allclose(found["data"], expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, (query, *rows)))
    for content, expected in ((part(PAGES[0]), rows[0]), ({"type": "text", "text": "red cat"}, query)):
        answer = post(server, "/pooling", messages=[{"role": "user", "content": [content]}]).json()
        np.testing.assert_allclose(answer["data"][0]["data"], expected, atol=1e-5)
    messages = [[{"role": "user", "content": [part(page)]}] for page in PAGES]
    answer = post(server, "/v1/embeddings", messages=messages, encoding_format="float").json()
    for found, expected in zip(answer["data"], rows, strict=True):
        np.testing.assert_allclose(found["embedding"], expected, atol=1e-5)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input="red cat", extra_body={"input_type": "query"})
    found = [np.frombuffer(base64.b64decode(each), "<f4") for each in answer.data[0].embedding]
    np.testing.assert_allclose(found, query, atol=1e-5)
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["tasks"] == ["token_embed", "rank"]


def test_scores_of_pages(pages):
    server, _, _, scores = pages
    contents = [{"content": [part(page)]} for page in PAGES]
    answer = post(server, "/v1/score", text_1="red cat", text_2=contents).json()
    np.testing.assert_allclose([each["score"] for each in answer["data"]], scores, atol=1e-4)
    answer = post(server, "/v1/rerank", query="red cat", documents=contents).json()
    assert [each["index"] for each in answer["results"]] == list(np.argsort(-scores))
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], -np.sort(-scores), atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"input": [[1, 2]]}, "input"),
        ("/pooling", {"input": "red", "input_type": "document"}, "input_type"),
        ("/pooling", {"input": "red", "task": "embed"}, "task"),
        ("/pooling", {"input": "red", "use_activation": False}, "use_activation"),
        ("/pooling", {}, "input"),
        ("/pooling", {"input": "red", "messages": []}, "input"),
        ("/pooling", {"messages": [{"role": "user", "content": ["red", "cat"]}]}, "messages"),
        ("/pooling", {"input": {"image": "no file"}}, "input"),
        ("/v1/embeddings", {"input": "red", "dimensions": 8}, "dimensions"),
        ("/v1/score", {"text_1": "red", "text_2": ["cat"]}, "text_2"),
        ("/v1/score", {"text_1": " ", "text_2": [part(PAGES[0])]}, "text_1"),
        ("/v1/score", {"text_1": part(PAGES[0]), "text_2": [part(PAGES[0])]}, None),
        ("/rerank", {"query": "red", "documents": ["cat"]}, "documents"),
        ("/rerank", {"query": "red", "texts": ["cat"]}, "texts"),
        ("/rerank", {"query": "red", "documents": [part(PAGES[0])], "return_documents": True}, "return_documents"),
    ],
)
def test_what_such_a_model_does_not_read(pages, path, body, param):
    answer = post(pages[0], path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "expected" in error["message"], answer.text
    assert param is None or error["param"] == param, answer.text


@pytest.mark.parametrize("path", ["/v2/embed", "/embed", "/embed_all", "/similarity"])
def test_routes_of_texts_name_what_they_need(pages, path):
    answer = post(pages[0], path)
    assert answer.status_code == 404 and "expected a model with embeddings" in answer.text
