"""Tiny random encoders in folders, with a tokenizer of words."""

import json

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from weights import draw_matrices

WORDS = "the a cat dog sat ran on in mat rain red blue small big slowly fast home away and or".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
TEXTS = ["the cat sat on the mat", "a dog ran", "the small red dog ran home slowly in the rain and sat"]


def tokenizer():
    vocab = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def model(class_name, **options):
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        **options,
    )
    torch.manual_seed(0)
    made = getattr(transformers, class_name)(config).eval()
    draw_matrices(made, std=0.2)
    return made


def folder(path, class_name, **options):
    """Saves a model with its tokenizer; returns the model."""
    made = model(class_name, **options)
    made.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return made


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
