"""How the vocabulary of a GGUF file splits a text into words, whose bytes it then merges.

The file has the name of a split alone (``tokenizer.ggml.pre``). The expressions are those of the tokenizers that these
names stand for, as llama.cpp has them (``src/llama-vocab.cpp`` of github.com/ggml-org/llama.cpp). Those of
``tekken`` and ``gpt-4o`` keep marks, as vowel signs in Hindi, in their words, as the tokenizers do; llama.cpp's do not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers

logger = logging.getLogger("torchax_serve")

_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}{_SIGNS}{_END}"
_QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{_SIGNS}{_END}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_END}"
_TEKKEN = rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS = (r"\p{N}", _GPT2)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|"

_LIKE_LLAMA3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"

# Expressions, each applied to the pieces of those before it, and the names that stand for them.
_SPLITS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((_GPT2,), "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert"),
    (_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    ((_LLAMA3,), _LIKE_LLAMA3),
    ((_LLAMA3,), "dbrx smaug-bpe chatglm-bpe glm4 glm5"),
    ((_QWEN2,), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    ((_QWEN35,), "qwen35"),
    ((_TEKKEN,), "tekken"),
    ((_GPT4O,), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"), "deepseek-coder"),
    ((rf"{_PUNCTUATION}`]+", _GPT2, r"[0-9][0-9][0-9]"), "falcon"),
    ((r" ?[^(\s|.,!?…。，、।۔،)]+",), "bloom poro-chat gpt3-finnish"),  # noqa: RUF001
    ((rf"{_PUNCTUATION}]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), "default"),
)
_BY_NAME = {name: expressions for expressions, names in _SPLITS for name in names.split()}
NAMES = tuple(_BY_NAME)
"""Splits that are known."""

# Vocabularies that take a word which is a token as it is, whatever their merges make of it.
_WHOLE_WORDS = {*_LIKE_LLAMA3.split(), "glm4", "glm5", "tekken"}
_BEGIN_OF_TEXT = {*_LIKE_LLAMA3.split(), "tekken"}
"""Those that texts begin with the token for it in, where the file does not say."""


def split_words(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Makes `tokenizer` split texts as the file says, where the vocabulary is one of bytes.

    A line of the log names a split that is not known.
    """
    name = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    if name not in _BY_NAME:
        logger.warning("the split of texts into words %r is not known: they are split as GPT-2 does", name)
    splits = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _BY_NAME.get(name, (_GPT2,))
    ]
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if name in _BEGIN_OF_TEXT and "tokenizer.ggml.add_bos_token" not in metadata and tokenizer.bos_token_id is not None:
        tokenizer.add_bos_token = True
        tokenizer.update_post_processor()
