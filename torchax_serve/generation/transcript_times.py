"""Transcripts with times: segments by Whisper's tokens, words by its attention.

Segments are those of transformers' ``generate(return_timestamps=True)``. One forward of each window with its answer
then gives what ``generate`` does not: probabilities, and the cross-attention by which words are aligned (dynamic time
warping, as in OpenAI's Whisper; transformers' code). So the tokens are the same, whatever is asked for.
"""

from __future__ import annotations

import bisect
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.models.whisper import tokenization_whisper
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.utils import ModelOutput

from model_adapters.errors import UnsupportedModelError
from torchax_serve.buckets import next_bucket
from torchax_serve.outputs import Transcript, TranscriptSegment, TranscriptWord

TIME_PRECISION_S = 0.02
"""Seconds between two time tokens of Whisper, which are two frames of features."""
FRAMES_PER_TIME_TOKEN = 2


def check_times(model: Any, tokenizer: Any, *, words: bool) -> None:
    """Checks that a model writes times.

    Args:
        model: The model on JAX.
        tokenizer: Its tokenizer.
        words: Whether words are to have times, too.

    Raises:
        UnsupportedModelError: it does not; the message says what is missing.
    """
    name = type(model).__name__
    if not isinstance(model, WhisperGenerationMixin) or time_begin(model) is None:
        raise UnsupportedModelError(
            f"times: expected a Whisper model whose generation_config has no_timestamps_token_id, got {name} without; "
            "call transcribe()"
        )
    if not words:
        return
    if getattr(model.generation_config, "alignment_heads", None) is None:
        raise UnsupportedModelError(
            f"times of words: expected a generation_config with alignment_heads, {name} has none; ask for segments"
        )
    if not isinstance(tokenizer, tokenization_whisper.WhisperTokenizer):
        raise UnsupportedModelError(
            f"times of words: expected a WhisperTokenizer, which knows words, got {type(tokenizer).__name__}; ask for "
            "segments"
        )


def time_begin(model: Any) -> int | None:
    """Returns the id of the first time token; None for a model without."""
    token_id: int | None = getattr(model.generation_config, "no_timestamps_token_id", None)
    return None if token_id is None else token_id + 1


def finished_ids(window_ids: Sequence[int], begin: int) -> list[int]:
    """Returns the tokens of a window that are part of the transcript.

    The next window begins at the last pair of time tokens, and what is behind it is computed again there, unless a
    single time token ends the answer.

    Args:
        window_ids: Tokens of the window's answer, without its prompt and the end-of-sequence token.
        begin: Id of the first time token.
    """
    is_time = [token_id >= begin for token_id in window_ids]
    pairs = [index + 1 for index in range(len(is_time) - 1) if is_time[index] and is_time[index + 1]]
    is_complete = not pairs or is_time[-2:] == [False, True]
    return list(window_ids if is_complete else window_ids[: pairs[-1] + 1])


@dataclasses.dataclass
class _Window:
    """A window of audio, with its answer.

    The answer is int64[len] tokens, of which the first `prompt_len` are the prompt.
    """

    ids: torch.Tensor
    prompt_len: int
    segments: list[dict[str, Any]]
    seek: int = 0  # frame at which it begins


@dataclasses.dataclass(frozen=True)
class _Details:
    avg_logprob: float
    no_speech_prob: float
    token_times: list[float] | None  # end of each token in seconds from the begin of the window, prompt included


