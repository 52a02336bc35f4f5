"""ColPali and ColQwen2 beside the eager models, on what the checkpoint's processor makes of pages and queries."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)
from weights import draw_matrices

from torchax_serve import InvalidArgumentError, serve

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]

WORDS = "<pad> <bos> <unk> <image> Question : Describe the image . cat dog red".split()  # noqa: SIM905
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|endoftext|>")


def tokenizer_of(words, marks):
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    special = [AddedToken(mark, special=True) for mark in marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def colpali_processor():
    tokenizer = tokenizer_of(WORDS, ["<image>"])
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return ColPaliProcessor(image_processor=images, tokenizer=tokenizer)


def colqwen2_processor():
    words = [word for word in WORDS if word != "<image>"]
    sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    return ColQwen2Processor(Qwen2VLImageProcessorPil(**sizes), tokenizer_of([*words, *MARKS], MARKS))


def colpali_model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"model_type": "gemma", "vocab_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    vision = sizes | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "image_token_index": 3}
    return ColPaliForRetrieval(ColPaliConfig(vlm_config=vlm | {"projection_dim": 32}, embedding_dim=16))


def colqwen2_model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = sizes | {"vocab_size": 32, "num_key_value_heads": 2, "rope_parameters": rope, "bos_token_id": 1}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    image_token = colqwen2_processor().image_token_id
    config = Qwen2VLConfig(text_config=text | {"eos_token_id": 1}, vision_config=vision, image_token_id=image_token)
    return ColQwen2ForRetrieval(ColQwen2Config(vlm_config=config.to_dict(), embedding_dim=16))


MODELS = {"colpali": (colpali_model, colpali_processor), "colqwen2": (colqwen2_model, colqwen2_processor)}


@pytest.fixture(scope="module", params=MODELS)
def pages_model(request, tmp_path_factory):
    """A served model with random weights, the eager one, and what makes its processor."""
    path, (make, processor) = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    torch.manual_seed(0)
    eager = make().eval()
    draw_matrices(eager, std=0.2)
    eager.save_pretrained(path)
    processor().save_pretrained(path)
    with serve(path) as served:
        yield served, eager, processor


def expected(eager, processor, **given):
    inputs = processor()(**given, return_tensors="pt")
    inputs.pop("labels", None)
    with torch.no_grad():
        return eager(**inputs).embeddings[0].numpy()


def test_pages_and_queries_have_vectors_and_scores(pages_model):
    served, eager, processor = pages_model
    pages = [Image.new("RGB", (40, 30), color) for color in ("red", "white")]
    rows = served.embed_pages(pages)
    for found, page in zip(rows, pages, strict=True):
        np.testing.assert_allclose(found, expected(eager, processor, images=[page]), atol=1e-5)
    query = served.embed_queries("red cat")
    np.testing.assert_allclose(query, expected(eager, processor, text=["red cat"]), atol=1e-5)
    scores = processor().score_retrieval([torch.tensor(query)], [torch.tensor(row) for row in rows])
    np.testing.assert_allclose(served.score_pages("red cat", pages), scores[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(served.score_pages("red cat", rows), scores[0].numpy(), atol=1e-4)
    with pytest.raises(InvalidArgumentError, match="expected some text"):
        served.embed_queries(" ")
