"""`torchax-serve serve` of bundles that read texts: the answers of eager PyTorch, from a process without it."""

import os
import subprocess
import sys
import time

import encoder_models
import httpx
import numpy as np
import pytest
import torch
from encoder_models import TEXTS, tokenizer
from exported import REFUSAL
from ports import free_port
from thorough import except_for

from torchax_serve import EngineOptions, serve

SIZES = EngineOptions(max_model_len=24, max_num_seqs=1)
LABELS = {0: "cold", 1: "warm", 2: "hot"}
QUERY = "a dog"
KINDS = {
    "embeddings": ("BertModel", {}),
    "ranks": ("BertForSequenceClassification", {"num_labels": 1}),
    "labels": ("BertForSequenceClassification", {"id2label": LABELS}),
    "labels of tokens": ("BertForTokenClassification", {"id2label": LABELS}),
}
SERVE = REFUSAL + "from torchax_serve.cli.main import main; main()"


def content(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def embeddings(model, post):
    found = content(post("/v1/embeddings", input=TEXTS, pooling="mean"))
    rows = [each["embedding"] for each in found["data"]]
    wanted = [model(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    np.testing.assert_allclose(rows, torch.stack(wanted), atol=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokenizer()(TEXTS)["input_ids"]))
    for path, body, status, said in (
        ("/v1/embeddings", {"input": TEXTS}, 400, "pass pooling"),
        ("/v1/embeddings", {"input": [[1, 99]], "pooling": "mean"}, 400, "from 0 to 24"),
        ("/v1/completions", {"prompt": "a"}, 404, "expected a model that generates text, got"),
        ("/classify", {"input": "a"}, 404, "expected a classifier of texts"),
    ):
        answer = post(path, **body)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text


def ranks(model, post):
    pairs = [tokenizer()(QUERY, text, return_tensors="pt") for text in TEXTS]
    wanted = [model(**each).logits[0, 0].sigmoid().item() for each in pairs]
    found = content(post("/rerank", query=QUERY, documents=TEXTS))["results"]
    assert [each["index"] for each in found] == sorted(range(len(TEXTS)), key=lambda index: -wanted[index])
    np.testing.assert_allclose([each["relevance_score"] for each in found], sorted(wanted, reverse=True), atol=1e-5)
    found = content(post("/score", text_1=QUERY, text_2=TEXTS))["data"]
    np.testing.assert_allclose([each["score"] for each in found], wanted, atol=1e-5)


def labels(model, post):
    found = content(post("/classify", input=TEXTS))["data"]
    wanted = [model(**tokenizer()(text, return_tensors="pt")).logits[0].softmax(-1) for text in TEXTS]
    np.testing.assert_allclose([each["probs"] for each in found], torch.stack(wanted), atol=1e-5)
    assert [each["label"] for each in found] == [LABELS[int(each.argmax())] for each in wanted]


def labels_of_tokens(model, post):
    found = content(post("/pooling", input=TEXTS))["data"]
    for text, each in zip(TEXTS, found, strict=True):
        ids = tokenizer()(text, return_tensors="pt")
        scores, numbers = model(**ids).logits[0].softmax(-1).max(-1)
        inner = slice(1, -1)  # without the special tokens
        assert [token["token_id"] for token in each["data"]] == ids["input_ids"][0, inner].tolist()
        assert [token["label"] for token in each["data"]] == [LABELS[int(number)] for number in numbers[inner]]
        np.testing.assert_allclose([token["score"] for token in each["data"]], scores[inner], atol=1e-5)


CHECKS = {"embeddings": embeddings, "ranks": ranks, "labels": labels, "labels of tokens": labels_of_tokens}


@pytest.mark.parametrize("kind", except_for(["embeddings", "ranks"], KINDS))
def test_answers_over_http(kind, tmp_path):
    class_name, options = KINDS[kind]
    model = encoder_models.folder(tmp_path / "model", class_name, **options)
    bundle, port = tmp_path / "bundle", free_port()
    with serve(tmp_path / "model", dtype="float32") as served:
        served.export(bundle, engine=SIZES, native=False)
    command = [
        sys.executable,
        "-c",
        SERVE,
        "accelerate",
        "serve",
        str(bundle),
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
    ]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}) as run,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        try:
            wait_until_ready(run, http)
            with torch.no_grad():
                CHECKS[kind](model, lambda path, **body: http.post(path, json={"model": "tiny", **body}))
            assert http.get("/metrics").status_code == 200
        finally:
            run.terminate()
            _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors


def wait_until_ready(process, http):
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, process.stderr.read()
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("it is not ready")
