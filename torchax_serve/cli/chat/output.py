"""Writes an answer: its text to stdout, its counts and times to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys

from torchax_serve.cli.shared.terminal import hidden_keys, is_terminal, passing_note, print_note, strip_control_chars
from torchax_serve.outputs import GenerationStats
from torchax_serve.text.text_stream import TextStream


def stats_line(stats: GenerationStats) -> str:
    """Formats the last line of an answer: tokens, time to first token and rate.

    It also has the reason if the answer ended early.
    """
    parts = [f"{stats.prompt_tokens} prompt + {stats.new_tokens} new tokens"]
    if stats.ttft_s is not None:
        parts.append(f"first token {stats.ttft_s:.2f} s")
    if stats.decode_tokens_per_s is not None:
        parts.append(f"{stats.decode_tokens_per_s:.1f} tokens/s")
    if stats.finish_reason == "length":
        parts.append("cut at the length limit (--max-new-tokens)")
    if stats.finish_reason == "abort":
        parts.append("stopped")
    return " · ".join(parts)


def write_answer(answer: TextStream, *, model_name: str, as_json: bool) -> None:
    """Writes `answer` as it comes, or as one JSON object at its end, and the last line.

    An interrupted answer is stopped, its line ended, and the interruption raised again.

    Raises:
        KeyboardInterrupt: Ctrl-C, once the answer has been stopped.
        BrokenPipeError: The reader of stdout has gone.
    """
    with answer, hidden_keys():
        try:
            if as_json:
                for _ in answer:
                    pass
                print(json.dumps(as_object(answer, model_name), ensure_ascii=False), flush=True)
            else:
                _write_pieces(answer)
        except KeyboardInterrupt:
            answer.close()
            if is_terminal(sys.stdout):
                print(flush=True)  # the line holds half an answer, or the ^C that the terminal shows
            print_note(stats_line(answer.stats))
            raise
    print_note(stats_line(answer.stats))


def as_object(answer: TextStream, model_name: str) -> dict[str, object]:
    """Returns the object that ``--json`` prints for an answer."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stats": dataclasses.asdict(answer.stats),
        "model": model_name,
    }


def _write_pieces(answer: TextStream) -> None:
    on_terminal = is_terminal(sys.stdout)
    last = ""
    with passing_note("reading the prompt (a new shape is compiled first) ...") as take_note_away:
        for piece in answer:
            take_note_away()
            last = strip_control_chars(piece) if on_terminal else piece
            sys.stdout.write(last)
            sys.stdout.flush()
    if not last.endswith("\n"):
        print(flush=True)
