"""ColPali, ColQwen2 and ColModernVBert beside the eager models, on what their processors make of pages and queries."""

import asyncio

import numpy as np
import pytest
import torch
from page_models import MODELS, expected_vectors, saved
from PIL import Image

from torchax_serve import InvalidArgumentError, serve

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]


@pytest.fixture(scope="module", params=MODELS)
def pages_model(request, tmp_path_factory):
    """A served model with random weights, the eager one, and what makes its processor."""
    path = tmp_path_factory.mktemp(request.param)
    eager, processor = saved(path, request.param)
    with serve(path) as served:
        yield served, eager, processor


def test_pages_and_queries_have_vectors_and_scores(pages_model):
    served, eager, processor = pages_model
    pages = [Image.new("RGB", (40, 30), color) for color in ("red", "white")]
    rows = served.embed_pages(pages)
    for found, page in zip(rows, pages, strict=True):
        np.testing.assert_allclose(found, expected_vectors(eager, processor, images=[page]), atol=1e-5)
    query = served.embed_queries("red cat")
    np.testing.assert_allclose(query, expected_vectors(eager, processor, text=["red cat"]), atol=1e-5)
    scores = processor().score_retrieval([torch.tensor(query)], [torch.tensor(row) for row in rows])
    np.testing.assert_allclose(served.score_pages("red cat", pages), scores[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(served.score_pages("red cat", rows), scores[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(asyncio.run(served.ascore_pages("red cat", rows)), scores[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(asyncio.run(served.aembed_pages(pages[0])), rows[0], atol=1e-6)
    for given, message in ((" ", "expected some text"), ([[1, 2]], "expected a text, which the processor frames")):
        with pytest.raises(InvalidArgumentError, match=message):
            served.embed_queries(given)
