"""Scores that the clients of retrieval get over HTTP, beside those of their own libraries on the same weights.

Needs pylate, colpali-engine, mteb and sentence-transformers, best in an environment of their own. Each case makes a
tiny random model with a library, saves it, serves the folder in a process and compares. It prints a line for each case,
and ends with status 1 if one differs.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import encoder_models
import page_models
from encoder_models import WORDS

OURS = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()", "serve"]
NAME = "tiny"
TOLERANCE = 1e-4
START_S = 300.0


def sentences(number: int, seed: int, length: int = 7) -> list[str]:
    """Returns different texts of the words of the tiny tokenizer."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, length)) for _ in range(number)]


QUERIES, DOCUMENTS = sentences(6, 0, 4), sentences(20, 1, 9)


def pictures(number: int) -> list[Image.Image]:
    """Returns different images, of the size that the tiny processors make."""
    random = np.random.default_rng(2)
    small = random.integers(0, 255, (number, 4, 4, 3), np.uint8)
    return [Image.fromarray(each).resize((28, 28), Image.Resampling.BICUBIC) for each in small]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder in a process; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*OURS, str(folder), "--port", str(port), "--served-model-name", NAME, "--no-warm-up"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[1][-2000:])
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def vectors(url: str, given: Sequence[Any], input_type: str) -> list[torch.Tensor]:
    """Returns the embeddings of the tokens of inputs, from `/pooling`."""
    body = {"model": NAME, "input": list(given), "input_type": input_type, "task": "token_embed"}
    answer = httpx.post(f"{url}/pooling", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [torch.tensor(each["data"]) for each in answer.json()["data"]]


def scores(url: str, query: str, documents: Sequence[Any]) -> list[float]:
    """Returns the scores of documents, from `/v1/score`."""
    body = {"model": NAME, "text_1": query, "text_2": list(documents)}
    answer = httpx.post(f"{url}/v1/score", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [each["score"] for each in answer.json()["data"]]


def encoder_in(folder: Path, **options: Any) -> Path:
    """Saves a tiny encoder with its tokenizer."""
    encoder_models.folder(folder, "BertModel", **options)
    return folder


def pylate(folder: Path) -> float:
    """Returns the largest difference of PyLate's ranks and scores from those over HTTP."""
    from pylate import models, rank

    sizes = {"embedding_size": 16, "query_length": 12, "document_length": 16, "skiplist_words": ["the", "."]}
    model = models.ColBERT(str(encoder_in(folder / "encoder")), device="cpu", **sizes)
    model.save(str(folder / "colbert"))
    queries = model.encode(QUERIES, is_query=True, show_progress_bar=False)
    documents = model.encode(DOCUMENTS, is_query=False, show_progress_bar=False)
    ids = [list(range(len(DOCUMENTS)))] * len(QUERIES)
    expected = rank.rerank(ids, queries, [documents] * len(QUERIES))
    with served(folder / "colbert") as url:
        rows = vectors(url, QUERIES, "query"), vectors(url, DOCUMENTS, "document")
        found = rank.rerank(ids, rows[0], [rows[1]] * len(QUERIES))
        direct = [scores(url, query, DOCUMENTS) for query in QUERIES]
    worst = 0.0
    for own, theirs, pairs in zip(found, expected, direct, strict=True):
        by_id = {each["id"]: float(each["score"]) for each in theirs}
        worst = max(worst, *(abs(by_id[each["id"]] - float(each["score"])) for each in own))
        worst = max(worst, *(abs(by_id[i] - score) for i, score in enumerate(pairs)))
    return worst


def _copied(engine: Any, ours: Any, parts: dict[str, str]) -> None:
    """Loads the weights of a model of transformers into one of colpali-engine, by the beginnings of their names."""
    state = {}
    for name, value in ours.state_dict().items():
        begin = next(each for each in parts if name.startswith(each))
        state[parts[begin] + name.removeprefix(begin)] = value
    missing, unknown = engine.load_state_dict(state, strict=False)
    assert not unknown and all("lm_head" in each for each in missing), (missing, unknown)


def _page_scores(folder: Path, engine: Any, reader: Any) -> float:
    """Returns the largest difference of the scores of a model and processor of colpali-engine."""
    pages = pictures(5)
    with torch.no_grad():
        documents = [engine(**reader.process_images([page]))[0] for page in pages]
        queries = [engine(**reader.process_queries([query]))[0] for query in ("red cat", "the dog")]
    expected = reader.score(queries, documents)
    contents = [{"content": [image_part(page)]} for page in pages]
    with served(folder) as url:
        found = reader.score(vectors(url, ["red cat", "the dog"], "query"), vectors(url, contents, "document"))
        direct = torch.tensor([scores(url, query, contents) for query in ("red cat", "the dog")])
    return float(max((found - expected).abs().max(), (direct - expected).abs().max()))


def image_part(image: Image.Image) -> dict[str, Any]:
    """Returns an image as the part of a message."""
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def colpali_engine(folder: Path) -> float:
    """Returns the largest difference of the scores of ColModernVBert of colpali-engine from those over HTTP."""
    from colpali_engine.models import ColModernVBert, ColModernVBertProcessor

    make, processor = page_models.MODELS["colmodernvbert"]
    torch.manual_seed(0)
    ours = make(embedding_dim=128).eval()
    made = processor()
    ours.save_pretrained(folder)
    made.save_pretrained(folder)
    engine = ColModernVBert(ours.config.vlm_config).eval()
    _copied(engine, ours, {"vlm.": "model.", "embedding_proj_layer.": "custom_text_proj."})
    reader = ColModernVBertProcessor(made.image_processor, made.tokenizer, image_seq_len=made.image_seq_len)
    return _page_scores(folder, engine, reader)


def _task(documents: Sequence[Any], column: str, queries: Sequence[str] = QUERIES, *, ranked: bool = False) -> Any:
    """Returns a task of mteb on inputs of our own, whose relevant documents are random.

    Args:
        documents: Texts or images.
        column: Their name in the data: ``text`` or ``image``.
        queries: Texts.
        ranked: Whether all documents are to be ranked anew, as by a cross-encoder.
    """
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    random = np.random.default_rng(3)
    corpus = {"id": [f"d{i}" for i in range(len(documents))], column: list(documents)}
    asked = {"id": [f"q{i}" for i in range(len(queries))], "text": list(queries)}
    relevant = {id_: {f"d{i}": 1 for i in random.choice(len(documents), 3)} for id_ in asked["id"]}
    top = dict.fromkeys(asked["id"], corpus["id"]) if ranked else None

    class Task(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="TinyRetrieval",
            description="Tiny texts.",
            dataset={"path": "none/none", "revision": "1"},
            type="Retrieval" if column == "text" else "Any2AnyRetrieval",
            category="t2t" if column == "text" else "t2i",
            modalities=["text"] if column == "text" else ["text", "image"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )

        def load_data(self, num_proc: int | None = None, **_: Any) -> None:
            data = {"corpus": Dataset.from_dict(corpus), "queries": Dataset.from_dict(asked)}
            self.dataset = {"default": {"test": data | {"relevant_docs": relevant, "top_ranked": top}}}
            self.data_loaded = True

    return Task()


def _evaluated(model: Any, task: Any) -> dict[str, float]:
    import mteb

    (result,) = mteb.evaluate(model, task, cache=None, show_progress_bar=False, overwrite_strategy="always")
    (row,) = result.scores["test"]
    return {name: float(value) for name, value in row.items() if isinstance(value, float)}


def _largest(found: dict[str, float], expected: dict[str, float]) -> float:
    assert found.keys() == expected.keys() and expected["ndcg_at_10"] > 0
    return max(abs(found[name] - expected[name]) for name in expected)


def mteb_embeddings(folder: Path) -> float:
    """Returns the largest difference of a task's scores: embeddings over HTTP and sentence-transformers."""
    from mteb.models import OpenAIAPIEncodeWrapper
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    body = Transformer(str(encoder_in(folder / "encoder")))
    theirs = SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension(), "mean")], device="cpu")
    theirs.save(str(folder / "dense"))
    task = _task(DOCUMENTS, "text")
    with served(folder / "dense") as url:
        found = _evaluated(OpenAIAPIEncodeWrapper(url, NAME, use_chat_template=False, modalities=["text"]), task)
    return _largest(found, _evaluated(theirs, task))


