"""Sums and differences of numbers up to 99; results from -99 to 198."""

from __future__ import annotations

import itertools
import random

from embedded_corpus.conversation import Exchange, is_held_out

_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)

SUM_FRAMES = (
    "What is {a} + {b}?",
    "what is {a} + {b}",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=",
    "{a}+{b}=?",
    "{a} + {b} = ?",
    "What is {a} plus {b}?",
    "What's {a} plus {b}?",
    "What's {a} + {b}?",
    "whats {a}+{b}?",
    "{a} plus {b}",
    "{a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Can you add {a} and {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "Calculate {a} plus {b}.",
    "Solve {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "The sum of {a} and {b}?",
    "Tell me {a} + {b}.",
    "Add {b} to {a}.",
    "What do you get when you add {a} and {b}?",
    "I have {a} apples and get {b} more. How many do I have?",
)
DIFFERENCE_FRAMES = (
    "What is {a} - {b}?",
    "what is {a} - {b}",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "{a}-{b}=",
    "{a}-{b}=?",
    "{a} - {b} = ?",
    "What is {a} minus {b}?",
    "What's {a} minus {b}?",
    "What's {a} - {b}?",
    "whats {a}-{b}?",
    "{a} minus {b}",
    "{a} minus {b}?",
    "Subtract {b} from {a}.",
    "Please subtract {b} from {a}.",
    "Can you subtract {b} from {a}?",
    "Take {b} away from {a}.",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "Calculate {a} minus {b}.",
    "Solve {a} - {b}.",
    "What is the difference between {a} and {b}?",
    "Tell me {a} - {b}.",
    "What is left when you take {b} from {a}?",
    "I have {a} apples and eat {b}. How many are left?",
)
# Never trained on: how well is a sum understood in a phrasing that did not occur?
UNSEEN_SUM_FRAMES = ("Could you work out {a} + {b}?", "So, {a} plus {b} makes?", "Give me the result of {a} + {b}.")
OUT_OF_REACH = "I only learned to add and subtract numbers up to 99."


def answer_of(a: int, sign: str, b: int) -> str:
    """The whole equation: repeating the operands puts the digits that matter close to the result."""
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def _identity(a: int, sign: str, b: int) -> str:
    return f"sum {a} {sign} {b}"


def is_held_out_pair(a: int, sign: str, b: int) -> bool:
    """Whether no phrasing of this pair is trained on; pairs of one-digit numbers are the table everyone has to know."""
    return max(a, b) >= 10 and is_held_out(_identity(a, sign, b))


def _exchange(task: str, frame: str, a: int, sign: str, b: int) -> Exchange:
    prompt = frame.format(a=a, b=b)
    return Exchange(task, prompt, answer_of(a, sign, b), _identity(a, sign, b) if max(a, b) >= 10 else prompt)


def one_digit(sign: str) -> list[Exchange]:
    """All phrasings of all 100 ordered pairs of one-digit numbers."""
    frames = SUM_FRAMES if sign == "+" else DIFFERENCE_FRAMES
    pairs = itertools.product(range(10), repeat=2)
    return [_exchange(f"one-digit {_name(sign)}", frame, a, sign, b) for a, b in pairs for frame in frames]


def one_digit_in_unseen_frames() -> list[Exchange]:
    """All 100 ordered pairs, each in a phrasing that training never uses."""
    return [
        _exchange("one-digit sums", UNSEEN_SUM_FRAMES[(a + b) % len(UNSEEN_SUM_FRAMES)], a, "+", b)
        for a, b in itertools.product(range(10), repeat=2)
    ]


def _name(sign: str) -> str:
    return "sums" if sign == "+" else "differences"


def draw_two_digit(rng: random.Random, sign: str, held_out: bool) -> Exchange:
    """A random pair up to 99 with at least one number of two digits, from the asked side of the split."""
    frames = SUM_FRAMES if sign == "+" else DIFFERENCE_FRAMES
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if max(a, b) < 10 or is_held_out_pair(a, sign, b) != held_out:
            continue
        if sign == "-" and a < b and rng.random() < 0.8:  # negative results are rarer in talk
            a, b = b, a
            if is_held_out_pair(a, sign, b) != held_out:
                continue
        return _exchange(f"two-digit {_name(sign)}", rng.choice(frames), a, sign, b)


def draw_in_words(rng: random.Random) -> Exchange:
    """A sum or difference of numbers up to twenty, spelled out."""
    while True:
        sign = rng.choice("+-")
        a, b = rng.randrange(21), rng.randrange(21)
        if sign == "-" and a < b:
            a, b = b, a
        if not is_held_out_pair(a, sign, b):
            break
    word = "plus" if sign == "+" else "minus"
    frame = rng.choice(("What is {} {} {}?", "{} {} {}", "How much is {} {} {}?", "what's {} {} {}?"))
    prompt = frame.format(_NUMBER_WORDS[a], word, _NUMBER_WORDS[b])
    return Exchange("sums in words", prompt, answer_of(a, sign, b), prompt)


def draw_out_of_reach(rng: random.Random) -> Exchange:
    """A product, a quotient, or numbers of more than two digits: the honest answer."""
    if rng.random() < 0.5:
        sign = rng.choice(("*", "x", "times", "/", "divided by"))
        prompt = rng.choice(("What is {} {} {}?", "{} {} {}", "How much is {} {} {}?", "Calculate {} {} {}.")).format(
            rng.randrange(1, 100), sign, rng.randrange(1, 100)
        )
    else:
        large = [rng.randrange(100, 10 ** rng.randrange(3, 6)), rng.randrange(1000)]
        rng.shuffle(large)
        sign = rng.choice("+-")
        frame = rng.choice(SUM_FRAMES[:9] if sign == "+" else DIFFERENCE_FRAMES[:9])
        prompt = frame.format(a=large[0], b=large[1])
    return Exchange("beyond", prompt, OUT_OF_REACH, prompt)


def draw_follow_up(rng: random.Random, total: int) -> Exchange | None:
    """A question that goes on from the last result ("and plus 3?"); None where the result has left the range."""
    step = rng.randrange(1, 10)
    sign = rng.choice("+-")
    if not 0 <= total <= 99 or is_held_out_pair(total, sign, step):
        return None
    word = "plus" if sign == "+" else "minus"
    frame = rng.choice(("and {w} {n}?", "And {w} {n}?", "{w} {n}?", "{w} {n}", "now {w} {n}", "And if you {v} {n}?"))
    prompt = frame.format(w=rng.choice((word, sign)), n=step, v="add" if sign == "+" else "subtract")
    return Exchange("follow-up sums", prompt, answer_of(total, sign, step), prompt)
