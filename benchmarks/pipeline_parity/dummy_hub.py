"""Tokenizers and tiny models in the place of those that diffusers' tests load from the hub.

A repository is replaced by a folder with a tokenizer of bytes and a configuration of the same sizes, with random
weights. What has no replacement raises `NotReplacedError`.
"""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.clip.tokenization_clip import CLIPTokenizer

CLIP = ("hf-internal-testing/tiny-random-clip", "hf-internal-testing/tiny-random-CLIPModel")
T5 = ("hf-internal-testing/tiny-random-t5", "hf-internal-testing/tiny-random-T5Model")
BYTES = {
    "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration": ("Qwen2Tokenizer", "<|endoftext|>"),
    "hf-internal-testing/dummy-gemma": ("GemmaTokenizer", "<eos>"),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaTokenizer", "</s>"),
    "hf-internal-testing/llama-tokenizer": ("LlamaTokenizer", "</s>"),
    "finetrainers/dummy-hunyaunvideo": ("LlamaTokenizer", "</s>"),
    "hf-internal-testing/tiny-random-BertModel": ("BertTokenizer", "[SEP]"),
    "hf-internal-testing/tiny-random-roberta": ("RobertaTokenizer", "</s>"),
}
"""Class and end of sequence of tokenizers that map each byte to a number."""
T5_SIZES = {"d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 5, "num_heads": 4, "vocab_size": 1103}


class NotReplacedError(Exception):
    """A repository of the hub that this file has no replacement for."""


@functools.cache
def folder_of(name):
    """The folder that stands for a repository."""
    folder = Path(tempfile.mkdtemp())
    if name in CLIP:
        _clip_tokenizer(folder)
        config = {"model_type": "clip", "text_config": _clip_sizes(), "vision_config": _clip_sizes()}
        (folder / "config.json").write_text(json.dumps(config))
    elif name in T5 or name.endswith("umt5"):
        _byte_tokenizer(folder, "T5Tokenizer", "</s>", pad="<pad>")
        kind = "umt5" if name.endswith("umt5") else "t5"
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "pad_token_id": 0, **T5_SIZES}))
    elif name in BYTES:
        _byte_tokenizer(folder, *BYTES[name])
    else:
        raise NotReplacedError(name)
    return folder


def _clip_sizes():
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 5}
    return {**sizes, "vocab_size": 1000, "projection_dim": 32}


def _clip_tokenizer(folder):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, *(f"{each}</w>" for each in letters)])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77).save_pretrained(folder)


def _byte_tokenizer(folder, class_name, end, pad=None):
    pad = pad or end
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = list(dict.fromkeys([pad, end, "<unk>", "<bos>"]))
    vocab = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, vocab[end])])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": end, "pad_token": pad, "unk_token": "<unk>", "bos_token": "<bos>"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "padding_side": "right"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def install():
    """Makes transformers' ``from_pretrained`` load the replacements."""
    for owner in (PreTrainedTokenizerBase, PreTrainedModel, AutoConfig, AutoModel, AutoTokenizer, AutoProcessor):
        _redirect(owner)


def _redirect(owner):
    theirs = owner.from_pretrained.__func__

    def from_pretrained(cls, name, *args, **kwargs):
        if Path(str(name)).exists() or name is None:
            return theirs(cls, name, *args, **kwargs)
        folder = folder_of(str(name))
        kwargs.pop("subfolder", None)
        kwargs.pop("revision", None)
        if issubclass(cls, PreTrainedModel):
            config = cls.config_class.from_pretrained(folder)
            return cls(config).eval()
        if issubclass(cls, PreTrainedTokenizerBase) and not (folder / "vocab.json").exists():
            return AutoTokenizer.from_pretrained(folder)
        return theirs(cls, folder, *args, **kwargs)

    owner.from_pretrained = classmethod(from_pretrained)