def mteb_ranks(folder: Path) -> float:
    """Returns the largest difference of a task's scores: a cross-encoder over HTTP and sentence-transformers."""
    from mteb.models import OpenAIAPIRerankWrapper
    from sentence_transformers import CrossEncoder

    encoder_models.folder(folder, "BertForSequenceClassification", num_labels=1)
    task = _task(DOCUMENTS, "text", ranked=True)
    with served(folder) as url:
        found = _evaluated(OpenAIAPIRerankWrapper(url, NAME, modalities=["text"]), task)
    return _largest(found, _evaluated(CrossEncoder(str(folder), device="cpu"), task))


def mteb_pages(folder: Path) -> float:
    """Returns the largest difference of a task's scores: ColPali over HTTP and transformers."""
    from mteb.models import OpenAIAPITokenEmbedWrapper
    from mteb.models.openai_wrappers import _collect_multimodal_items

    eager, processor = page_models.saved(folder, "colpali")

    class Library(OpenAIAPITokenEmbedWrapper):
        def _encode(self, inputs: Any, **_: Any) -> list[np.ndarray]:
            kinds = [{"text": [text]} if image is None else {"images": [image]}
                     for text, image, *_ in _collect_multimodal_items(inputs)]  # fmt: skip
            return [page_models.expected_vectors(eager, processor, **each) for each in kinds]

    task = _task(pictures(12), "image", sentences(6, 4, 4))
    with served(folder) as url:
        found, expected = (
            _evaluated(kind(url, NAME, modalities=["text", "image"]), task)
            for kind in (OpenAIAPITokenEmbedWrapper, Library)
        )
    return _largest(found, expected)


CASES: dict[str, Callable[[Path], float]] = {
    "pylate": pylate,
    "colpali-engine": colpali_engine,
    "mteb-embeddings": mteb_embeddings,
    "mteb-ranks": mteb_ranks,
    "mteb-pages": mteb_pages,
}


def main() -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=[*CASES], default=[*CASES])
    wrong = 0
    for name in parser.parse_args().cases:
        with tempfile.TemporaryDirectory() as folder:
            difference = CASES[name](Path(folder))
        wrong += difference > TOLERANCE
        print(f"{name:18} largest difference {difference:.1e} {'OK' if difference <= TOLERANCE else 'DIFFERS'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
