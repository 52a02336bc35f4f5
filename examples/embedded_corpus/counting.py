"""Counting up and down, by steps, neighbours of a number, and how many stars stand in a row."""

from __future__ import annotations

import itertools

from embedded_corpus.conversation import Exchange

_UP_FRAMES = (
    "Count from {a} to {b}.",
    "count from {a} to {b}",
    "Count from {a} to {b}, please.",
    "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Count from {a} up to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Numbers from {a} to {b}?",
    "Say the numbers from {a} to {b}.",
    "Which numbers are there from {a} to {b}?",
    "Start at {a} and count to {b}.",
)
_FROM_ONE_FRAMES = (
    "Count to {b}.",
    "count to {b}",
    "Please count to {b}.",
    "Can you count to {b}?",
    "Count up to {b}.",
    "Could you count to {b} for me?",
    "Show me how you count to {b}.",
)
_DOWN_FRAMES = (
    "Count down from {a}.",
    "count down from {a}",
    "Count backwards from {a}.",
    "Can you count down from {a}?",
    "Please count down from {a}.",
    "Start a countdown from {a}.",
    "Countdown from {a}!",
)
_DOWN_TO_FRAMES = ("Count down from {a} to {b}.", "Count from {a} down to {b}.", "Count backwards from {a} to {b}.")
_AFTER_FRAMES = (
    "What number comes after {a}?",
    "Which number comes after {a}?",
    "What comes after {a}?",
    "What is the number after {a}?",
    "What is the next number after {a}?",
)
_BEFORE_FRAMES = (
    "What number comes before {a}?",
    "Which number comes before {a}?",
    "What comes before {a}?",
    "What is the number before {a}?",
)
_HOW_MANY_FRAMES = (
    "How many {w}s are there? {row}",
    "Count the {w}s: {row}",
    "How many {w}s do you see? {row}",
    "{row} How many {w}s is that?",
)
_STEP_FRAMES = ("Count by {s} to {b}.", "Count in steps of {s} up to {b}.", "Count to {b} by {s}.")


def _row(numbers: range) -> str:
    return ", ".join(str(number) for number in numbers)


def _ask(frames: tuple[str, ...], identity: str, answer: str, **fields: object) -> list[Exchange]:
    return [Exchange("counting", frame.format(**fields), answer, identity) for frame in frames]


def exchanges() -> list[Exchange]:
    """All counting questions; what is held out is the pair of bounds, whatever the phrasing."""
    found = []
    for a, b in itertools.product(range(31), range(41)):
        if 1 <= b - a <= 12:
            found += _ask(_UP_FRAMES, f"count {a} to {b}", _row(range(a, b + 1)), a=a, b=b)
            if a <= 20:
                found += _ask(_DOWN_TO_FRAMES, f"count down {b} to {a}", _row(range(b, a - 1, -1)), a=b, b=a)
    for b in range(2, 21):
        found += _ask(_FROM_ONE_FRAMES, f"count 1 to {b}", _row(range(1, b + 1)), b=b)
        found += _ask(_DOWN_FRAMES, f"count down {b} to 1", _row(range(b, 0, -1)), a=b)
    for a in range(99):
        found += _ask(_AFTER_FRAMES, f"after {a}", str(a + 1), a=a)
        found += _ask(_BEFORE_FRAMES, f"before {a + 1}", str(a), a=a + 1)
    for step, count in itertools.product((2, 3, 5, 10), range(3, 11)):
        row = range(step, step * count + 1, step)
        found += _ask(_STEP_FRAMES, f"steps of {step} to {row[-1]}", _row(row), s=step, b=row[-1])
    for word, count in itertools.product(("star", "apple", "cat", "dot", "word"), range(1, 10)):
        shown = " ".join(["*" if word == "star" else "." if word == "dot" else word] * count)
        found += [
            Exchange("counting", frame.format(w=word, row=shown), str(count), frame.format(w=word, row=shown))
            for frame in _HOW_MANY_FRAMES
        ]
    return found
