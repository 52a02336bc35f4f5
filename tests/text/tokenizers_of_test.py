"""Small tokenizers of every decoding kind, trained on a few sentences."""

import io
import tempfile
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

CORPUS = [
    "Once upon a time there was a model, and it didn't know what it's worth.",
    "The quick brown fox jumps over the lazy dog. Isn't it? Yes! 'Quoted' text, we've seen; they're here.",
    "Grüße aus Köln, naïve café, Ελληνικά, русский текст, 日本語の文章, 한국어 문장, 😀 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))  # two   spaces",
] * 4
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>"]


def _wrapped(tokenizer: Tokenizer, **kwargs) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **kwargs
    )


def byte_level_bpe(**kwargs):
    """As GPT-2, Llama 3 and Qwen: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, **kwargs)


def sentencepiece_bpe(strip: bool = True, **kwargs):
    """As Llama 2 (one leading space is stripped) and Gemma (it is not): pieces with ▁, byte tokens for the rest."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate([*SPECIAL, "<unk>", *byte_tokens])}
    characters = sorted({*"▁abcdefghijklmnopqrstuvwxyz.,!?'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "é", "▁▁", "▁▁▁▁"})
    for piece in [*characters, "▁t", "he", "▁the", "it", "▁it", "'s", "n'", "n't", "�"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "t"), ("▁", "it"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strip else []), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return _wrapped(tokenizer, unk_token="<unk>", **kwargs)


def gemma_like(**kwargs):
    return sentencepiece_bpe(strip=False, **kwargs)


def unigram(**kwargs):
    """As T5 and XLNet: Metaspace pieces of a unigram model."""
    words = sorted({"▁" + word for line in CORPUS for word in line.split()})
    characters = sorted({*"".join(words)})
    pieces = [*SPECIAL, "<unk>", *characters, *words]
    # written down, for the trainer makes another vocabulary every time
    vocab = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.index("<unk>")))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer, unk_token="<unk>", **kwargs)


def word_piece(**kwargs):
    """As BERT: ## joins, everything else is a word of its own."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=kwargs.pop("decoder_cleanup", True))
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, unk_token="<unk>", **kwargs)


def word_piece_cleaned_up():
    return word_piece(decoder_cleanup=False, clean_up_tokenization_spaces=True)


def unigram_cleaned_up():
    return unigram(clean_up_tokenization_spaces=True)


def bpe_cleaned_up():
    """transformers leaves the clean-up out for BPE unless it is forced."""
    return byte_level_bpe(clean_up_tokenization_spaces=True)


def bpe_cleaned_up_by_force():
    return byte_level_bpe(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    )


def word_end_bpe():
    """As the first GPT: a suffix marks the end of a word and shows as a space before the next one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["</w>"])  # an end of word without a word
    return _wrapped(tokenizer, unk_token="<unk>")


def sentencepiece_in_python():
    """As GPT-SW3: no Rust inside, and spaces are stripped off both ends of the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        num_threads=1,
        minloglevel=3,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spiece.model")
        path.write_bytes(model.getvalue())
        tokenizer = SentencePieceBackend(
            vocab_file=str(path), pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


KINDS = {
    f.__name__: f
    for f in (
        byte_level_bpe,
        sentencepiece_bpe,
        gemma_like,
        unigram,
        word_piece,
        word_piece_cleaned_up,
        unigram_cleaned_up,
        bpe_cleaned_up,
        bpe_cleaned_up_by_force,
        word_end_bpe,
        sentencepiece_in_python,
    )
}
