"""Tokenizers and tiny models in the place of those that diffusers' tests load from the hub.

A repository is replaced by a folder with a tokenizer of bytes and a configuration of the same sizes, with random
weights. What has no replacement raises `NotReplacedError`.
"""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.clip.tokenization_clip import CLIPTokenizer

CLIP = ("hf-internal-testing/tiny-random-clip", "hf-internal-testing/tiny-random-CLIPModel")
T5 = ("hf-internal-testing/tiny-random-t5", "hf-internal-testing/tiny-random-T5Model")
QWEN = (
    "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration",
    "huangfeice/tiny-random-Qwen3VLForConditionalGeneration",
)
"""Repositories with the tokenizer of Qwen: numbers of its special tokens are in the configurations of tests."""
BYTES = {
    "hf-internal-testing/dummy-gemma": ("GemmaTokenizer", "<eos>"),
    "hf-internal-testing/tiny-gemma3": ("GemmaTokenizer", "<eos>"),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaTokenizer", "</s>"),
    "hf-internal-testing/llama-tokenizer": ("LlamaTokenizer", "</s>"),
    "finetrainers/dummy-hunyaunvideo": ("LlamaTokenizer", "</s>"),
    "hf-internal-testing/tiny-random-BertModel": ("BertTokenizer", "[SEP]"),
    "hf-internal-testing/tiny-random-roberta": ("RobertaTokenizer", "</s>"),
    "hf-internal-testing/Mistral-Small-3.1-24B-Instruct-2503-only-processor": ("LlamaTokenizer", "</s>"),
    "YiYiXu/tiny-random-mclip-base": ("XLMRobertaTokenizer", "</s>"),
    "THUDM/glm-4-9b-chat": ("PreTrainedTokenizerFast", "<|endoftext|>"),
    "Qwen/Qwen3-Embedding-0.6B": ("Qwen2Tokenizer", "<|endoftext|>"),
}
"""Class and end of sequence of tokenizers that map each byte to a number."""
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
_SMALL |= {"num_hidden_layers": 2}
_QWEN2_VISION = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
_QWEN3_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
CONFIGS = {
    "hf-internal-testing/tiny-random-BertModel": {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "vocab_size": 1124,
    },
    "hf-internal-testing/tiny-random-LlamaForCausalLM": {"model_type": "llama", **_SMALL, "vocab_size": 32000},
    "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "text_config": {
            **_SMALL,
            "vocab_size": 152064,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        },
        "vision_config": _QWEN2_VISION,
    },
    "huangfeice/tiny-random-Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {
            **_SMALL,
            "head_dim": 8,
            "vocab_size": 152064,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {**_QWEN3_VISION, "patch_size": 14, "deepstack_visual_indexes": [0]},
    },
    "hf-internal-testing/tiny-gemma3": {
        "model_type": "gemma3",
        "text_config": {**_SMALL, "hidden_size": 32, "head_dim": 8, "vocab_size": 1024},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "hf-internal-testing/tiny-random-SiglipVisionModel": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 30,
        "patch_size": 2,
    },
    "hf-internal-testing/tiny-random-chatglm3-6b": {
        "model_type": "chatglm",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "kv_channels": 4,
        "num_attention_heads": 2,
        "add_qkv_bias": True,
        "multi_query_attention": True,
        "original_rope": True,
        "padded_vocab_size": 65024,
    },
}
"""Configurations of models of which tests load weights, of the sizes that the rest of each test expects."""
PREPROCESSORS = {
    "hf-internal-testing/tiny-random-ClapModel": {"feature_extractor_type": "ClapFeatureExtractor"},
    "hf-internal-testing/tiny-random-SiglipVisionModel": {"image_processor_type": "SiglipImageProcessor"},
}
_QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_QWEN_FIRST_SPECIAL = 151643
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
    elif name in QWEN:
        filler = [f"<|unused {number}|>" for number in range(_QWEN_FIRST_SPECIAL - 256)]
        _byte_tokenizer(folder, "Qwen2Tokenizer", "<|endoftext|>", before=filler, special=_QWEN_SPECIAL)
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 50176}
        for file, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
            classes = {f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor"}
            classes["processor_class"] = "Qwen2VLProcessor"
            (folder / f"{file}_config.json").write_text(json.dumps(classes | patches))
    elif name == "hf-internal-testing/tiny-random-chatglm3-6b":
        _sentencepiece_model(folder)
    elif name not in PREPROCESSORS:
        raise NotReplacedError(name)
    if name in CONFIGS:
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    if name in PREPROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    return folder


def _sentencepiece_model(folder):
    import sentencepiece

    words = [chr(code) * length for code in range(ord("a"), ord("z") + 1) for length in (1, 2, 3)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 4),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=80,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )


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


def _byte_tokenizer(folder, class_name, end, pad=None, before=(), special=None):
    """Writes a tokenizer whose numbers are those of `special`, then of bytes; or of bytes, `before` and `special`."""
    pad = pad or end
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = list(dict.fromkeys([pad, end, "<unk>", "<bos>"]))
    tokens = [*first, *letters] if special is None else [*letters, *before, *special]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>" if special is None else None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special is None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, vocab[end])])
    else:
        tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": end, "pad_token": pad, "chat_template": CHAT_TEMPLATE}
    if special is None:
        settings |= {"unk_token": "<unk>", "bos_token": "<bos>"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "padding_side": "right"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def install():
    """Makes transformers' ``from_pretrained`` load the replacements."""
    for owner in (
        *(PreTrainedTokenizerBase, PreTrainedModel, AutoConfig, AutoModel, AutoTokenizer, AutoProcessor),
        *(ProcessorMixin, ImageProcessingMixin, FeatureExtractionMixin),
    ):
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
            if not (folder / "config.json").exists():
                raise NotReplacedError(name)
            config = cls.config_class.from_pretrained(folder)
            return cls(config).eval()
        is_own = (folder / "vocab.json").exists() or (folder / "tokenizer.model").exists()
        if issubclass(cls, PreTrainedTokenizerBase) and not is_own:
            return AutoTokenizer.from_pretrained(folder)
        return theirs(cls, folder, *args, **kwargs)

    owner.from_pretrained = classmethod(from_pretrained)
