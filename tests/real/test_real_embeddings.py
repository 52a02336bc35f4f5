"""all-MiniLM-L6-v2 beside sentence-transformers."""

import warnings

import numpy as np
import pytest
import texts
from fetch import folder_of

from torchax_serve import serve


@pytest.fixture(scope="module")
def reference():
    with warnings.catch_warnings():  # of sentence-transformers, about its own dependencies
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder_of("minilm")), device="cpu")


@pytest.fixture(scope="module")
def model():
    with serve(folder_of("minilm")) as served:
        yield served


def test_200_sentences(model, reference, found):
    sentences = texts.sentences()
    assert len(set(sentences)) > 190
    ours, theirs = model.embed(sentences), reference.encode(sentences)
    assert ours.shape == theirs.shape == (200, 384)
    difference = np.abs(ours - theirs).max()
    assert difference < 1e-5
    alone = np.stack([model.embed(sentence) for sentence in sentences[:5]])
    np.testing.assert_allclose(alone, ours[:5], atol=1e-5)
    found("minilm", "embeddings of 200 sentences, beside sentence-transformers", f"within {difference:.0e}")


def test_odd_texts(model, reference):
    odd = ["x", "  spaces  around  ", "\n\ttabs\n", "🍕" * 30, "[CLS] [SEP] [MASK]", "ÀÉÎ", "a" * 300, "0" * 120]
    np.testing.assert_allclose(model.embed(odd), reference.encode(odd), atol=1e-5)


def test_what_is_close_in_meaning_is_close(model, found):
    pairs = ["A cat sits on the mat.", "There is a cat on the rug.", "The stock market fell today."]
    similar = model.embed(pairs) @ model.embed(pairs).T
    assert similar[0, 1] > 0.5 > similar[0, 2]
    found("minilm", "cosine of two like sentences, of two unlike ones", f"{similar[0, 1]:.2f}, {similar[0, 2]:.2f}")
