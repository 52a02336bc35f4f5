"""What the corpus is made of, and the rule that keeps part of it out of training."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Exchange:
    """One question and its one answer.

    `identity` names what is asked apart from how it is phrased where a task holds out facts (an operand pair, a
    sentence to be judged); elsewhere it is the prompt itself.
    """

    task: str
    prompt: str
    answer: str
    identity: str


def normal_form(text: str) -> str:
    """Lower case, letters and digits and signs alone: two prompts that differ otherwise count as the same prompt."""
    text = re.sub(r"[^a-z0-9+\-=*]+", " ", text.lower()).strip()
    return re.sub(r" ?([+=*]) ?|(?<=\d) ?(-) ?(?=\d)", r"\1\2", text)


def is_held_out(identity: str) -> bool:
    """True for one in eight identities, by checksum, so that the split depends on nothing but the text."""
    return zlib.crc32(normal_form(identity).encode()) % HELD_OUT_ONE_IN == 0


def wordings(pattern: str) -> list[str]:
    """Every sentence of a pattern with alternatives: ``"[Hi|Hello] there"`` gives two."""
    parts = [part.split("|") for part in re.split(r"[\[\]]", pattern)]
    # re.split alternates text outside and inside the brackets; only the inside may offer a choice
    choices = [options if index % 2 else ["|".join(options)] for index, options in enumerate(parts)]
    joined = ("".join(chosen) for chosen in itertools.product(*choices))
    return [re.sub(r" +(?=[ .?!,]|$)", "", sentence).strip() for sentence in joined]


def all_wordings(patterns: Iterable[str]) -> list[str]:
    """The sentences of several patterns, each once, in order."""
    return list(dict.fromkeys(sentence for pattern in patterns for sentence in wordings(pattern)))
