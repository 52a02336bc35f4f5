"""Tiny random models that find pages of documents by their images, with their processors."""

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    ColModernVBertConfig,
    ColModernVBertForRetrieval,
    ColModernVBertProcessor,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
    Idefics3ImageProcessorPil,
    ModernBertConfig,
    ModernVBertConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from weights import draw_matrices

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


def colmodernvbert_processor():
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    marks = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<|begin_of_text|>", *rows]
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return ColModernVBertProcessor(images, tokenizer_of(WORDS, ["<image>", *marks]), image_seq_len=1)


def colmodernvbert_model(embedding_dim=16):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    text |= {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    tokens = {"image_token_id": colmodernvbert_processor().image_token_id, "pixel_shuffle_factor": 2}
    vlm = ModernVBertConfig(text_config=ModernBertConfig(**text), vision_config=SiglipVisionConfig(**vision), **tokens)
    return ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=vlm, embedding_dim=embedding_dim))


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


MODELS = {
    "colpali": (colpali_model, colpali_processor),
    "colqwen2": (colqwen2_model, colqwen2_processor),
    "colmodernvbert": (colmodernvbert_model, colmodernvbert_processor),
}


def saved(path, name):
    """Saves a model of `MODELS` with its processor; returns the model in PyTorch, and what makes its processor."""
    make, processor = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    draw_matrices(model, std=0.2)
    model.save_pretrained(path)
    processor().save_pretrained(path)
    return model, processor


def expected_vectors(model, processor, images=None, text=None):
    """Returns what PyTorch makes of an image or a query, float32[num_tokens, dim]."""
    made = processor()
    inputs = made.process_queries(text, return_tensors="pt") if images is None else made.process_images(images)
    inputs = inputs.convert_to_tensors("pt")
    inputs.pop("labels", None)
    with torch.no_grad():
        return model(**inputs).embeddings[0].numpy()
