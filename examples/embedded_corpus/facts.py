"""Questions with one fixed answer each: read from the TOML files of ``data``, and expanded."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedded_corpus.conversation import Exchange, all_wordings


@dataclass(frozen=True)
class Fact:
    """One answer and the ways to ask for it.

    `about` are the names of the thing, put into `DEFINITION_FRAMES`; `ask` are patterns of whole questions;
    `unseen` are questions written by hand for evaluation, never trained on.
    """

    answer: str
    about: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


DEFINITION_FRAMES = (
    "What is {}?",
    "What's {}?",
    "what is {}",
    "{}?",
    "{}",
    "Tell me about {}.",
    "Explain {}.",
    "Can you explain {}?",
    "Could you explain {} to me?",
    "What does {} mean?",
    "What does {} do?",
    "What is {} for?",
    "What is {} good for?",
    "What is {} used for?",
    "Why {}?",
    "How does {} work?",
    "Define {}.",
    "Describe {} briefly.",
    "Describe {} in one sentence.",
    "Do you know what {} is?",
    "Do you know {}?",
    "I want to know about {}.",
    "I have never heard of {}.",
    "What do you know about {}?",
    "Give me a short explanation of {}.",
    "In one sentence, what is {}?",
    "In simple words, what is {}?",
    "What is meant by {}?",
    "How would you explain {}?",
    "Help me understand {}.",
    "I do not understand {}.",
    "What is the point of {}?",
    "What is the purpose of {}?",
    "What can I do with {}?",
    "When do I need {}?",
    "Teach me about {}.",
    "What exactly is {}?",
    "Say something about {}.",
    "Quick question: what is {}?",
    "I keep reading about {}, what is it?",
    "A colleague mentioned {}. What is that?",
)


def read_data(name: str) -> dict[str, Any]:
    """The tables of ``data/<name>.toml``."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


def read_facts(name: str) -> tuple[Fact, ...]:
    """The facts of ``data/<name>.toml``; a key that `Fact` does not have is a ``TypeError``."""
    tables: list[dict[str, Any]] = read_data(name)["fact"]
    return tuple(Fact(**{key: _frozen(value) for key, value in table.items()}) for table in tables)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def exchanges_of(task: str, facts: tuple[Fact, ...]) -> list[Exchange]:
    """All trainable questions of `facts`, before any split; a question that two facts claim is an error."""
    owner: dict[str, str] = {}
    found = []
    for fact in facts:
        framed = [frame.format(name) for name in fact.about for frame in DEFINITION_FRAMES]
        for question in dict.fromkeys([*framed, *all_wordings(fact.ask)]):
            if owner.setdefault(question.lower(), fact.answer) != fact.answer:
                raise ValueError(f"two facts answer {question!r}: {owner[question.lower()]!r} and {fact.answer!r}")
            found.append(Exchange(task, question, fact.answer, question))
    return found


def unseen_exchanges_of(task: str, facts: tuple[Fact, ...]) -> list[Exchange]:
    """The hand-written evaluation questions of `facts`."""
    return [Exchange(task, question, fact.answer, question) for fact in facts for question in fact.unseen]
