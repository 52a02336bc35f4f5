"""Seconds that an hour of sound takes to be transcribed: the engine, eager PyTorch and faster-whisper, in turns.

    pip install faster-whisper
    python benchmarks/transcription.py                      # 8 recordings of 450 s, a Whisper base, float32
    python benchmarks/transcription.py --dtype bfloat16     # faster-whisper (CTranslate2) has int8 and float32 on CPUs
    python benchmarks/transcription.py --seconds 60 --turns 1

The Whisper has the shape of openai/whisper-base and random weights, which all sides read from one folder. Timestamps
are asked for. A window has at most 64 tokens, since random weights end none: sides read about as much sound at a time,
and write about as many tokens for it. Eager PyTorch reads the recordings as one batch of ``generate``, by its algorithm
for long sound; the engine is given them by ``serve(folder).transcribe``, which is the same algorithm for each;
faster-whisper reads them one after the other, each as a batch of eight pieces of 30 s. Features are computed by each
side itself. Printed are medians of seconds of the clock and of the processor; without faster-whisper the other two are
compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from processors import processor

RATE, WINDOW_S, TOKENS_OF_WINDOW = 16_000, 30, 64
EOS, START, VOCAB_SIZE = 50257, 50258, 51865
NUM_LANGUAGES, TRANSLATE, TRANSCRIBE, NO_TIMES = 99, 50358, 50359, 50363
NAMES_AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def tokenizer() -> Any:
    """Makes a tokenizer with the ids of the multilingual Whisper; its words mean nothing."""
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = sorted(ByteLevel.alphabet())
    words = letters + [f"Ġ{index:x}" for index in range(EOS - len(letters))]
    made = WhisperTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    names = ["startoftranscript", *list(LANGUAGES)[:NUM_LANGUAGES], *NAMES_AFTER_LANGUAGES]
    special = [f"<|{name}|>" for name in names]
    made.add_special_tokens({"pad_token": "<|endoftext|>", "extra_special_tokens": special})
    made.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", special=False) for index in range(1501)])
    ids = made.convert_tokens_to_ids(["<|endoftext|>", "<|transcribe|>", "<|notimestamps|>", "<|30.00|>"])
    assert ids == [EOS, TRANSCRIBE, NO_TIMES, VOCAB_SIZE - 1], ids
    return made


def save_model(folder: Path) -> None:
    """Writes a random Whisper base with its tokenizer and feature extractor."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    ids = {"pad_token_id": EOS, "bos_token_id": EOS, "eos_token_id": EOS, "decoder_start_token_id": START}
    config = WhisperConfig(vocab_size=VOCAB_SIZE, num_mel_bins=80, d_model=512, encoder_layers=6, decoder_layers=6,
                           encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
                           decoder_ffn_dim=2048, **ids)  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    asked = {"is_multilingual": True, "lang_to_id": {"<|en|>": START + 1}, "no_timestamps_token_id": NO_TIMES}
    asked |= {"task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "suppress_tokens": [EOS]}
    for name, value in (asked | ids).items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # else transformers does not read these again
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


class Eager:
    """``generate`` of transformers, all recordings in one batch."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoProcessor, WhisperForConditionalGeneration

        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._processor: Any = AutoProcessor.from_pretrained(folder)

    def run(self, recordings: Sequence[np.ndarray]) -> list[str]:
        """Returns the text of each recording."""
        features = self._processor(
            recordings, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
            return_attention_mask=True,
        )  # fmt: skip
        features["input_features"] = features["input_features"].to(self._model.dtype)
        options = {"return_timestamps": True, "language": "en", "task": "transcribe", "do_sample": False}
        tokens = self._model.generate(**features, **options, max_new_tokens=TOKENS_OF_WINDOW)
        return [text.strip() for text in self._processor.batch_decode(tokens, skip_special_tokens=True)]

    def close(self) -> None:
        """Does nothing."""


class Engine:
    """``transcribe`` of a served model."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from torchax_serve import serve

        self._model: Any = serve(str(folder), dtype=dtype)

    def run(self, recordings: Sequence[np.ndarray]) -> list[str]:
        """Returns the text of each recording."""
        options = {"language": "en", "task": "transcribe", "do_sample": False, "max_new_tokens": TOKENS_OF_WINDOW}
        texts: list[str] = self._model.transcribe(list(recordings), sampling_rate=RATE, **options)
        return texts

    def close(self) -> None:
        """Frees the model."""
        self._model.close()


class FasterWhisper:
    """CTranslate2's Whisper, a recording at a time in batches of eight pieces."""

    def __init__(self, folder: Path, compute_type: str) -> None:
        import faster_whisper
        from ctranslate2.converters import TransformersConverter

        converted = folder.parent / "converted"
        if not converted.exists():
            files = ["tokenizer.json", "preprocessor_config.json"]
            TransformersConverter(str(folder), copy_files=files).convert(str(converted))
        threads = len(os.sched_getaffinity(0))
        model = faster_whisper.WhisperModel(str(converted), compute_type=compute_type, cpu_threads=threads)
        self._pipeline = faster_whisper.BatchedInferencePipeline(model)

    def run(self, recordings: Sequence[np.ndarray]) -> list[str]:
        """Returns the text of each recording."""
        texts = []
        for recording in recordings:
            borders = np.arange(0, recording.size / RATE, WINDOW_S)
            pieces = [{"start": float(at), "end": min(at + WINDOW_S, recording.size / RATE)} for at in borders]
            segments, _ = self._pipeline.transcribe(
                recording, batch_size=8, language="en", vad_filter=False, clip_timestamps=pieces, beam_size=1,
                without_timestamps=False, temperature=0, max_new_tokens=TOKENS_OF_WINDOW, suppress_tokens=[EOS],
                compression_ratio_threshold=None, log_prob_threshold=None, no_speech_threshold=None,
            )  # fmt: skip
            texts.append("".join(segment.text for segment in segments).strip())
        return texts

    def close(self) -> None:
        """Does nothing."""


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds of the clock and of all processors, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Runs all sides in turns; the first call of each is not counted."""
    rng = np.random.default_rng(0)
    lengths = [given.seconds * RATE] * given.recordings
    recordings = [rng.standard_normal(length).astype(np.float32) * 0.1 for length in lengths]
    sides: dict[str, Any] = {"eager": Eager(folder, given.dtype), "engine": Engine(folder, given.dtype)}
    if importlib.util.find_spec("faster_whisper") is not None:
        sides["faster-whisper"] = FasterWhisper(folder, given.compute_type)
    found: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in sides}
    short = [each[: 45 * RATE] for each in recordings]
    first = {name: timed(lambda side=side: side.run(short)) for name, side in sides.items()}
    for turn in range(given.turns):
        for name in sides if turn % 2 else list(reversed(sides)):
            found[name].append(timed(lambda name=name: sides[name].run(recordings)))
            print(f"{name:15} {found[name][-1][0]:8.1f} s, {found[name][-1][1]:8.1f} s of the processor", flush=True)
    for side in sides.values():
        side.close()
    medians = {
        name: {
            "s": round(statistics.median(each[0] for each in rows), 1),
            "cpu_s": round(statistics.median(each[1] for each in rows), 1),
            "first_s": round(first[name][0], 1),
            "words": sum(len(text.split()) for text in rows[-1][2]),
        }
        for name, rows in found.items()
    }
    texts = {name: rows[-1][2] for name, rows in found.items()}
    ratios: dict[str, dict[str, float]] = {}
    for name in set(found) - {"engine"}:
        for at, key in enumerate(("s", "cpu_s")):
            pairs = zip(found[name], found["engine"], strict=True)
            ratio = statistics.median(theirs[at] / ours[at] for theirs, ours in pairs)
            ratios.setdefault(f"engine over {name}", {})[key] = round(ratio, 2)
    equal = sum(ours == theirs for ours, theirs in zip(texts["engine"], texts["eager"], strict=True))
    return {"sides": medians, "ratios": ratios, "texts_equal_to_eager": f"{equal} of {len(recordings)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compute-type", choices=["float32", "int8"], default="float32", help="of faster-whisper")
    parser.add_argument("--recordings", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=450, help="of each recording")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "whisper"
        save_model(model)
        found = measure(model, given)
    names = ("torch", "jax", "transformers", "faster-whisper", "ctranslate2")
    versions = {}
    for name in names:
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            versions[name] = importlib.metadata.version(name)
    asked = {name: getattr(given, name) for name in ("dtype", "compute_type", "recordings", "seconds", "turns")}
    result = {**asked, "processor": processor(), "cores": os.cpu_count(), "versions": versions, **found}
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
