"""Options of ``/infill`` that plain completions lack: chosen samplers, ends at lines."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from torchax_serve.server.answers import Answer
from torchax_serve.server.errors import bad_request
from torchax_serve.server.notes import note_once
from torchax_serve.text.text_stream import AnswerStep
from torchax_serve.validation.argument_checks import short_repr

_OFF: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
"""Options of each sampler, in the order in which they are applied here, with the values that switch them off."""
_WITHOUT_OPTION = frozenset({"dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "adaptive_p", "infill"})
"""Samplers whose options a request cannot set, and which are off without them; and that of gaps."""


def chosen_samplers(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling options by which samplers that are not named are off, as in llama.cpp.

    Args:
        names: Value of ``samplers``, in the order of the request.
        given: Sampling options of the request, None where it has none.

    Raises:
        ApiError: 400 for a name that is not known, or an order that would give other answers than the one here.
    """
    names = ["temperature" if name == "temp" else name for name in names]
    if unknown := [name for name in names if name not in _OFF and name not in _WITHOUT_OPTION]:
        expected = ", ".join([*_OFF, *sorted(_WITHOUT_OPTION)])
        raise bad_request(f"samplers: expected of {expected}, got {short_repr(unknown[0])}", "samplers")
    if "infill" in names:
        note_once("/infill: the sampler infill of llama.cpp is not applied; tokens are sampled from what others leave")
    used = [name for name in names if name in _OFF and _is_on(name, given)]
    if used != [name for name in _OFF if name in used]:
        message = f"samplers: expected {', '.join(_OFF)} in this order and once, got {', '.join(used)}"
        raise bad_request(message, "samplers", "invalid_value")
    found = dict(given)
    for name, options in _OFF.items():
        if name not in names:
            found |= options
    return found


def _is_on(name: str, given: Mapping[str, Any]) -> bool:
    """Returns whether it matters where a sampler stands in the order."""
    neutral = (None, 0, 1) if name == "temperature" else (None,)
    return any(given[option] not in (off, *neutral) for option, off in _OFF[name].items())


class LineLimits:
    """Ends an answer at a line, as llama.cpp's server does.

    Args:
        least_indent: Spaces and tabs that each line but the first begins with; the answer ends in front of the first
            other character of a line that has less. 0: any number.
        most_s: Seconds behind the first token after which the answer ends with a line; None: no limit.
    """

    def __init__(self, least_indent: int = 0, most_s: float | None = None) -> None:
        self._least_indent, self._most_s = least_indent, most_s
        self._indent: int | None = None  # of a line that has only begun

    def take(self, step: AnswerStep, elapsed_s: float) -> AnswerStep:
        """Returns a step, cut where the answer ends."""
        for place, char in enumerate(step.text):
            if self._indent is not None and char in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._least_indent:
                return dataclasses.replace(step, text=step.text[:place], finish_reason="length", stop=None)
            self._indent = 0 if char == "\n" else None
        is_late = self._most_s is not None and elapsed_s > self._most_s and "\n" in step.text
        return dataclasses.replace(step, finish_reason="length") if is_late and not step.finish_reason else step


async def limited_steps(answer: Answer, limits: LineLimits) -> AsyncGenerator[AnswerStep]:
    """Yields the steps of an answer until it ends or a limit ends it."""
    async with contextlib.aclosing(aiter(answer)) as found:
        async for step in found:
            begun_s = answer.first_s
            step = limits.take(step, 0.0 if begun_s is None else time.monotonic() - begun_s)
            if step.finish_reason is not None and answer.finish_reason != step.finish_reason:
                answer.finish_reason = step.finish_reason
                answer.cancel()
            yield step
            if step.finish_reason is not None:
                return