class TimedTranscription:
    """One transcription with times.

    Args:
        model: Whisper on JAX.
        tokenizer: Its tokenizer.
        inputs: ``input_features`` float[1, bins, frames] and ``attention_mask`` int[1, frames].
        duration_s: Seconds of the audio.
        words: Whether words have times.
    """

    def __init__(
        self, model: Any, tokenizer: Any, inputs: Mapping[str, torch.Tensor], duration_s: float, *, words: bool
    ) -> None:
        check_times(model, tokenizer, words=words)
        begin = time_begin(model)
        assert begin is not None
        self._model, self._tokenizer, self._inputs = model, tokenizer, inputs
        self._duration_s, self._words, self._begin = duration_s, words, begin

    def run(self, check: Callable[[], None], **options: Any) -> Transcript:
        """Returns the transcript.

        Args:
            check: Called before each window; what it raises ends the call.
            **options: Further options of ``generate``.
        """
        seeks: list[int] = []

        def on_window(progress: torch.Tensor) -> None:
            check()
            seeks.append(int(progress[0, 0]))

        found = self._model.generate(
            **self._inputs, **options, return_timestamps=True, return_segments=True, monitor_progress=on_window
        )
        windows = _windows(found["segments"][0], seeks)
        details: list[_Details] = []
        segments: list[TranscriptSegment] = []
        for window in windows:
            check()
            details.append(self._details(window))
            segments += self._segments(window, details[-1])
        return Transcript(
            text=self._text([token_id for segment in segments for token_id in segment.token_ids]).strip(),
            duration_s=self._duration_s,
            language=self._language(windows),
            segments=segments,
            words=self._transcript_words(windows, details) if self._words else None,
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([each for each in ids if each < self._begin], skip_special_tokens=True))

    def _language(self, windows: Sequence[_Window]) -> str | None:
        """Returns the language that the prompt of the first window names."""
        codes = {token_id: code.strip("<|>") for code, token_id in self._languages.items()}
        code = next((codes[token_id] for token_id in self._language_ids(windows)), None)
        if code is None:
            return None if getattr(self._model.generation_config, "is_multilingual", False) else "english"
        return tokenization_whisper.LANGUAGES.get(code, code)

    def _language_ids(self, windows: Sequence[_Window]) -> list[int]:
        """Returns the token of the language in the prompt of the first window.

        None of a model of one language.
        """
        prompt = windows[0].ids[: windows[0].prompt_len].tolist() if windows else []
        return [token_id for token_id in prompt if token_id in self._languages.values()]

    @property
    def _languages(self) -> dict[str, int]:
        return getattr(self._model.generation_config, "lang_to_id", None) or {}

    def _segments(self, window: _Window, details: _Details) -> list[TranscriptSegment]:
        texts = [self._text(segment["tokens"].tolist()) for segment in window.segments]
        data = "".join(texts).encode()
        ratio = len(data) / len(zlib.compress(data))
        return [
            TranscriptSegment(
                text=text,
                start_s=round(float(segment["start"]), 3),
                end_s=round(float(segment["end"]), 3),
                token_ids=segment["tokens"].tolist(),
                seek=window.seek,
                avg_logprob=details.avg_logprob,
                no_speech_prob=details.no_speech_prob,
                compression_ratio=ratio,
            )
            for segment, text in zip(window.segments, texts, strict=True)
        ]

    def _details(self, window: _Window) -> _Details:
        """Computes the forward of a window with its answer.

        The answer is padded to a bucket: behind its end nothing is read, and there are few programs.
        """
        config, num_tokens = self._model.config, len(window.ids)
        width = min(next_bucket(num_tokens), config.max_target_positions)
        ids = torch.nn.functional.pad(window.ids, (0, width - num_tokens), value=config.pad_token_id or 0)
        output = self._model(
            input_features=self._window_features(window),
            decoder_input_ids=ids[None],
            output_attentions=self._words,
            use_cache=False,
        )
        logprobs = output.logits[0, : num_tokens - 1].float().log_softmax(-1)
        chosen = logprobs[window.prompt_len - 1 :].gather(1, window.ids[window.prompt_len :, None])
        prompt = window.ids[: window.prompt_len].tolist()
        start = config.decoder_start_token_id
        no_speech = logprobs[prompt.index(start) if start in prompt else 0, self._begin - 2].exp()
        times = self._token_times(window, output.cross_attentions) if self._words else None
        return _Details(float(chosen.mean()), float(no_speech), times)

    def _window_features(self, window: _Window) -> torch.Tensor:
        """Returns the features of a window, float[1, bins, frames], zero-padded as in ``generate``."""
        features = self._inputs["input_features"]
        num_frames = FRAMES_PER_TIME_TOKEN * self._model.config.max_source_positions
        found = features[:, :, window.seek : window.seek + num_frames]
        return torch.nn.functional.pad(found, (0, num_frames - found.shape[-1]))

    def _token_times(self, window: _Window, attentions: Sequence[torch.Tensor]) -> list[float]:
        """Returns the end of each token in seconds.

        It follows from the weights float[1, heads, tokens, positions] of each layer.

        Those of the last token are left out, as ``generate`` has none for it.
        """
        weights = tuple(layer[:, :, : len(window.ids) - 1] for layer in attentions)
        times = self._model._extract_token_timestamps(
            ModelOutput(sequences=window.ids[None], cross_attentions=(weights,)),
            self._model.generation_config.alignment_heads,
            num_frames=self._inputs["attention_mask"].sum(-1) - window.seek,
            num_input_ids=window.prompt_len,
        )
        found: list[float] = times[0].tolist()
        return found

    def _transcript_words(self, windows: Sequence[_Window], details: Sequence[_Details]) -> list[TranscriptWord]:
        """Returns the words of all windows, as transformers' pipeline makes them."""
        ids, times = self._language_ids(windows), [0.0]
        times *= len(ids)
        for window, detail in zip(windows, details, strict=True):
            assert detail.token_times is not None
            offset_s = window.seek * TIME_PRECISION_S / FRAMES_PER_TIME_TOKEN
            for segment in window.segments:
                begin, end = segment["idxs"]
                ids += window.ids[begin:end].tolist()
                times += [time_s + offset_s for time_s in detail.token_times[begin:end]]
        answer = {"tokens": torch.tensor([ids]), "token_timestamps": torch.tensor([times], dtype=torch.float64)}
        _, found = self._tokenizer._decode_asr(
            [answer], return_timestamps="word", return_language=False, time_precision=TIME_PRECISION_S
        )
        return [TranscriptWord(word["text"].strip(), *word["timestamp"]) for word in found["chunks"]]


def _windows(segments: Sequence[dict[str, Any]], seeks: Sequence[int]) -> list[_Window]:
    """Returns the windows that segments are from, in their order.

    Args:
        segments: As ``generate`` returns them.
        seeks: Frames at which the windows begin, those without segments included.
    """
    windows: list[_Window] = []
    answer: Any = None
    for segment in segments:
        if segment["result"] is not answer:
            answer = segment["result"]  # a record, where temperatures are compared by log-probabilities
            ids = answer if isinstance(answer, torch.Tensor) else answer["sequences"]
            windows.append(_Window(ids, segment["idxs"][0], []))
        windows[-1].segments.append(segment)
    if len(windows) == len(seeks):
        for window, seek in zip(windows, seeks, strict=True):
            window.seek = seek
        return windows
    starts = [seek * TIME_PRECISION_S / FRAMES_PER_TIME_TOKEN for seek in seeks]  # windows were skipped
    for window in windows:
        index = bisect.bisect_right(starts, float(window.segments[0]["start"]) + 1e-6) - 1
        window.seek = seeks[max(0, index)]
    return windows
