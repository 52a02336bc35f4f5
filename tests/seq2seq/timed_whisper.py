"""A tiny random Whisper in a folder with the tokens of a real one: text, languages, tasks and times."""

import numpy as np
import transformers
from tiny_whisper import tiny_whisper
from tokenizers import AddedToken
from transformers import WhisperFeatureExtractor, WhisperTokenizer

RATE = 16_000
LETTERS = "abcdefghijklmnopqrs"
NAMES = ["startoftranscript", "en", "de", "transcribe", "translate", "startofprev", "nospeech", "notimestamps"]
EOS, START, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, NO_SPEECH, NO_TIMES = 40, 41, 42, 43, 44, 45, 47, 48
VOCAB_SIZE = 150  # times from 0.00 to 2.00 s


def tokenizer():
    vocab = [*LETTERS, *(f"Ġ{letter}" for letter in LETTERS), ".", ","]
    made = WhisperTokenizer(vocab={token: index for index, token in enumerate(vocab)}, merges=[])
    names = [f"<|{name}|>" for name in NAMES]
    made.add_special_tokens({"pad_token": "<|endoftext|>", "extra_special_tokens": names})
    assert set(made.all_special_ids) == set(range(EOS, NO_TIMES + 1))
    made.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", special=False) for index in range(101)])
    assert made.eos_token_id == EOS
    assert made.convert_tokens_to_ids("<|notimestamps|>") == NO_TIMES
    assert made.convert_tokens_to_ids("<|2.00|>") == VOCAB_SIZE - 1
    return made


def timed_whisper(path, **generation):
    """Saves the model, which hears two seconds at a time; returns it in eager PyTorch."""
    options = {
        "suppress_tokens": None,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": NO_TIMES,
        "alignment_heads": [[0, 1], [1, 2]],
        **generation,
    }
    ids = {"pad_token_id": EOS, "bos_token_id": EOS, "eos_token_id": EOS, "decoder_start_token_id": START}
    model = tiny_whisper(vocab_size=VOCAB_SIZE, **options)
    model.config.update(ids)
    model.generation_config.update(**ids)
    model.save_pretrained(path)
    WhisperFeatureExtractor(chunk_length=2, sampling_rate=RATE).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()


def noise(seconds, seed=0):
    return np.random.default_rng(seed).standard_normal(int(seconds * RATE)).astype(np.float32) * 0.1
