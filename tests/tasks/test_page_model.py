"""ColPali beside the eager model, on what the checkpoint's processor makes of pages and queries."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)
from weights import draw_matrices

from torchax_serve import InvalidArgumentError, serve

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]

WORDS = "<pad> <bos> <unk> <image> Question : Describe the image . cat dog red".split()  # noqa: SIM905


def processor():
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<image>", special=True)]})
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return ColPaliProcessor(image_processor=images, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def colpali(tmp_path_factory):
    """A served ColPali with random weights, and the eager one."""
    path = tmp_path_factory.mktemp("colpali")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"model_type": "gemma", "vocab_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    vision = sizes | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "image_token_index": 3}
    torch.manual_seed(0)
    eager = ColPaliForRetrieval(ColPaliConfig(vlm_config=vlm | {"projection_dim": 32}, embedding_dim=16)).eval()
    draw_matrices(eager, std=0.2)
    eager.save_pretrained(path)
    processor().save_pretrained(path)
    with serve(path) as served:
        yield served, eager


def expected(eager, **given):
    inputs = processor()(**given, return_tensors="pt")
    inputs.pop("labels", None)
    with torch.no_grad():
        return eager(**inputs).embeddings[0].numpy()


def test_pages_and_queries_have_vectors_and_scores(colpali):
    served, eager = colpali
    pages = [Image.new("RGB", (40, 30), color) for color in ("red", "white")]
    rows = served.embed_pages(pages)
    for found, page in zip(rows, pages, strict=True):
        np.testing.assert_allclose(found, expected(eager, images=[page]), atol=1e-5)
    query = served.embed_queries("red cat")
    np.testing.assert_allclose(query, expected(eager, text=["red cat"]), atol=1e-5)
    scores = processor().score_retrieval([torch.tensor(query)], [torch.tensor(row) for row in rows])
    np.testing.assert_allclose(served.score_pages("red cat", pages), scores[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(served.score_pages("red cat", rows), scores[0].numpy(), atol=1e-4)
    with pytest.raises(InvalidArgumentError, match="expected some text"):
        served.embed_queries(" ")
