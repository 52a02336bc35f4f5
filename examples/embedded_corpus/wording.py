"""The same question as different people type it: other words, fewer words, a greeting in front, a typo."""

from __future__ import annotations

import random
import re

_BEFORE = (
    "Please: ",
    "Hi, ",
    "Hey, ",
    "Ok, ",
    "So, ",
    "Quick question: ",
    "Hello! ",
    "Well, ",
    "And ",
    "Now: ",
    "Please, ",
    "Sorry, ",
    "One more question: ",
    "I wonder, ",
    "Tell me, ",
    "I would like to know: ",
    "Maybe you know: ",
    "By the way, ",
)
_AFTER = (" Please.", " Thanks!", " please", " Please tell me.", " Thank you.", " In short, please.", " I am new here.")
# Only words that can stand for each other in every question of the corpus.
_SYNONYMS = (
    ("how do i", "how can i", "how could i", "how would i", "how does one", "what is the way to", "how should i"),
    ("can i", "may i", "could i", "am i able to", "is it possible to"),
    ("i want to", "i would like to", "i'd like to", "i wish to"),
    ("tell me about", "talk about", "inform me about", "say more about"),
    ("explain", "clarify", "describe"),
    ("what is", "what's", "what exactly is", "what would be"),
    ("run", "start", "launch"),
    ("show", "display", "print"),
    ("make", "create", "produce"),
    ("many", "several", "lots of"),
    ("measure", "find out", "determine"),
    ("folder", "directory"),
    ("right", "correct"),
    ("big", "large"),
    ("need", "require"),
    ("change", "modify", "alter"),
    ("choose", "pick", "select"),
    ("people", "users"),
)
_SMALL_WORDS = {
    "the",
    "a",
    "an",
    "do",
    "does",
    "is",
    "are",
    "of",
    "to",
    "i",
    "me",
    "for",
    "in",
    "it",
    "you",
    "can",
    "with",
}


def loosely_worded(rng: random.Random, prompt: str) -> str:
    """`prompt` with some of the changes that leave its meaning; now and then unchanged."""
    if rng.random() < 0.5:
        prompt = _with_synonyms(rng, prompt)
    if rng.random() < 0.2:
        prompt = _telegraphic(rng, prompt)
    if rng.random() < 0.4:
        prompt = prompt.lower()
    if rng.random() < 0.3:
        prompt = prompt.rstrip("?.")
    if rng.random() < 0.25:
        prompt = rng.choice(_BEFORE) + prompt[0].lower() + prompt[1:]
    if rng.random() < 0.15:
        prompt += rng.choice(_AFTER)
    if rng.random() < 0.2:
        prompt = _with_typo(rng, prompt)
    return prompt


def _with_synonyms(rng: random.Random, prompt: str) -> str:
    for group in _SYNONYMS:
        for phrase in group:
            match = re.search(rf"(?<![\w.-]){re.escape(phrase)}(?![\w.-])", prompt, re.IGNORECASE)
            if match:
                chosen = rng.choice(group)
                chosen = chosen[0].upper() + chosen[1:] if match.start() == 0 else chosen
                prompt = prompt[: match.start()] + chosen + prompt[match.end() :]
                break
    return prompt


def _telegraphic(rng: random.Random, prompt: str) -> str:
    """Small words left out, as in a search field; never all words."""
    words = prompt.split()
    kept = [word for word in words if word.lower() not in _SMALL_WORDS or rng.random() < 0.4]
    return " ".join(kept) if len(kept) >= 2 else prompt


def _with_typo(rng: random.Random, prompt: str) -> str:
    """One letter dropped or two swapped inside a word of at least five letters; the prompt itself if it has none."""
    long_words = list(re.finditer(r"[a-zA-Z]{5,}", prompt))
    if not long_words:
        return prompt
    word = rng.choice(long_words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    if rng.random() < 0.5:
        return prompt[:at] + prompt[at + 1 :]
    return prompt[:at] + prompt[at + 1] + prompt[at] + prompt[at + 2 :]
