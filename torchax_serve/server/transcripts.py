"""Transcripts in OpenAI's forms: text, JSON with times, subtitles, events of a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from typing import TYPE_CHECKING, Any

from torchax_serve.outputs import Transcript
from torchax_serve.server.sse import DONE, event

if TYPE_CHECKING:
    from torchax_serve.generation.transcript_pieces import TranscriptStream  # imports torch


def usage_of(duration_s: float) -> dict[str, Any]:
    """Returns the usage of a transcription, which counts seconds of audio."""
    return {"type": "duration", "seconds": max(1, round(duration_s))}


def verbose_json(
    transcript: Transcript, granularities: Collection[str], *, task: str, temperature: float
) -> dict[str, Any]:
    """Returns a transcript as ``verbose_json``.

    Args:
        transcript: The transcript.
        granularities: What is to have times: ``segment``, ``word`` or both.
        task: ``transcribe`` or ``translate``.
        temperature: That of the request.
    """
    found: dict[str, Any] = {
        "task": task,
        "language": "english" if task == "translate" else transcript.language or "unknown",
        "duration": transcript.duration_s,
        "text": transcript.text,
        "usage": usage_of(transcript.duration_s),
    }
    if "segment" in granularities:
        found["segments"] = [
            {
                "id": index,
                "seek": segment.seek,
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "tokens": segment.token_ids,
                "temperature": temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
            }
            for index, segment in enumerate(transcript.segments)
        ]
    if "word" in granularities:
        words = transcript.words or ()
        found["words"] = [{"word": word.text, "start": word.start_s, "end": word.end_s} for word in words]
    return found


def srt(transcript: Transcript) -> str:
    """Returns a transcript as SubRip subtitles."""
    cues = [
        f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{_cue(segment.text)}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(cues)


def vtt(transcript: Transcript) -> str:
    """Returns a transcript as WebVTT subtitles."""
    cues = [
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n{_cue(segment.text)}\n"
        for segment in transcript.segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _cue(text: str) -> str:
    """Returns a text without what would end its cue."""
    return " ".join(text.replace("-->", "->").split())


def _time(seconds: float, separator: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{separator}{milliseconds % 1000:03d}"


async def events(pieces: TranscriptStream) -> AsyncGenerator[bytes]:
    """Yields the events of a streamed transcript."""
    text = ""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            text += piece
            yield event({"type": "transcript.text.delta", "delta": piece})
    yield event({"type": "transcript.text.done", "text": text})
    yield DONE
