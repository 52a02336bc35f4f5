"""Warm-up of encoders: afterwards no request for embeddings, ranks or labels compiles anything."""

import json
import random
import re

import httpx
import numpy as np
import pytest
from encoder_models import SPECIAL, WORDS, folder
from running_server import serving
from thorough import except_for

from torchax_serve.pooling import POOLINGS, packing
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.server.start_progress import StartProgress

MAX_LEN = 12
"""Longest text, in tokens: two lengths of batches."""
KINDS = {
    "embeddings": ("BertModel", {}),
    "ranks": ("BertForSequenceClassification", {"num_labels": 1}),
    "labels": ("BertForSequenceClassification", {"num_labels": 3}),
    "labels of tokens": ("BertForTokenClassification", {"num_labels": 3}),
}


def bodies(kind):
    """Yields requests of all sizes: one text and many, short and long ones, texts and token ids."""
    draw = random.Random(0)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, MAX_LEN + 2)))

    for number in (1, 2, 3, 5, 7, 9, 33):
        texts = [text() for _ in range(number)]
        ids = [[draw.randrange(len(SPECIAL), len(WORDS)) for _ in range(draw.randint(1, MAX_LEN))] for _ in texts]
        cut = {"truncate_prompt_tokens": -1}
        if kind == "embeddings":
            for pooling in POOLINGS:
                yield "/v1/embeddings", {"input": texts, "pooling": pooling, "dimensions": number % 32 + 1, **cut}
            yield "/v1/embeddings", {"input": texts, "normalize": False, **cut}
            yield "/v1/embeddings", {"input": ids, "normalize": True}
        elif kind == "ranks":
            yield "/rerank", {"query": text(), "documents": texts}
            yield "/score", {"text_1": texts, "text_2": [text() for _ in texts]}
        else:
            path = "/classify" if kind == "labels" else "/pooling"
            yield path, {"input": texts, **cut}
            yield path, {"input": ids}


def num_compilations(server):
    found = re.search(r"^torchax_serve_compilations_total (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return float(found[1])


@pytest.mark.parametrize("kind", except_for(["embeddings", "ranks"], KINDS))
def test_after_warm_up_nothing_compiles(kind, tmp_path, monkeypatch):
    class_name, options = KINDS[kind]
    folder(tmp_path, class_name, **options)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": MAX_LEN}))
    if kind == "embeddings":
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
        prefix = "sentence_transformers.models."
        modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
        modules = [{"idx": int(n), "name": n, "path": path, "type": prefix + name} for n, path, name in modules]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    monkeypatch.setattr(TextProgram, "max_rows", 8)
    monkeypatch.setattr(packing, "MAX_TEXTS", 8)
    shown = []
    stage = StartProgress.stage
    monkeypatch.setattr(StartProgress, "stage", lambda *args: shown.append(args[1:3]) or stage(*args))
    with serving(tmp_path, warm_up=True) as (server, _):
        # Texts that are embedded stand in rows of 16 to 96 tokens; others in batches of two lengths, of 1 to 8 rows.
        assert shown[-1] == ("compiling programs", 6 if kind == "embeddings" else 2 * 4)
        before, num_texts = num_compilations(server), 0
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for path, body in bodies(kind):
                answer = client.post(path, json={"model": "tiny", **body})
                assert answer.status_code == 200, answer.text
                num_texts += len(answer.json().get("data") or answer.json().get("results"))
        assert num_texts > 100
        assert num_compilations(server) == before
        if kind == "embeddings":
            body = {"model": "tiny", "input": ["a dog ran"], "dimensions": 8}
            row = httpx.post(f"{server.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
            full = httpx.post(f"{server.url}/v1/embeddings", json=body | {"dimensions": 32}).json()["data"][0]
            np.testing.assert_allclose(row, full["embedding"][:8], atol=1e-7)
